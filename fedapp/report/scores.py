"""Which of a run's numbers are its model's metrics, which evaluation is best, and what a step of it is called."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence

from fedapp.report import as_number
from strategies.flower.higher_is_better import PERSONAL, less_is_better

LOSS = "loss"
AUTO, NONE = "auto", "none"  # values of the key metrics

# What metrics = "auto" makes of classes and of numbers.
_USUAL = ("accuracy", "rmse", "r2")

# A function that was handed over in Python, with a digest behind its name.
_OF_PYTHON = re.compile(r"^(python:.*)_[0-9a-f]{8}$")

# How metrics of clients begin or end: of which there are any, a method says, and whether clients evaluate.
_OF_CLIENTS = (PERSONAL, "client-")
_OVER_CLIENTS = ("-mean", "-worst-tenth", "-best", "-std")

Record = Mapping[str, object]


def metrics_among(keys: Iterable[str], *named: object) -> list[str]:
    """Return which of a run's numbers are its model's metrics, the one that it is judged by first, loss last.

    Second is what clients' own models have of the first, in the mean, if they have any.

    Parameters
    ----------
    named : str
        Values of the config's key ``metrics``.
    """
    there = set(keys)
    own = [name for names in named for name in _names(names)]
    found = [key for key in dict.fromkeys((_USUAL[0], *own, *_USUAL, LOSS)) if key in there]
    personal = f"{PERSONAL}{found[0]}-mean" if found else ""
    return [*found[:1], personal, *found[1:]] if personal in there else found


def measured_by(named: object) -> list[str]:
    """Return the metrics that a run can have whose config's ``metrics`` is that: loss first."""
    return [LOSS, *(_USUAL if named == AUTO else () if named == NONE else _names(named))]


def may_be_measured(metric: str, named: Iterable[object]) -> bool:
    """Tell whether runs can have a metric, by their values of the key ``metrics``: one of these, or of clients."""
    of_clients = metric.startswith(_OF_CLIENTS) or metric.endswith(_OVER_CLIENTS)
    return of_clients or any(metric in measured_by(each) for each in named)


def _names(named: object) -> list[str]:
    """Return what the metrics of a config are called; one of the user's own as its function is."""
    names = (_OF_PYTHON.sub(r"\1", name.strip()) for name in str(named).split(","))
    return [name.rpartition(":")[2].rpartition(".")[2].replace("_", "-") for name in names]


def best_at(records: Sequence[Record], metric: str) -> int | None:
    """Return the first evaluation with the best value of a metric, by its place; None if none is finite."""
    sign = 1.0 if less_is_better(metric) else -1.0
    scores = [sign * as_number(record.get(metric)) for record in records]
    finite = [place for place, score in enumerate(scores) if math.isfinite(score)]
    return min(finite, key=scores.__getitem__, default=None)


def step_of(records: Iterable[Record]) -> str:
    """Return what a run's steps are called: a strategy without rounds tells how many contributions came."""
    return "aggregation" if any("contributions" in record for record in records) else "round"
