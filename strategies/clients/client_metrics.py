"""The weighted mean of each metric over clients, and its spread between clients.

Jain's index (Σ x)² / (C Σ x²) is from R. Jain, D.-M. Chiu & W. Hawe, "A quantitative measure of fairness and
discrimination for resource allocation in shared computer systems", DEC-TR-301, 1984: 1 if the metric is the same for
all clients, 1/C if one client has all of it.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from flwr.app import Message, MetricRecord, RecordDict

from strategies.flower import messages
from strategies.flower.higher_is_better import higher_is_better

# A function of the contents of the valid replies and of the key of their weights, as in Flower; None is no metric.
MetricsAggregation = Callable[[list[RecordDict], str], MetricRecord | None]

Values = dict[str, float | list[float]]

# Prefixes of clients' metrics with a name of the server's own.
OF_TRAINING, OF_EVALUATION = "train-", "evaluate-"

# Fields of the protocol between server and client, which are no metrics of training.
_NOT_TOLD = (messages.NUM_STEPS, messages.PARTITION_ID, messages.NUM_PARTITIONS)


class MetricsMean:
    """Weighted mean Σ d_i m_i / Σ d_i of each metric, over the clients that report the metric; lists by entry.

    A value that isn't finite counts only if no client's is finite: one client mustn't spoil the others' mean.

    Parameters
    ----------
    key : str
        Name of the metric that holds a client's weight; this metric isn't averaged.
    function : callable, optional
        A user-defined aggregation, called with the contents of all replies in place of the weighted mean.
    prefix : str
        Prefix of metrics with a name of the server's own.
    robust : bool
        Whether the weighted median counts in place of the mean, as with safeguards: a metric may decide about a run,
        and clients with less than half of the weight then can't move it beyond what the others report.
    """

    def __init__(
        self,
        key: str = messages.NUM_EXAMPLES,
        function: MetricsAggregation | None = None,
        prefix: str = OF_TRAINING,
        *,
        robust: bool = False,
    ) -> None:
        self.key, self.prefix, self._robust = key, prefix, robust
        self.function = function
        self.contents: list[RecordDict] = []
        self._sums: dict[tuple[str, int], _Sum] = {}  # by name, and the length of a list, or -1 of numbers

    def add(self, weight: float, content: RecordDict) -> None:
        """Add the metrics in the reply of a client with weight d_i."""
        if self.function is not None:
            self.contents.append(content)
            return
        records = [record for record in content.values() if isinstance(record, MetricRecord)]
        self.add_values(weight, reported_metrics(records, self.key, self.prefix))

    def add_values(self, weight: float, values: Mapping[str, float | list[float]]) -> None:
        """Add the metrics that a client with weight d_i reported, by name."""
        for name, value in values.items():
            self._of(name, len(value) if isinstance(value, list) else _NUMBER).add(weight, value)

    def add_columns(self, weights: Sequence[float], columns: Mapping[str, Sequence[float]]) -> None:
        """Add each metric's numbers, one per client with weight d_i, or NaN where a client has none.

        Equal to ``add_values`` for each client.
        """
        for name, values in columns.items():
            found = self._of(name, _NUMBER)
            for d, value in zip(weights, values, strict=True):
                if not math.isnan(value):
                    found.add(d, value)

    def _of(self, name: str, length: int) -> "_Sum":
        kind = _Median if self._robust else _Sum
        return self._sums.setdefault((name, length), kind([0.0] * (1 if length == _NUMBER else length)))

    def result(self) -> Values:
        """Return the aggregated metrics, by name: of numbers and lists what most clients report."""
        if self.function is not None:
            return dict((self.contents and self.function(self.contents, self.key)) or {})  # type: ignore[arg-type]
        most: dict[str, int] = {}
        for name, length in self._sums:
            at_first = most.setdefault(name, length)
            if self._sums[name, length].number > self._sums[name, at_first].number:
                most[name] = length
        return {
            name: mean if length != _NUMBER else mean[0]
            for name, length in most.items()
            if (mean := self._sums[name, length].mean())
        }


_NUMBER = -1


@dataclass
class _Sum:
    """Σ d_i m_i by entry, Σ d_i, and the number of clients, of those with finite values as long as there are any."""

    values: list[float]
    weight: float = 0.0
    number: int = 0
    finite: bool = False

    def add(self, weight: float, value: float | list[float]) -> None:
        """Add what a client with weight d_i reports."""
        entries = value if isinstance(value, list) else [value]
        if (finite := all(map(math.isfinite, entries))) and not self.finite:
            self.clear()
        if finite or not self.finite:
            self.take(weight, entries)
            self.number += 1
        self.finite |= finite

    def clear(self) -> None:
        """Forget the values that aren't finite."""
        self.values, self.weight, self.number = [0.0] * len(self.values), 0.0, 0

    def take(self, weight: float, entries: list[float]) -> None:
        """Take in a client's values."""
        self.values = [total + weight * entry for total, entry in zip(self.values, entries, strict=True)]
        self.weight += weight

    def mean(self) -> list[float]:
        """Return the mean by entry; [] where no weight is known."""
        return [total / self.weight for total in self.values] if self.weight > 0 else []


@dataclass
class _Median(_Sum):
    """The values of the clients and their weights, of which the weighted median counts."""

    each: list[tuple[float, list[float]]] = field(default_factory=list)

    def clear(self) -> None:
        """Forget the values that aren't finite."""
        super().clear()
        self.each.clear()

    def take(self, weight: float, entries: list[float]) -> None:
        """Take in a client's values."""
        self.weight += weight
        self.each.append((weight, entries))

    def mean(self) -> list[float]:
        """Return the weighted median by entry; [] where no weight is known."""
        if not self.weight > 0:
            return []
        weights = [weight for weight, _ in self.each]
        return [
            weighted_median(column, weights) for column in zip(*(each for _, each in self.each), strict=True)
        ]


def weighted_median(values: Sequence[float], weights: Sequence[float]) -> float:
    """Return the value below and above which there is at most half of the weight; the middle of two such values."""
    order = np.argsort(values, kind="stable")
    ordered, upto = np.asarray(values, np.float64)[order], np.cumsum(np.asarray(weights, np.float64)[order])
    half = upto[-1] / 2
    low, high = np.searchsorted(upto, half * (1 - 1e-12)), np.searchsorted(upto, half * (1 + 1e-12))
    return float(ordered[low] + ordered[min(high, len(ordered) - 1)]) / 2


def merged_metrics(ours: Mapping[str, Any], clients: Mapping[str, Any]) -> MetricRecord:
    """Return the metrics of an aggregation, and of its clients' training beside them, ``renamed``."""
    named = renamed(clients, lambda name: name in ours or messages.is_ours(name), OF_TRAINING)
    return MetricRecord({**ours, **named})


def renamed(values: Mapping[str, Any], taken: Callable[[str], bool], prefix: str) -> dict[str, Any]:
    """Return clients' values by name, with a prefix before a name that is ``taken``: ``train-participants``."""
    named: dict[str, Any] = {}
    for name, value in values.items():
        free = name
        while taken(free) or (free != name and (free in values or free in named)):
            free = prefix + free
        named[free] = value
    return named


def reported_metrics(records: Iterable[MetricRecord], key: str, prefix: str = OF_TRAINING) -> Values:
    """Return the reported metrics of a reply by name, without the weight ``key`` and fields of the protocol.

    Names of metrics that the server reports itself have the ``prefix``.
    """
    values = {name: value for record in records for name, value in messages.values_of(record).items()}
    others = {name: value for name, value in values.items() if name != key and name not in _NOT_TOLD}
    return renamed(others, messages.is_ours, prefix)


#: A metric by client index, for the clients that reported the metric.
ByClient = dict[int, float]

WORST = "worst-tenth"

# At most this many of the metrics that clients report are kept for each client.
MOST_BY_CLIENT = 20


def spread(
    metric: str, values: Iterable[float], stated: Mapping[str, bool | None] | None = None
) -> dict[str, float]:
    """Return the spread of a metric over clients, all with equal weight; {} without any client.

    Parameters
    ----------
    stated : mapping of str to bool, optional
        Whether a higher value is better, of metrics whose name doesn't say so.

    Returns
    -------
    dict
        ``client-METRIC-mean`` and ``-std``; where the metric's direction is known, ``-worst-tenth`` (the mean over
        the worst ⌈C/10⌉ clients) and ``-best``; and ``-jain`` of a score without negative values. Metrics of personal
        models keep their prefix: ``personal-METRIC-mean``.
    """
    column = np.sort(np.fromiter(values, dtype=np.float64))
    if not column.size:
        return {}
    is_score = higher_is_better(metric, stated)
    if is_score:
        column = column[::-1]  # the best come first
    if np.isnan(column).any():  # with a NaN, the worst clients are unknown
        column[:] = np.nan
    worst = column[-math.ceil(column.size / 10) :]
    with np.errstate(invalid="ignore", over="ignore"):  # an infinite loss has no spread
        numbers = {"mean": column.mean(), WORST: worst.mean(), "best": column[0], "std": column.std()}
        squares = float(column @ column)
    if is_score is None:
        numbers = {name: numbers[name] for name in ("mean", "std")}
    if is_score and (column >= 0).all() and 0 < squares < math.inf:
        numbers["jain"] = column.sum() ** 2 / (column.size * squares)
    return {f"{of_clients(metric)}-{name}": float(number) for name, number in numbers.items()}


def of_clients(metric: str) -> str:
    """Return the name that a client's metric has among the metrics of the run."""
    return metric if metric.startswith(messages.OF_PERSONAL) else f"client-{metric}"


def from_evaluation(collected: dict[str, Any]) -> dict[str, ByClient]:
    """Remove the per-client metrics from the result of an evaluation on the server, and return them by name."""
    names = {messages.CLIENT_LOSSES: "loss"} | {
        name: name.removeprefix(messages.PER_CLIENT)
        for name in collected
        if name.startswith(messages.PER_CLIENT)
    }
    found = {metric: by_index(collected, name) for name, metric in names.items()}
    for name in names:
        collected.pop(name, None)
        collected.pop(f"{messages.WITHOUT}{name}", None)
    return {metric: each for metric, each in found.items() if each is not None}


def by_index(collected: Mapping[str, Any], name: str) -> ByClient | None:
    """Return a metric of the clients that have a value, from an evaluation on the server that lists it by index."""
    reported, without = collected.get(name), collected.get(f"{messages.WITHOUT}{name}", [])
    if not isinstance(reported, list):
        return None
    return {index: float(value) for index, value in enumerate(reported) if index not in without}


def from_replies(
    replies: Iterable[Message], index_of: Callable[[int], int | None], key: str
) -> dict[str, ByClient]:
    """Return the metrics in clients' replies to an evaluation, numbers only, without the weight ``key``."""
    metrics: dict[str, ByClient] = {}
    for reply in replies:
        index = None if reply.has_error() else index_of(reply.metadata.src_node_id)
        if index is None:
            continue
        records = [record for record in reply.content.values() if isinstance(record, MetricRecord)]
        for name, value in reported_metrics(records, key, OF_EVALUATION).items():
            if not isinstance(value, list):
                metrics.setdefault(name, {})[index] = float(value)
    return dict(list(metrics.items())[:MOST_BY_CLIENT])


def columns(
    metrics: Mapping[str, Mapping[int, float]], least: int = 0, missing: float = math.nan
) -> dict[str, list[float]]:
    """Return metrics as lists by client index, with ``least`` entries or more; ``missing`` where there is none."""
    size = max([least, *(max(each) + 1 for each in metrics.values() if each)])
    return {
        name: [float(each.get(index, missing)) for index in range(size)] for name, each in metrics.items()
    }


def shares(values: Sequence[float]) -> list[float]:
    """Return each value's share of the sum of all values; zeros if the sum is 0."""
    total = sum(values)
    return [value / total if total > 0 else 0.0 for value in values]
