"""The report of every aggregation, to the run's observer or to the log."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from flwr.app import ArrayRecord, MetricRecord
from flwr.serverapp.strategy import Result

from strategies.clients import client_metrics
from strategies.clients.client_statistics import ClientStatistics
from strategies.clients.roster import Roster
from strategies.clock import WallClock
from strategies.core.run_state import RunState
from strategies.core.stability import StabilityMonitor
from strategies.flower import messages
from strategies.flower.higher_is_better import higher_is_better, measured_name


@dataclass(frozen=True)
class Progress:
    """The report to an observer, after the initial evaluation (aggregation 0) and after every aggregation.

    Attributes
    ----------
    aggregation : int
        Number of aggregations so far.
    time : float
        Seconds of the run's clock.
    arrays : ArrayRecord
        The global model.
    metrics : mapping of str to float
        The metrics of this aggregation and, if ``evaluated``, of the evaluation.
    evaluated : bool
        Whether the model was evaluated.
    clients : mapping of str to list
        At evaluations, the per-client statistics of the strategy, each a list by client index.
    names : mapping of int to str
        The names of the clients that have one, by index.
    """

    aggregation: int
    time: float
    arrays: ArrayRecord
    metrics: Mapping[str, float]
    evaluated: bool
    clients: Mapping[str, list[float]] = field(default_factory=dict)
    names: Mapping[int, str] = field(default_factory=dict)


Observer = Callable[[Progress], None]


log = logging.getLogger("flwr.strategies")

EvaluateFn = Callable[[int, ArrayRecord], MetricRecord | None]
# From the number of an aggregation and the result so far, which it doesn't change, to whether the run ends there.
StopFn = Callable[[int, Result], bool]

_NOT_LOGGED = (
    messages.BYTES_DOWN,
    messages.BYTES_UP,
    messages.BYTES_KEPT,
    messages.BYTES_SERVER,
    messages.DEVICE_SECONDS,
    messages.WASTED_SECONDS,
)


class Reporter:
    """Reports the aggregations of a run.

    Parameters
    ----------
    unit : str
        ``round`` or ``aggregation``. Every round is logged, and an aggregation at most once a second.
    client_state_bytes : callable
        Returns the bytes that the method keeps of its clients.
    model_bytes : callable
        Returns the bytes of the global model and of the server optimizer's memory.
    stability : StabilityMonitor
        Receives the loss of every evaluation: the federated loss, if it is known.

    Attributes
    ----------
    by_client : dict of str to dict
        The clients' metrics of an evaluation that isn't reported yet.
    """

    def __init__(
        self,
        run: RunState,
        client_stats: ClientStatistics,
        roster: Roster,
        unit: str,
        client_state_bytes: Callable[[], int],
        model_bytes: Callable[[], int],
        stability: StabilityMonitor,
    ) -> None:
        self._run, self._client_stats, self._roster = run, client_stats, roster
        self._unit, self._client_state_bytes, self._model_bytes = unit, client_state_bytes, model_bytes
        self.stability = stability
        self.by_client: dict[str, client_metrics.ByClient] = {}
        self._watch, self._quiet_until = WallClock(), 0.0  # of the log

    def report(self, aggregation: int, result: Result, metrics: Mapping[str, Any]) -> None:
        """Report an aggregation by its metrics; its model isn't evaluated now."""
        self._tell(aggregation, self._run.full_model(result.arrays), self._with_costs(metrics))

    def report_evaluation(
        self,
        aggregation: int,
        result: Result,
        metrics: Mapping[str, Any],
        shares: Callable[[], Mapping[str, list[float]]],
        evaluate_fn: EvaluateFn | None = None,
        losses: Callable[[Mapping[int, float]], Mapping[str, float]] = lambda losses: {},
    ) -> None:
        """Evaluate an aggregation's model on the server, and report it.

        Parameters
        ----------
        metrics : mapping
            The metrics of the aggregation, and of the clients' evaluation.
        shares : callable
            Returns the per-client statistics for the observer.
        evaluate_fn : callable, optional
            The server's evaluation.
        losses : callable
            Returns metrics of the loop from the losses f_i of clients, by index.
        """
        run, collected, by_server = self._run, self._with_costs(metrics), dict[str, Any]()
        whole = run.full_model(result.arrays)
        run.evaluated = aggregation
        if evaluate_fn and (evaluated := evaluate_fn(aggregation - run.earlier, whole)) is not None:
            result.evaluate_metrics_serverapp[aggregation] = evaluated
            by_server = dict(evaluated)
            collected.update(by_server)
            reported = client_metrics.by_index(collected, messages.CLIENT_LOSSES)
            if reported is not None:
                collected.update(losses(reported))
            self.by_client |= client_metrics.from_evaluation(collected)
        known = shares() if aggregation and run.options.observer is not None else {}
        clients = self._of_clients(known, collected)
        scalars = _scalars(collected)
        if (loss := scalars.get("federated-loss", scalars.get("loss"))) is not None:
            self.stability.evaluated(float(loss))
        if run.best is not None:
            devices = run.scheduler.real_time  # whose answers may be missing, or come later
            run.best.evaluated(aggregation, result.arrays, scalars, by_server, may_come=devices)
        self._tell(aggregation, whole, collected, clients, evaluated=True)

    def _with_costs(self, metrics: Mapping[str, Any]) -> dict[str, Any]:
        collected: dict[str, Any] = {**metrics, **self._client_stats.costs()}
        kept = self._client_state_bytes()
        if kept:
            collected[messages.BYTES_KEPT] = kept
        collected[messages.BYTES_SERVER] = kept + self._model_bytes()
        return collected

    def _tell(
        self,
        aggregation: int,
        model: ArrayRecord,
        collected: Mapping[str, Any],
        clients: Mapping[str, list[float]] = MappingProxyType({}),
        *,
        evaluated: bool = False,
    ) -> None:
        """Tell the observer of an aggregation, or the log where there is none."""
        scalars, observer = _scalars(collected), self._run.options.observer
        if observer is None:
            self._log_line(aggregation, scalars)
            return
        now, names = self._run.scheduler.now(), self._roster.names
        observer(Progress(aggregation, now, model, scalars, evaluated, clients, names))

    def _of_clients(
        self, clients: Mapping[str, list[float]], collected: dict[str, Any]
    ) -> Mapping[str, list[float]]:
        """Return the per-client statistics, and collect the spread of the clients' metrics."""
        by_client, self.by_client = self.by_client, {}
        self._collect_spread(by_client, collected)
        size = max(map(len, clients.values()), default=0)
        if self._roster.devices:
            clients = {**self._client_stats.columns(size), **clients}
        elif not self._run.scheduler.always:
            clients = {**clients, messages.LOST: self._client_stats.column(messages.LOST, size)}
        if messages.JOULES in clients:
            collected[messages.JOULES] = sum(clients[messages.JOULES])
        columns = client_metrics.columns(by_client, size)
        return {
            **client_metrics.renamed(columns, clients.__contains__, client_metrics.OF_EVALUATION),
            **clients,
        }

    def _collect_spread(
        self, by_client: Mapping[str, client_metrics.ByClient], collected: dict[str, Any]
    ) -> None:
        """Collect the spread of the clients' metrics, and how many clients have a metric if not all do."""
        stated = {**self._run.options.higher_is_better, **(self._run.best.stated if self._run.best else {})}
        most, unknown = max(map(len, by_client.values()), default=0), []
        for name, values in by_client.items():
            collected.update(client_metrics.spread(name, values.values(), stated))
            if measured_name(name) not in stated and higher_is_better(name, stated) is None:
                unknown.append(name)
        for name, values in by_client.items():
            if len(values) < most:
                collected[f"{client_metrics.of_clients(name)}-clients"] = len(values)
        if unknown:
            self._run.warn_once(
                "clients' %s: the worst tenth and the best aren't reported, as it isn't known whether a lower or a "
                "higher value is better; run_options.higher_is_better states it",
                ", ".join(unknown),
            )

    def costs_of_clients(self, size: int) -> dict[str, list[float]]:
        """Return the bytes, the seconds and, where watts are known, the joules of each client's tasks, by index."""
        seconds = self._client_stats.column("seconds", size)
        costs = {
            "bytes": self._client_stats.column("bytes", size),
            messages.DEVICE_SECONDS: seconds,
            messages.WASTED_SECONDS: self._client_stats.column("wasted", size),
        }
        if (watts := self._run.scheduler.watts(size)) is not None:
            costs[messages.JOULES] = [each * power for each, power in zip(seconds, watts, strict=True)]
        return costs

    def _log_line(self, aggregation: int, metrics: Mapping[str, float]) -> None:
        """Log the progress of a run without an observer."""
        reported = ", ".join(
            f"{name} {value:.4g}" for name, value in metrics.items() if name not in _NOT_LOGGED
        )
        now = self._watch.now()
        if (aggregation or reported) and (self._unit == "round" or now >= self._quiet_until):
            self._quiet_until = now + 1.0
            log.info("%s %d%s", self._unit, aggregation, reported and f": {reported}")


def _scalars(metrics: Mapping[str, Any]) -> dict[str, int | float]:
    return {key: value for key, value in metrics.items() if isinstance(value, int | float)}
