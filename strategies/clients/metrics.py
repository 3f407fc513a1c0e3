"""What clients' metrics are together: a weighted mean of each, or what a function of the user's makes of them."""

from collections.abc import Callable, Iterable, Mapping, Sequence

from flwr.app import MetricRecord, RecordDict

from strategies.flower import messages

# From the contents of valid replies and the key that they are weighted by, as in Flower.
MetricsAggregation = Callable[[list[RecordDict], str], MetricRecord]

Values = dict[str, float | list[float]]

# Of the exchange, not of training.
_NOT_TOLD = (messages.NUM_STEPS, messages.PARTITION_ID, messages.NUM_PARTITIONS)


class MetricsMean:
    """Σ d_i m_i / Σ d_i of every metric, over the clients that tell it; lists entry by entry.

    Parameters
    ----------
    key : str
        The metric that says how much a client counts, which isn't averaged.
    function : callable, optional
        Makes the metrics of the contents of all replies instead.
    """

    def __init__(self, key: str = messages.NUM_EXAMPLES, function: MetricsAggregation | None = None) -> None:
        self.key = key
        self.function = function
        self.contents: list[RecordDict] = []
        self._sums: Values = {}
        self._totals: dict[str, float] = {}

    def add(self, weight: float, content: RecordDict) -> None:
        """Take in what a client with weight d_i replied."""
        if self.function is not None:
            self.contents.append(content)
            return
        self.add_values(weight, told([r for r in content.values() if isinstance(r, MetricRecord)], self.key))

    def add_values(self, weight: float, values: Mapping[str, float | list[float]]) -> None:
        """Take in what a client with weight d_i tells, by name."""
        for name, value in values.items():
            if (sums := _added(self._sums.get(name), weight, value)) is not None:
                self._sums[name] = sums
                self._totals[name] = self._totals.get(name, 0.0) + weight

    def add_columns(self, weights: Sequence[float], columns: Mapping[str, Sequence[float]]) -> None:
        """Take in numbers that clients with weights d_i tell, by name: as ``add_values`` of one after the other."""
        for name, values in columns.items():
            sums, total = self._sums.get(name, 0.0), self._totals.get(name, 0.0)
            if isinstance(sums, list):
                continue
            for weight, value in zip(weights, values, strict=True):
                sums += weight * value
                total += weight
            if values:
                self._sums[name], self._totals[name] = sums, total

    def result(self) -> Values:
        """Return the metrics, by name."""
        if self.function is not None:
            return dict(self.function(self.contents, self.key)) if self.contents else {}  # type: ignore[arg-type]
        return {
            name: [v / self._totals[name] for v in sums]
            if isinstance(sums, list)
            else sums / self._totals[name]
            for name, sums in self._sums.items()
            if self._totals[name] > 0
        }


def told(records: Iterable[MetricRecord], key: str) -> Values:
    """Return the metrics of a reply that are told: not the one by which it is weighed."""
    values = {name: value for record in records for name, value in messages.values_of(record).items()}
    return {name: value for name, value in values.items() if name != key and name not in _NOT_TOLD}


def _added(
    sums: float | list[float] | None, weight: float, value: float | list[float]
) -> float | list[float] | None:
    """Return a sum with d_i m_i added to it; None if the two aren't of one kind and length."""
    if isinstance(value, list):
        before = [0.0] * len(value) if sums is None else sums
        if not isinstance(before, list) or len(before) != len(value):
            return None
        return [total + weight * v for total, v in zip(before, value, strict=True)]
    before = 0.0 if sums is None else sums
    return None if isinstance(before, list) else before + weight * value
