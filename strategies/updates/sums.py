"""Sums computed by an engine: most methods need Σ d_i Δ_i of a round, not each single Δ_i.

The Grid of an engine with local clients may be a ``SummingGrid``: a round then sends it one request for all tasks,
and no model is serialised as a message. The engine applies the bound on updates (strategies/updates/pipeline.py).
Other Grids get messages, and so does a method that reads single updates (``strategies.core.capabilities``).

With both kinds of Grids a round's sum has the same bits, for any number of threads or machines: clients are divided
into blocks, whose size depends on the number of tasks and the size of the model alone. Within a block, updates are
added in the order of the clients, in float64; then the blocks are added in order
(``strategies.updates.aggregation.WeightedSum``).
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord
from numpy.typing import NDArray

from strategies.flower import messages
from strategies.flower.arrays import Vector
from strategies.updates.aggregation import block_size


@dataclass(frozen=True)
class SumTasks:
    """Tasks of clients, as columns, in the order of the clients.

    Attributes
    ----------
    nodes, clients : sequence of int
        Ids of the clients' nodes, and their indices.
    number : int
        Number of the task, the same for all clients.
    weights : sequence of float
        Weights d_i of the clients.
    fractions : array (clients,)
        Fraction of the usual local work that each client is asked for.
    """

    nodes: Sequence[int]
    clients: Sequence[int]
    number: int
    weights: Sequence[float]
    fractions: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.nodes)

    def __getitem__(self, places: slice) -> "SumTasks":
        """Return a slice of the tasks."""
        nodes, clients, weights = self.nodes[places], self.clients[places], self.weights[places]
        return SumTasks(nodes, clients, self.number, weights, self.fractions[places])

    def at(self, places: Sequence[int]) -> "SumTasks":
        """Return the tasks at these positions."""
        return SumTasks(
            [self.nodes[place] for place in places],
            [self.clients[place] for place in places],
            self.number,
            [self.weights[place] for place in places],
            self.fractions[list(places)],
        )


@dataclass(frozen=True)
class SumRequest:
    """The request for a round's sum.

    Attributes
    ----------
    arrays : ArrayRecord
        The model that is sent to all clients.
    config : ConfigRecord
        The config record for all clients, with the round and the method's local rule.
    tasks : SumTasks
        The tasks of all participants.
    rule : mapping of str to float
        The fields of the local rule in ``config``.
    bound : float
        S, upper bound of ‖Δ_i‖ and of d_i ‖Δ_i‖; 0: no bound.
    squares : bool
        Compute Σ d_i ‖Δ_i‖² as well.
    """

    arrays: ArrayRecord
    config: ConfigRecord
    tasks: SumTasks
    rule: Mapping[str, float] = field(default_factory=dict)
    bound: float = 0.0
    squares: bool = False


class NotCounted(NamedTuple):
    """A client's update that isn't in the sum: the reason, and the outcome ``FAILED`` or ``REFUSED``."""

    reason: str
    outcome: str = messages.FAILED


@dataclass(frozen=True)
class BlockSum:
    """The result of a block's tasks.

    Attributes
    ----------
    total : Vector
        Σ d_i Δ_i (D,) over the clients with valid updates.
    squares : float
        Σ d_i ‖Δ_i‖², if requested.
    number : int
        Number of tasks in the block.
    metrics : mapping of str to sequence of float
        Metrics of each client, to be averaged with weights d_i; NaN for a client that has none, any value for a
        client without a valid update.
    not_counted : mapping of int to NotCounted
        The tasks that aren't in the sum, by their position in the block.
    bounded : collection of int
        Positions of the updates that exceeded the bound.
    furthest : float
        The largest d_i ‖Δ_i‖ in the sum, if there is a bound.
    """

    total: Vector
    squares: float
    number: int
    metrics: Mapping[str, Sequence[float]] = field(default_factory=dict)
    not_counted: Mapping[int, NotCounted] = field(default_factory=dict)
    bounded: Collection[int] = ()
    furthest: float = 0.0

    @property
    def counting(self) -> list[int]:
        """The positions of the tasks that are in the sum."""
        return [place for place in range(self.number) if place not in self.not_counted]

    @property
    def counting_metrics(self) -> dict[str, list[float]]:
        """The metrics of the clients whose tasks are in the sum."""
        counting = self.counting
        return {name: [values[place] for place in counting] for name, values in self.metrics.items()}


@runtime_checkable
class SummingGrid(Protocol):
    """A Grid that can also sum the updates of its clients."""

    def can_sum(self, request: SumRequest) -> bool:
        """Return True if the Grid can compute the sum of such a request, whatever its tasks."""
        ...

    def sums(self, request: SumRequest) -> Iterator[BlockSum]:
        """Yield the sums of consecutive blocks, which together hold all tasks in order."""
        ...


def blocks(number: int, size: int) -> list[range]:
    """Return the consecutive blocks of ``number`` tasks, for a model of ``size`` values."""
    step = block_size(number, size)
    return [range(start, min(start + step, number)) for start in range(0, number, step)]
