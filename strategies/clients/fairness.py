"""What a model is worth to each client: its metrics client by client, and how unequal they are.

Jain's index (Σ x)² / (C Σ x²) is from R. Jain, D.-M. Chiu & W. Hawe, "A quantitative measure of fairness and
discrimination for resource allocation in shared computer systems", DEC-TR-301, 1984: 1 if all clients have the same,
1/C if one has all there is.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from flwr.app import Message, MetricRecord

from strategies.clients.metrics import told
from strategies.flower import messages
from strategies.flower.higher_is_better import less_is_better

#: A metric of clients: a number by client index, of those that have one.
ByClient = dict[int, float]

WORST = "worst-tenth"

# Of the metrics that clients tell, so many are kept client by client.
MOST_BY_CLIENT = 20


def spread(metric: str, values: Iterable[float]) -> dict[str, float]:
    """Return how a metric is spread over clients, each counting alike; {} if there are none.

    Returns
    -------
    dict
        ``client-METRIC-mean``, ``-worst-tenth`` (the mean over the worst ⌈C/10⌉ clients), ``-best``, ``-std``; and
        ``-jain`` of a score that is nowhere below 0. One of personal models keeps its name: ``personal-METRIC-mean``.
    """
    column = np.sort(np.fromiter(values, dtype=np.float64))
    if not column.size:
        return {}
    if not less_is_better(metric):
        column = column[::-1]  # the best come first
    if np.isnan(column).any():  # nobody can say who is worst
        column[:] = np.nan
    worst = column[-math.ceil(column.size / 10) :]
    with np.errstate(invalid="ignore", over="ignore"):  # of a loss that is infinite there is no spread
        numbers = {"mean": column.mean(), WORST: worst.mean(), "best": column[0], "std": column.std()}
    if not less_is_better(metric) and (column >= 0).all() and (squares := float(column @ column)) > 0:
        numbers["jain"] = column.sum() ** 2 / (column.size * squares)
    return {f"{of_clients(metric)}-{name}": float(number) for name, number in numbers.items()}


def of_clients(metric: str) -> str:
    """Return what a metric that clients tell is called among those of a run."""
    return metric if metric.startswith(messages.OF_PERSONAL) else f"client-{metric}"


def from_evaluation(collected: dict[str, Any]) -> dict[str, ByClient]:
    """Take the metrics of all clients out of what an evaluation on the server tells."""
    names = {messages.CLIENT_LOSSES: "loss"} | {
        name: name.removeprefix(messages.PER_CLIENT)
        for name in collected
        if name.startswith(messages.PER_CLIENT)
    }
    lists = {metric: collected.pop(name, None) for name, metric in names.items()}
    return {
        metric: dict(enumerate(map(float, each))) for metric, each in lists.items() if isinstance(each, list)
    }


def from_replies(
    replies: Iterable[Message], index_of: Callable[[int], int | None], key: str
) -> dict[str, ByClient]:
    """Return the metrics that clients replied to an evaluation, numbers only; by ``key`` they are weighed."""
    metrics: dict[str, ByClient] = {}
    for reply in replies:
        index = None if reply.has_error() else index_of(reply.metadata.src_node_id)
        if index is None:
            continue
        records = [record for record in reply.content.values() if isinstance(record, MetricRecord)]
        for name, value in told(records, key).items():
            if not isinstance(value, list):
                metrics.setdefault(name, {})[index] = float(value)
    return dict(list(metrics.items())[:MOST_BY_CLIENT])


def columns(metrics: Mapping[str, ByClient], least: int = 0) -> dict[str, list[float]]:
    """Return metrics as lists by client index, of so many entries at least; NaN for those that have none."""
    size = max([least, *(max(each) + 1 for each in metrics.values() if each)])
    return {name: [each.get(index, math.nan) for index in range(size)] for name, each in metrics.items()}


def shares(values: Sequence[float]) -> list[float]:
    """Return each value's share of their sum; zeros if that is 0."""
    total = sum(values)
    return [value / total if total > 0 else 0.0 for value in values]
