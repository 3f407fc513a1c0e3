"""A run's numbers for Prometheus, on a port of its own while the run goes: an extra of the package."""

import socket
from collections.abc import Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from fedapp.config import ConfigError, RunConfig
from fedapp.server.record import Entry, Observer
from strategies import FederatedStrategy
from strategies.clients.client_statistics import OUTCOMES, ClientRecord
from strategies.clock import WallClock
from strategies.flower import messages

if TYPE_CHECKING:
    from prometheus_client.core import Metric

# Clients with time series of their own, those with the lowest indices; the others are one, called `others`.
MOST_CLIENTS = 100

# What is given by the totals, and the numbers of an aggregation that others say better.
_SUMMED = (messages.FAILURES, messages.BYTES_DOWN, messages.BYTES_UP)


class Exporter(Observer):
    """Answers Prometheus with how the run stands at that moment.

    Parameters
    ----------
    labels : mapping of str to str
        Of the run: its name, strategy and engine.
    """

    def __init__(self, config: RunConfig, strategy: FederatedStrategy, labels: dict[str, str]) -> None:
        self.config, self.strategy, self.labels = config, strategy, labels
        self.clock = WallClock()
        self.numbers: dict[str, float] = {}
        self.clients: dict[str, list[float]] = {}
        self.client_weights: dict[int, float] = {}
        self.names: dict[int, str] = {}
        self._last: float | None = None
        self._seconds, self._count = 0.0, 0

    def begin(self) -> None:
        """Listen from now on.

        Raises
        ------
        ConfigError
            If another has taken the port since it was checked.
        """
        from prometheus_client import CollectorRegistry, start_http_server

        registry = CollectorRegistry()
        registry.register(self)  # by ``collect``, Prometheus' Collector interface
        try:
            self._server, self._thread = start_http_server(
                self.config.metrics_port, self.config.metrics_host, registry
            )
        except OSError as error:
            raise _refused(self.config, error) from None

    def record(self, entry: Entry) -> None:
        """Take what an aggregation tells."""
        now, progress = self.clock.now(), entry.progress
        if self._last is not None:
            self._seconds, self._count = self._seconds + now - self._last, self._count + 1
        self._last = now
        self.numbers.update(
            {key: value for key, value in entry.metrics.items() if isinstance(value, int | float)}
        )
        self.names = dict(progress.names)
        if progress.evaluated:
            self.clients = dict(progress.clients)
            self.client_weights = self.strategy.session.client_weights()

    def end(self, status: str) -> None:
        """Listen no more."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def collect(self) -> "Iterator[Metric]":
        """Yield the metrics; called by the server's thread, while the run goes on."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, SummaryMetricFamily

        strategy = self.strategy
        info = GaugeMetricFamily("fedapp_run", "The run; always 1.", labels=list(self.labels))
        info.add_metric(list(self.labels.values()), 1)
        yield info
        for name, meaning, value in (
            ("aggregations", "Aggregations so far.", strategy.session.aggregations),
            ("aggregations_planned", "Aggregations of the whole run.", self.config.num_server_rounds),
            ("clients_connected", "Clients that are there.", len(strategy.session.clients)),
            ("clients_at_work", "Clients whose answer is waited for.", len(strategy.session.busy_clients())),
            ("run_seconds", "Real seconds since the run began, or was resumed.", self.clock.now()),
        ):
            yield GaugeMetricFamily(f"fedapp_{name}", meaning, value=value)
        yield SummaryMetricFamily(
            "fedapp_aggregation_seconds",
            "Real seconds from one aggregation to the next.",
            count_value=self._count,
            sum_value=self._seconds,
        )
        number = GaugeMetricFamily("fedapp_number", "A number of metrics.jsonl, the last.", labels=["name"])
        for key, value in self.numbers.copy().items():
            if key not in _SUMMED:
                number.add_metric([key], value)
        yield number
        sent = CounterMetricFamily("fedapp_bytes", "Bytes of arrays.", labels=["direction"])
        for way in ("up", "down"):
            sent.add_metric([way], self.numbers.get(f"bytes-{way}", 0))
        yield sent
        yield from self._updates()
        yield from self._by_client()

    def _updates(self) -> "Iterator[Metric]":
        from prometheus_client.core import CounterMetricFamily

        client_stats = [account for _, account in self.strategy.session.client_stats.items()]
        updates = CounterMetricFamily(
            "fedapp_updates", "Tasks that ended, by what came of them.", labels=["outcome"]
        )
        for outcome in OUTCOMES:
            updates.add_metric([outcome], sum(getattr(account, outcome) for account in client_stats))
        yield updates
        clipped = sum(account.clipped for account in client_stats)
        yield CounterMetricFamily("fedapp_updates_clipped", "Updates that were shortened.", value=clipped)

    def _by_client(self) -> "Iterator[Metric]":
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        who = ["client", "device"]
        updates = CounterMetricFamily(
            "fedapp_client_updates", "The same by client.", labels=[*who, "outcome"]
        )
        for label, account in _bounded(dict(self.strategy.session.client_stats.items())).items():
            for outcome in OUTCOMES:
                updates.add_metric([*self._who(label), outcome], getattr(account, outcome))
        yield updates
        at_work = {client.index: 0 for client in self.strategy.session.clients}
        gauges: dict[str, dict[int, Any]] = {
            "at_work": at_work | dict.fromkeys(self.strategy.session.busy_clients(), 1),
            "importance": self.client_weights,
            "weight": dict(enumerate(self.clients.get("weight", ()))),
            "task_seconds": dict(enumerate(self.clients.get("task-time", ()))),
        }
        for name, values in gauges.items():
            gauge = GaugeMetricFamily(f"fedapp_client_{name}", _MEANINGS[name], labels=who)
            for index in sorted(values)[:MOST_CLIENTS]:
                gauge.add_metric(self._who(index), values[index])
            yield gauge

    def _who(self, index: int | None) -> list[str]:
        return ["others", ""] if index is None else [str(index), self.names.get(index, "")]


_MEANINGS = {
    "at_work": "Whether its answer is waited for.",
    "importance": "p_i, what it counts in the objective.",
    "weight": "d_i, what one update of it counts (asynchronous strategies).",
    "task_seconds": "Mean seconds of its tasks by the run's clock (asynchronous strategies).",
}


def _bounded(client_stats: dict[int, ClientRecord]) -> dict[int | None, ClientRecord]:
    """Return the accounts of the first ``MOST_CLIENTS`` clients, and under None the sum of all other accounts."""
    first: dict[int | None, ClientRecord] = {
        index: client_stats[index] for index in sorted(client_stats)[:MOST_CLIENTS]
    }
    if rest := [account for index, account in client_stats.items() if index not in first]:
        first[None] = ClientRecord(**{key: sum(getattr(each, key) for each in rest) for key in vars(rest[0])})
    return first


def check_exporter(config: RunConfig) -> None:
    """Raise ConfigError if the package isn't installed, or nobody can listen on the port."""
    if find_spec("prometheus_client") is None:
        raise ConfigError(
            f"metrics-port = {config.metrics_port}: prometheus-client isn't installed; pip install '.[prometheus]', "
            "or metrics-port = 0"
        )
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            config.metrics_host, config.metrics_port, type=socket.SOCK_STREAM
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server does
            probe.bind(address)
    except OSError as error:
        raise _refused(config, error) from None


def _refused(config: RunConfig, error: OSError) -> ConfigError:
    return ConfigError(
        f"metrics-port = {config.metrics_port}, metrics-host = {config.metrics_host!r}: can't be listened on "
        f"({error.strerror}); allowed are a free port of this machine, or 0 for none"
    )
