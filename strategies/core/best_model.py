"""The best model of a run so far, by a metric of its evaluations, and the stop conditions that evaluations decide.

A run ends early if a metric has reached its target (``stop_at``), or if none of the last ``patience`` evaluations was
better than the best one before them (early stopping). The evaluation of the initial model counts as one.
"""

import logging
import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from flwr.app import ArrayRecord

from strategies.clients.client_metrics import WORST
from strategies.core.config import BEST, StrategyConfig
from strategies.flower import messages
from strategies.flower.arrays import Layout, flat
from strategies.flower.errors import RunError
from strategies.flower.higher_is_better import (
    higher_is_better,
    measured_name,
    split_direction,
    unknown_direction,
)

log = logging.getLogger("flwr.strategies")

# Endings of metrics that say how clients' values differ (strategies/clients/client_metrics.py).
SPREADS = ("-mean", "-std", "-best", f"-{WORST}", "-jain")

_MODEL, _REST = "best-model", "best"  # names in a state


@dataclass(frozen=True)
class Target:
    """A bound that a metric is to reach: ``accuracy>=0.9``."""

    metric: str
    at_least: bool
    bound: float

    @classmethod
    def read(cls, text: str) -> "Target":
        """Read a target that ``strategies.core.config.TARGET`` matches."""
        metric, sign, bound = re.split(r"\s*([<>]=)\s*", text.strip())
        return cls(metric, sign == ">=", float(bound))

    def reached(self, value: float) -> bool:
        """Return True if a value reaches the bound; NaN never does."""
        return value >= self.bound if self.at_least else value <= self.bound

    def __str__(self) -> str:
        """Say the target as it was given."""
        return f"{self.metric} {'>=' if self.at_least else '<='} {self.bound:g}"


class BestModel:
    """The best evaluation of a run and its model, and whether the run is to end.

    Raises
    ------
    ValueError
        If evaluations are compared by a metric whose direction isn't known.

    Attributes
    ----------
    keeps : bool
        Whether the best model is kept, beside the last one.
    by : str, optional
        The metric by which evaluations are compared; None if they aren't.
    watched : tuple of str
        The metrics that an evaluation must have.
    stated : mapping of str to bool
        The direction of the metric that ``best_of = "min:NAME"`` or ``"max:NAME"`` states: whether higher is better.
    aggregation : int, optional
        Number of the aggregation that made the best model; None before the first evaluation.
    value : float
        Its value of the metric.
    arrays : ArrayRecord, optional
        The best model, where it is kept.
    over : str
        Why the run is to end: "target reached: …" or "no progress: …"; "" as long as it goes on.
    """

    def __init__(self, config: StrategyConfig) -> None:
        self.keeps, self._most_without_better = config.keep == BEST, config.patience
        stated, name = split_direction(config.best_of)
        self.by = name if config.compares_evaluations else None
        self.stated: Mapping[str, bool] = {} if stated is None else {measured_name(name): stated}
        is_score = higher_is_better(name, self.stated)
        if self.by is not None and is_score is None:
            raise ValueError(
                f"best_of = {name!r}: {unknown_direction(name)}; 'min:{name}' or 'max:{name}' states it"
            )
        self._sign = 1.0 if is_score else -1.0
        self._target = Target.read(config.stop_at) if config.stop_at else None
        named = (self.by, self._target.metric if self._target else None)
        self.watched = tuple(dict.fromkeys(filter(None, named)))
        self.aggregation: int | None = None
        self.arrays: ArrayRecord | None = None
        self.value, self.over = math.nan, ""
        self._without = 0  # evaluations since the best one
        self._last: dict[str, Sequence[float]] = {}  # of each watched metric: the aggregation, and its value
        self._saved: np.ndarray | None = None  # the best model (D,) of a state, until its layout is known
        self._asked: dict[int, ArrayRecord] = {}  # models that clients evaluate, by aggregation
        self._said = False

    def state(self) -> dict[str, Any]:
        """Return the best evaluation and its model (D,) for a checkpoint."""
        rest: dict[str, Any] = {"aggregation": self.aggregation, "value": self.value}
        rest |= {"without-progress": self._without, "last": self._last}
        model = {} if self.arrays is None else {_MODEL: flat(self.arrays)}
        return {_REST: rest, **model}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the best evaluation of a state; a state of a run without these conditions has none."""
        if (rest := state.get(_REST)) is None:
            return
        self.aggregation, self.value = rest["aggregation"], rest["value"]
        self._without, self._last = rest["without-progress"], dict(rest["last"])
        self._saved = state.get(_MODEL)
        self._judge()

    def refuse_spreads(self) -> None:
        """Raise RunError if a metric that decides is a spread over clients, which one client's answer makes."""
        for metric in self.watched:
            if metric.endswith(SPREADS) and metric.startswith(("client-", messages.OF_PERSONAL)):
                key, without = "best_of" if metric == self.by else "stop_at", metric.rpartition("-")[0]
                raise RunError(
                    f"{key} = {metric!r}: one client's answer decides it; allowed with safeguards is "
                    f"{without.removesuffix('-worst')!r}, the weighted median of the clients' answers"
                )

    def begin(self, layout: Layout) -> None:
        """Give the restored model its arrays, when the layout of the run's model is known."""
        if self._saved is not None and self.keeps:
            self.arrays = layout.to_record(np.array(self._saved, dtype=np.float64))
        self._saved = None

    def asked(self, aggregation: int, arrays: ArrayRecord) -> None:
        """Note which model clients evaluate in the background, whose metrics come with the report of a later one."""
        if self.keeps:  # of the one before the answers may not be reported yet
            self._asked = dict([*self._asked.items()][-1:]) | {aggregation: arrays}

    def evaluated(
        self,
        aggregation: int,
        arrays: ArrayRecord,
        metrics: Mapping[str, float],
        by_server: Collection[str] = (),
        *,
        may_come: bool = False,
    ) -> None:
        """Take note of an evaluation.

        Parameters
        ----------
        metrics : mapping of str to float
            All metrics of the report. If ``strategies.messages.EVALUATED`` is among them, those that aren't in
            ``by_server`` are of the model of that earlier aggregation.
        may_come : bool
            Whether a metric that is missing may come with a later report: clients evaluate in the background.

        Raises
        ------
        RunError
            If the evaluation after an aggregation has no such metric, and none had before; not after a round without
            participants.
        """
        if self.over:
            return
        for metric in self.watched:
            if metric not in metrics:
                self._missing(metric, aggregation, metrics, may_come=may_come)
                continue
            earlier = messages.EVALUATED in metrics and metric not in by_server
            number = int(metrics[messages.EVALUATED]) if earlier else aggregation
            model = self._asked.get(number, arrays) if earlier else arrays
            value = float(metrics[metric])
            self._last[metric] = [number, value]
            if metric == self.by:
                self._rank(number, model, value)
        self._judge()
        if self.over:
            log.info("%s: the run ends", self.over)

    def _rank(self, aggregation: int, arrays: ArrayRecord, value: float) -> None:
        if math.isfinite(value) and not self._sign * value <= self._sign * self.value:
            self.aggregation, self.value, self._without = aggregation, value, 0
            self.arrays = arrays if self.keeps else None
        else:
            self._without += 1

    def warn_without_value(self) -> None:
        """Warn at the end of a run if no evaluation could be the best one."""
        if self.by is not None and self.aggregation is None and self.by in self._last:
            log.warning(
                "best_of = %r: no evaluation had a finite value, so none is the best%s",
                self.by,
                ", and the last model is kept" if self.keeps else "",
            )

    def _judge(self) -> None:
        """Say why the run is to end, if it is."""
        target, number, value = self._target, 0.0, math.nan
        if target is not None:
            number, value = self._last.get(target.metric, (number, value))
        if target is not None and target.reached(value):
            self.over = (
                f"target reached: {target.metric} {value:.4g} at aggregation {number:.0f}, asked for {target}"
            )
        elif self._most_without_better and self._without >= self._most_without_better:
            best = "none was finite"
            if self.aggregation is not None:
                best = f"the best is {self.value:.4g} at aggregation {self.aggregation}"
            self.over = f"no progress: {self.by} was no better in {self._without} evaluations, {best}"

    def _missing(
        self, metric: str, aggregation: int, metrics: Mapping[str, float], *, may_come: bool
    ) -> None:
        nobody = metrics.get(messages.PARTICIPANTS, 1) == 0  # whose training has metrics
        if not aggregation or nobody or metric in self._last:
            return
        names = ", ".join(sorted(name for name in metrics if name not in messages.OURS)) or "none"
        key = "best_of" if metric == self.by else "stop_at"
        said = f"{key} = {metric!r}: no evaluation has this metric; the metrics of this one are {names}"
        if not may_come:
            raise RunError(said)
        if not self._said:
            self._said = True
            log.warning("%s", said)
