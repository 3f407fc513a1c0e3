"""What a run reports after every aggregation: to its observer, or to the log."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from flwr.app import ArrayRecord, MetricRecord
from flwr.serverapp.strategy import Result

from strategies.clients import client_metrics
from strategies.clients.accounts import Accounts
from strategies.clients.roster import Roster
from strategies.clock import WallClock
from strategies.core.run_state import RunState
from strategies.flower import messages


@dataclass(frozen=True)
class Progress:
    """What an observer is told after the initial evaluation (aggregation 0) and after every aggregation.

    Attributes
    ----------
    aggregation : int
        Number of aggregations so far.
    time : float
        Seconds of the run's clock.
    arrays : ArrayRecord
        The global model.
    metrics : mapping of str to float
        Of this aggregation and, if ``evaluated``, of the evaluation.
    evaluated : bool
        Whether the model was evaluated.
    clients : mapping of str to list
        At evaluations, what a strategy knows of each client, by index.
    names : mapping of int to str
        What clients that are devices are called, by index; those that have a name.
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

_NOT_LOGGED = (
    messages.BYTES_DOWN,
    messages.BYTES_UP,
    messages.BYTES_KEPT,
    messages.DEVICE_SECONDS,
    messages.WASTED_SECONDS,
)


class Reporter:
    """Reports a run.

    Parameters
    ----------
    unit : str
        What is counted: ``round`` or ``aggregation``. The log has each round, and aggregations once a second at most.
    bytes_kept : callable
        How much the method keeps of clients, in bytes.

    Attributes
    ----------
    observer : callable, optional
        Told of every aggregation, in place of the log.
    by_client : dict of str to dict
        What clients told in an evaluation that isn't reported yet.
    """

    def __init__(
        self,
        run: RunState,
        accounts: Accounts,
        roster: Roster,
        unit: str,
        bytes_kept: Callable[[], int],
        observer: Observer | None = None,
    ) -> None:
        self._run, self._accounts, self._roster = run, accounts, roster
        self._unit, self._bytes_kept = unit, bytes_kept
        self.observer = observer
        self.by_client: dict[str, client_metrics.ByClient] = {}
        self._watch, self._quiet_until = WallClock(), 0.0  # of the log

    def report(
        self,
        aggregation: int,
        result: Result,
        metrics: Mapping[str, Any],
        *,
        evaluate_fn: EvaluateFn | None = None,
        shares: Callable[[], Mapping[str, list[float]]] | None = None,
        losses: Callable[[list[float]], Mapping[str, float]] | None = None,
    ) -> None:
        """Report an aggregation.

        Parameters
        ----------
        metrics : mapping
            Of the aggregation, and of the clients' evaluation.
        evaluate_fn : callable, optional
            The server's evaluation.
        shares : callable, optional
            What is known of each client, by index, which an observer is told; given where the model is evaluated now.
        losses : callable, optional
            What the loop makes of the losses f_i of all clients, by index.
        """
        collected: dict[str, Any] = {**metrics, **self._accounts.costs()}
        if kept := self._bytes_kept():
            collected[messages.BYTES_KEPT] = kept
        clients: Mapping[str, list[float]] = {}
        if shares is not None:
            self._run.evaluated = aggregation
            if evaluate_fn and (evaluated := evaluate_fn(aggregation, result.arrays)) is not None:
                result.evaluate_metrics_serverapp[aggregation] = evaluated
                collected.update(evaluated)
                if losses is not None and isinstance(told := collected.get(messages.CLIENT_LOSSES), list):
                    collected.update(losses(told))
                self.by_client |= client_metrics.from_evaluation(collected)
            known = shares() if aggregation and self.observer is not None else {}
            clients = self._of_clients(known, collected)
        scalars = {key: value for key, value in collected.items() if isinstance(value, int | float)}
        if self.observer is None:
            self._log_line(aggregation, scalars)
        else:
            now, names = self._run.pace.now(), self._roster.names
            self.observer(
                Progress(aggregation, now, result.arrays, scalars, shares is not None, clients, names)
            )

    def _of_clients(
        self, clients: Mapping[str, list[float]], collected: dict[str, Any]
    ) -> Mapping[str, list[float]]:
        """Return what is known of each client, and collect how the clients' metrics are spread."""
        by_client, self.by_client = self.by_client, {}
        for name, values in by_client.items():
            collected.update(client_metrics.spread(name, values.values()))
        size = max(map(len, clients.values()), default=0)
        if self._roster.devices:
            clients = {**self._accounts.columns(size), **clients}
        elif not self._run.pace.always:
            clients = {**clients, messages.LOST: self._accounts.column(messages.LOST, size)}
        if messages.JOULES in clients:
            collected[messages.JOULES] = sum(clients[messages.JOULES])
        return {**client_metrics.columns(by_client, size), **clients}

    def costs_of_clients(self, size: int) -> dict[str, list[float]]:
        """Return what each client's tasks took, by index: bytes, seconds, and energy where watts are known."""
        seconds = self._accounts.column("seconds", size)
        costs = {
            "bytes": self._accounts.column("bytes", size),
            messages.DEVICE_SECONDS: seconds,
            messages.WASTED_SECONDS: self._accounts.column("wasted", size),
        }
        if (watts := self._run.pace.watts(size)) is not None:
            costs[messages.JOULES] = [each * power for each, power in zip(seconds, watts, strict=True)]
        return costs

    def _log_line(self, aggregation: int, metrics: Mapping[str, float]) -> None:
        """Log how a run goes that nobody observes."""
        now = self._watch.now()
        if self._unit == "round" or now >= self._quiet_until:
            self._quiet_until = now + 1.0
            told = ", ".join(
                f"{name} {value:.4g}" for name, value in metrics.items() if name not in _NOT_LOGGED
            )
            log.info("%s %d%s", self._unit, aggregation, told and f": {told}")
