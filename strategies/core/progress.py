"""What an observer of a run is told."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from flwr.app import ArrayRecord


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
