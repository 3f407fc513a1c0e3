"""What the tests of whole runs share."""

from typing import Any

from flwr.app import ArrayRecord, MetricRecord

from strategies import FedAvg, Progress


class Recorder:
    """An evaluate_fn and an observer that keep what they are given."""

    def __init__(self) -> None:
        self.evaluated: list[tuple[int, float]] = []
        self.progress: list[Progress] = []

    def evaluate(self, aggregation: int, arrays: ArrayRecord) -> MetricRecord:
        self.evaluated.append((aggregation, float(arrays["w"].numpy()[0])))
        return MetricRecord({"loss": 10.0 * aggregation})

    def observe(self, progress: Progress) -> None:
        self.progress.append(progress)

    @property
    def rounds(self) -> list[int]:
        return [aggregation for aggregation, _ in self.evaluated]


def config(**options: Any) -> Any:
    return FedAvg.Config(**options)
