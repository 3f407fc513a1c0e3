"""Statistics of an asynchronous run since its last evaluation."""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, MetricRecord, RecordDict

from strategies.clients.client_metrics import reported_metrics
from strategies.flower import messages
from strategies.updates.pipeline import Contribution


@dataclass
class IntervalStatistics:
    """Counts and sums since the last evaluation."""

    staleness: list[int] = field(default_factory=list)
    values: dict[str, list[Any]] = field(default_factory=dict)  # of each metric
    owners: dict[str, list[int]] = field(default_factory=dict)  # the clients of the values; −1: of several
    # Of replies, but for arrays, where a function of the user's wants them; not saved with the run.
    contents: list[RecordDict] = field(default_factory=list)
    bytes_up: int = 0
    bytes_down: int = 0
    failures: int = 0
    clipped: int = 0
    discarded: int = 0
    lost: int = 0
    unevaluated: bool = False

    def take(self, contributions: Sequence[Contribution], key: str = messages.NUM_EXAMPLES) -> None:
        """Count the contributions of an aggregation; ``key`` is the metric by which clients are weighted."""
        self.unevaluated = True
        for contribution in contributions:
            self.staleness.append(contribution.staleness)
            self.bytes_up += contribution.num_bytes
            for name, value in reported_metrics([contribution.metrics], key).items():
                self.add_values(name, [value], contribution.client.index)

    def add_values(self, name: str, values: Sequence[Any], owner: int = -1) -> None:
        """Add values of a metric, of one client or of several."""
        self.values.setdefault(name, []).extend(values)
        self.owners.setdefault(name, []).extend([owner] * len(values))

    def add_content(self, content: RecordDict) -> None:
        """Keep a reply's content for a function of metrics, without its arrays, which would fill the memory."""
        small: dict[str, messages.RecordType] = {
            name: record for name, record in content.items() if not isinstance(record, ArrayRecord)
        }
        self.contents.append(RecordDict(small))

    def count_bytes(self, down: int, up: int) -> None:
        """Count bytes that went to clients, and that came from them, beside the models."""
        self.bytes_down += down
        self.bytes_up += up

    def discard(self, contribution: Contribution) -> None:
        """Count work that doesn't count."""
        self.discarded += 1
        self.bytes_up += contribution.num_bytes

    def metrics(self) -> MetricRecord:
        """Return the counts, and the unweighted mean of staleness over contributions."""
        metrics = MetricRecord(
            {
                messages.CONTRIBUTIONS: len(self.staleness),
                messages.FAILURES: self.failures,
                messages.BYTES_DOWN: self.bytes_down,
                messages.BYTES_UP: self.bytes_up,
            }
        )
        seldom = {
            messages.CLIPPED: self.clipped,
            messages.DISCARDED: self.discarded,
            messages.LOST_TASKS: self.lost,
        }
        metrics.update({name: number for name, number in seldom.items() if number})
        if self.staleness:
            metrics["staleness-mean"] = float(np.mean(self.staleness))
            metrics["staleness-max"] = max(self.staleness)
        return metrics

    def metrics_of_clients(self, *, robust: bool = False) -> dict[str, Any]:
        """Return the unweighted mean of each of the clients' metrics over contributions.

        Values that aren't finite count only if no value is finite. ``robust``: the median of the clients' own means,
        as a metric may decide about a run.
        """
        found: dict[str, Any] = {}
        for name, values in self.values.items():
            if len({np.shape(value) for value in values}) != 1:
                continue
            array, owners = np.array(values, np.float64), np.array(self.owners.get(name, [-1] * len(values)))
            finite = np.isfinite(array).reshape(len(array), -1).all(axis=1)
            if finite.any():
                array, owners = array[finite], owners[finite]
            if robust and (owners >= 0).all():
                array = np.median(
                    [array[owners == owner].mean(axis=0) for owner in np.unique(owners)], axis=0
                )
                found[name] = array.tolist()
            else:
                found[name] = np.mean(array, axis=0).tolist()
        return found

    def state(self) -> dict[str, Any]:
        """Return the counts for a checkpoint, as JSON values; ``contents`` isn't among them."""
        return {
            item.name: deepcopy(getattr(self, item.name)) for item in fields(self) if item.name != "contents"
        }

    @classmethod
    def restored(cls, state: Mapping[str, Any]) -> "IntervalStatistics":
        """Return the statistics of a state."""
        return cls(**deepcopy(dict(state)))
