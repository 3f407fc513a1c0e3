"""How a round's updates Δ_i are put together: the weighted sum, or one of Flower's robust rules.

A robust rule bears f clients that send anything at all. It takes all clients as equals, so it needs uniform weights.
It is given updates instead of models: it makes no difference to a rule, and differences of updates are more exact.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import Bulyan, FedAvg, FedMedian, FedTrimmedAvg, Krum, MultiKrum
from numpy.typing import NDArray

from strategies.flower import messages
from strategies.flower.arrays import Vector
from strategies.flower.internals import without_chatter
from strategies.updates.safeguards import bounded, moved_by

MEAN = "mean"
_UPDATE = "update"


@dataclass(frozen=True)
class _Rule:
    """How to make Flower's strategy for n updates of which f may be anything, and the least n that it needs."""

    make: Callable[[int, int], FedAvg]
    least: Callable[[int], int]


_RULES = {
    # D. Yin et al., ICML 2018
    "median": _Rule(lambda n, f: FedMedian(), lambda f: 2 * f + 1),
    # Flower cuts off ⌊β n⌋ at each end; the quarter keeps that at f whatever the rounding.
    "trimmed-mean": _Rule(lambda n, f: FedTrimmedAvg(beta=(f + 0.25) / n if f else 0.0), lambda f: 2 * f + 1),
    # P. Blanchard et al., NeurIPS 2017
    "krum": _Rule(lambda n, f: Krum(num_malicious_nodes=f), lambda f: 2 * f + 3),
    "multi-krum": _Rule(
        lambda n, f: MultiKrum(num_malicious_nodes=f, num_nodes_to_select=n - f), lambda f: 2 * f + 3
    ),
    # E. M. El Mhamdi et al., ICML 2018
    "bulyan": _Rule(lambda n, f: Bulyan(num_malicious_nodes=f), lambda f: 4 * f + 3),
}

RULES = (MEAN, *_RULES)


def least_updates(rule: str, faulty: int) -> int:
    """Return how many updates a rule needs, to bear ``faulty`` clients among them."""
    return 1 if rule == MEAN else _RULES[rule].least(faulty)


def square_of(update: Vector) -> float:
    """Return ‖Δ_i‖² of an update (D,)."""
    return float(np.einsum("i,i->", update, update))


def added_in_order(rows: NDArray[np.float64]) -> Vector:
    """Return the sum (m,) of rows (n, m) as a loop has it, one after the other: NumPy adds one column in pairs."""
    return np.asarray(rows.sum(0) if rows.shape[1] > 1 else np.cumsum(rows, axis=0)[-1])


def block_size(number: int, size: int) -> int:
    """Return how many clients a block has, of a number of tasks and a model of ``size`` values.

    Eight blocks or more, so that there is something to divide; at most 64 clients, and 64 MiB of models in float64.
    """
    return min(-(-number // 8), 64, max((8 << 20) // max(size, 1), 1)) or 1


class WeightedSum:
    """Σ d_i Δ_i of the updates that are valid, with the weight of the others shared over them.

    Added up block by block (strategies/updates/sums.py), as where the sums of blocks come from elsewhere.

    Parameters
    ----------
    size : int
        D. Two vectors of that size are all that is kept.
    number : int
        How many updates are asked for, which the size of a block follows from; each is added or skipped.
    squares : bool
        Add up Σ d_i ‖Δ_i‖² as well.
    bound : float
        S: no update moves the sum further; 0: no bound.
    private : bool
        Share the weight of others whatever the updates are, as noise goes by ``sensitivity``; else the bound holds
        also with a part of it.
    """

    def __init__(
        self, size: int, number: int = 1, *, squares: bool = False, bound: float = 0.0, private: bool = False
    ) -> None:
        self.total = np.zeros(size)
        self.squares = 0.0
        self.bound, self._furthest, self._private = bound, 0.0, private
        self.kept: list[float] = []
        self._squares = squares
        self._block, self._left = np.zeros(size), block_size(number, size)
        self._block_squares, self._step = 0.0, self._left

    def add(self, weight: float, update: Vector) -> None:
        """Take in d_i and Δ_i (D,)."""
        if self.bound:
            update = bounded(weight, update, self.bound)
            self._furthest = max(self._furthest, moved_by(weight, update))
        self._block += weight * update
        self.kept.append(weight)
        if self._squares:
            self._block_squares += weight * square_of(update)
        self.skip()

    def skip(self) -> None:
        """Pass over one whose update doesn't count."""
        self._left -= 1
        if not self._left:
            self.end()

    def add_block(self, total: Vector, squares: float, kept: Sequence[float], furthest: float = 0.0) -> None:
        """Take in a block's Σ d_i Δ_i (D,), Σ d_i ‖Δ_i‖² and largest d_i ‖Δ_i‖, with the d_i in it."""
        self._furthest = max(self._furthest, furthest)
        self.total += total
        self.squares += squares
        self.kept += kept

    def end(self) -> None:
        """Add a block that isn't full yet: all are there."""
        self.total += self._block
        self.squares += self._block_squares
        self._block[:] = 0.0
        self._block_squares, self._left = 0.0, self._step

    def result(self, weights: Sequence[float]) -> Vector | None:
        """Return the sum (D,), given the d_i of all, or None if nothing counts."""
        self.end()
        return self.total * self._share(weights) if sum(self.kept) > 0 else None

    def mean_square(self, weights: Sequence[float]) -> float:
        """Return Σ d_i ‖Δ_i‖², given the d_i of all."""
        return self.squares * self._share(weights) if self.squares else 0.0

    def sensitivity(self, weights: Sequence[float]) -> float:
        """Return how far the sum moves at most by one update of norm 1."""
        return self._share(weights) * max(self.kept)

    def _share(self, weights: Sequence[float]) -> float:
        share = sum(weights) / sum(self.kept)  # exactly 1 if all are there
        if self._private or not self._furthest:
            return share
        return min(share, max(1.0, self.bound / self._furthest))


class RobustRule(WeightedSum):
    """One of ``RULES`` other than the mean, over updates of equal weight.

    Parameters
    ----------
    rule : str
        Its name.
    faulty : int
        f, clients that may send anything.
    bound : float
        S: no d_i Δ_i is longer; 0: no bound.
    """

    def __init__(self, rule: str, faulty: int, bound: float = 0.0) -> None:
        super().__init__(0, bound=bound)
        self.rule, self.faulty = rule, faulty
        self.updates: list[Vector] = []

    def add(self, weight: float, update: Vector) -> None:
        """Keep Δ_i (D,)."""
        self.updates.append(bounded(weight, update, self.bound))

    def skip(self) -> None:
        """Do nothing: the rule knows no order."""

    def result(self, weights: Sequence[float]) -> Vector | None:
        """Return the rule's Δ (D,), or None if there are too few updates to bear f faulty ones."""
        if len(self.updates) < least_updates(self.rule, self.faulty):
            return None
        flower = _RULES[self.rule].make(len(self.updates), self.faulty)
        with without_chatter():
            arrays, _ = flower.aggregate_train(0, [_reply(update) for update in self.updates])
        return None if arrays is None else np.asarray(arrays[_UPDATE].numpy(), dtype=np.float64)


def gathering(
    rule: str,
    faulty: int,
    size: int,
    number: int,
    *,
    squares: bool = False,
    bound: float = 0.0,
    private: bool = False,
) -> WeightedSum:
    """Return what takes in so many updates (D,) of a round under one of ``RULES``; D is ``size``."""
    if rule == MEAN:
        return WeightedSum(size, number, squares=squares, bound=bound, private=private)
    return RobustRule(rule, faulty, bound)


def _reply(update: Vector) -> Message:
    """Return what Flower's strategies put together."""
    content: dict[str, ArrayRecord | MetricRecord | ConfigRecord] = {
        messages.ARRAYS: ArrayRecord({_UPDATE: Array(update)}),
        messages.METRICS: MetricRecord({messages.NUM_EXAMPLES: 1}),
    }
    return Message(RecordDict(content), dst_node_id=0, message_type=messages.TRAIN)
