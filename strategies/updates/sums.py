"""Sums where the clients are: what most methods need of a round is Σ d_i Δ_i, not every Δ_i.

A Grid whose clients are at hand, such as an engine's, may be a ``SummingGrid``: then a round asks it once for all of
its tasks, and no model is made a message. The bound on updates (strategies/updates/chain.py) is kept where the
update is.
Other Grids get messages, and so does a method that looks at single updates (``strategies.core.capabilities``).

Either way a round's sum has the same bits, for any number of threads or machines: it is of blocks of clients, whose
size depends on the number of tasks and the model's alone. Within a block updates are added in the order of the
clients, in float64, and then the blocks in theirs (``strategies.updates.aggregation.WeightedSum``).
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord
from numpy.typing import NDArray

from strategies.flower import messages
from strategies.flower.arrays import Vector, clip_update
from strategies.updates.aggregation import block_size
from strategies.updates.safeguards import bounded


@dataclass(frozen=True)
class SumTasks:
    """Tasks of clients, in their order, by column.

    Attributes
    ----------
    nodes, clients : sequence of int
        Ids of the clients' nodes, and their indices.
    number : int
        Of the task, for each of them.
    weights : sequence of float
        d_i.
    parts : array
        What part of the usual work each is.
    """

    nodes: Sequence[int]
    clients: Sequence[int]
    number: int
    weights: Sequence[float]
    parts: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.nodes)

    def __getitem__(self, places: slice) -> "SumTasks":
        """Return some that follow each other."""
        nodes, clients, weights = self.nodes[places], self.clients[places], self.weights[places]
        return SumTasks(nodes, clients, self.number, weights, self.parts[places])

    def at(self, places: Sequence[int]) -> "SumTasks":
        """Return those at these places."""
        return SumTasks(
            [self.nodes[place] for place in places],
            [self.clients[place] for place in places],
            self.number,
            [self.weights[place] for place in places],
            self.parts[list(places)],
        )


@dataclass(frozen=True)
class SumRequest:
    """A round's tasks.

    Attributes
    ----------
    arrays : ArrayRecord
        The model that all are sent.
    config : ConfigRecord
        What a request says to all of them, the round and the method's local rule among it.
    tasks : SumTasks
        Of all that take part.
    rule : mapping of str to float
        Of the config, the fields of the local rule.
    bound : float
        S: an update counts with at most this norm, and d_i times its norm is at most S too; 0: no bound.
    squares : bool
        Add up Σ d_i ‖Δ_i‖² as well.
    """

    arrays: ArrayRecord
    config: ConfigRecord
    tasks: SumTasks
    rule: Mapping[str, float] = field(default_factory=dict)
    bound: float = 0.0
    squares: bool = False

    def with_tasks(self, tasks: SumTasks) -> "SumRequest":
        """Return the request with other tasks."""
        return replace(self, tasks=tasks)

    def counted(self, model: Vector, base: Vector, weight: float) -> tuple[Vector, bool]:
        """Return what of a local model (D,) counts, as the chain has it, and whether it was longer than the bound."""
        longer = bool(self.bound) and clip_update(model, base, self.bound)
        model -= base
        return bounded(weight, model, self.bound), longer


class NotCounted(NamedTuple):
    """Why a client's update isn't in the sum: a reason, and ``FAILED`` or ``REFUSED``
    (strategies/flower/messages.py)."""

    reason: str
    outcome: str = messages.FAILED


@dataclass(frozen=True)
class BlockSum:
    """What came of a block's tasks.

    Attributes
    ----------
    total : Vector
        Σ d_i Δ_i (D,) over the clients whose updates count.
    squares : float
        Σ d_i ‖Δ_i‖², if that is asked for.
    number : int
        Of tasks.
    metrics : mapping of str to sequence of float
        What each client tells that is averaged over clients, by d_i; of one that doesn't count, anything.
    not_counted : mapping of int to NotCounted
        The tasks that aren't in the sum, by their places.
    bounded : collection of int
        Places of those whose updates were longer than the bound.
    furthest : float
        The largest d_i ‖Δ_i‖ in the sum, where there is a bound.
    """

    total: Vector
    squares: float
    number: int
    metrics: Mapping[str, Sequence[float]] = field(default_factory=dict)
    not_counted: Mapping[int, NotCounted] = field(default_factory=dict)
    bounded: Collection[int] = ()
    furthest: float = 0.0


@runtime_checkable
class SummingGrid(Protocol):
    """What a Grid is in addition that can add up updates."""

    def can_sum(self, request: SumRequest) -> bool:
        """Tell whether it can do so for such a request, whatever its tasks."""
        ...

    def sums(self, request: SumRequest) -> Iterator[BlockSum]:
        """Yield the sums of blocks that follow each other and have all tasks, in order."""
        ...


def blocks(number: int, size: int) -> list[range]:
    """Divide so many tasks into blocks."""
    step = block_size(number, size)
    return [range(start, min(start + step, number)) for start in range(0, number, step)]
