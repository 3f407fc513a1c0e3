"""The aggregation of a round's updates Δ_i: the weighted sum, or one of Flower's robust rules.

A robust rule tolerates f faulty clients, which may send anything. ``aggregation_rule`` needs uniform weights, as it
gives all clients equal ones; the rules under Flower's names (strategies/methods/flower_names.py) have Flower's
weights. Rules here get updates instead of models: the result is the same, and differences of updates lose fewer
digits.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Protocol

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import Bulyan, FedAvg, FedMedian, FedTrimmedAvg, Krum, MultiKrum
from numpy.typing import NDArray

from strategies.flower import messages
from strategies.flower.arrays import CHUNK, Vector, chunks
from strategies.flower.internals import without_chatter
from strategies.updates.pipeline import LocalModel
from strategies.updates.safeguards import bounded, moved_by

MEAN = "mean"
_UPDATE = "update"


@dataclass(frozen=True)
class Rule:
    """A robust rule.

    Attributes
    ----------
    text : str
        The rule as messages name it, such as the parameters that choose it.
    flower : callable
        Returns Flower's strategy of the rule for n updates.
    least : int
        With fewer updates there is no result.
    equal : bool
        Whether clients must be equals, by ``client_weights`` and ``participation``.
    """

    text: str
    flower: Callable[[int], FedAvg]
    least: int = 1
    equal: bool = False


_RULES: dict[str, Callable[[int], tuple[Callable[[int], FedAvg], int]]] = {
    # D. Yin et al., ICML 2018
    "median": lambda f: (lambda n: FedMedian(), 2 * f + 1),
    # Flower trims ⌊β n⌋ updates at each end; adding a quarter makes that f in spite of rounding.
    "trimmed-mean": lambda f: (lambda n: FedTrimmedAvg(beta=(f + 0.25) / n if f else 0.0), 2 * f + 1),
    # P. Blanchard et al., NeurIPS 2017
    "krum": lambda f: (lambda n: Krum(num_malicious_nodes=f), 2 * f + 3),
    "multi-krum": lambda f: (
        lambda n: MultiKrum(num_malicious_nodes=f, num_nodes_to_select=n - f),
        2 * f + 3,
    ),
    # E. M. El Mhamdi et al., ICML 2018
    "bulyan": lambda f: (lambda n: Bulyan(num_malicious_nodes=f), 4 * f + 3),
}

RULES = (MEAN, *_RULES)


def robust_rule(name: str, faulty: int) -> Rule | None:
    """Return the rule of this name, one of ``RULES``, that tolerates ``faulty`` clients; None for the mean."""
    if name == MEAN:
        return None
    flower, least = _RULES[name](faulty)
    return Rule(f"aggregation_rule = {name!r}, faulty_clients = {faulty}", flower, least, equal=True)


def square_of(update: Vector) -> float:
    """Return ‖Δ_i‖² of an update (D,)."""
    return float(np.einsum("i,i->", update, update))


def added_in_order(rows: NDArray[np.float64]) -> Vector:
    """Return the sum (m,) of rows (n, m), added in the order of rows; NumPy's own sum of one column is pairwise."""
    return np.asarray(rows.sum(0) if rows.shape[1] > 1 else np.cumsum(rows, axis=0)[-1])


def block_size(number: int, size: int) -> int:
    """Return the number of clients in a block, for ``number`` tasks and a model of ``size`` values.

    A block has an eighth of the clients, rounded up, so that threads can share the work; at most 64 clients, and at
    most 64 MiB of models in float64.
    """
    return min(-(-number // 8), 64, max((8 << 20) // max(size, 1), 1)) or 1


class UpdateSum(Protocol):
    """The aggregate of a round's updates, which are added or skipped one by one, in the order of the clients."""

    def add(self, weight: float, update: Vector) -> None:
        """Add the weight d_i and the update Δ_i (D,) of a client."""

    def skip(self) -> None:
        """Skip a client without a valid update."""

    def result(self, weights: Sequence[float]) -> Vector | None:
        """Return the aggregate Δ (D,), given the d_i of all clients; None if the valid updates are too few.

        Nothing is added afterwards.
        """

    def mean_square(self, weights: Sequence[float]) -> float:
        """Return Σ d_i ‖Δ_i‖², given the d_i of all clients; 0 if it wasn't asked for."""

    def sensitivity(self, weights: Sequence[float]) -> float:
        """Return the largest change of the aggregate by one update of norm 1."""


class WeightedSum:
    """Σ d_i Δ_i of the valid updates, scaled up by the weight of the missing ones.

    Updates are added block by block (strategies/updates/sums.py), so that the result has the same bits as one of
    blocks that a ``SummingGrid`` has summed.

    Parameters
    ----------
    size : int
        D. The sum keeps two vectors of this size; one, if all updates come at once.
    block : int
        Number of updates in a block, each of which must be added or skipped: ``block_size`` of a round's.
    squares : bool
        Compute Σ d_i ‖Δ_i‖² as well.
    bound : float
        S, upper bound of d_i ‖Δ_i‖; 0: no bound.
    private : bool
        Under differential privacy: always scale up by the full weight of missing updates, as ``sensitivity`` assumes.
        Otherwise the scale is reduced where d_i ‖Δ_i‖ would exceed the bound.
    each : float
        Under differential privacy with Poisson sampling, the d of every client that may be drawn. The sum isn't
        renormalised, so that adding one client changes it by exactly d ‖Δ_i‖. 0 disables this.
    """

    def __init__(
        self,
        size: int,
        block: int = 1,
        *,
        squares: bool = False,
        bound: float = 0.0,
        private: bool = False,
        each: float = 0.0,
    ) -> None:
        self.squares = 0.0
        self.bound, self.furthest, self._private, self._each = bound, 0.0, private, each
        self.kept: list[float] = []
        self._squares = squares
        self.block = self._left = block
        # The sum (D,) of the blocks before, and that of the present blocks, to which ``_whole`` says that the first
        # is added; None as long as there is none.
        self._size = size
        self._sum: Vector | None = None
        self._second: Vector | None = None
        self._begun = self._whole = False
        self._block_squares, self._block_kept = 0.0, list[float]()

    def add(self, weight: float, update: Vector) -> None:
        """Add the weight d_i and the update Δ_i (D,) of a client."""
        if self.bound:
            update = bounded(weight, update, self.bound)
            self.furthest = max(self.furthest, moved_by(weight, update))
        if self._squares:
            self._block_squares += weight * square_of(update)
        self._accumulate([[(weight, update)]], whole=self._left == 1)
        self.skip()

    @property
    def total(self) -> Vector:
        """The sum (D,) of the blocks that have ended."""
        if self._sum is None:
            self._sum = np.zeros(self._size)
        return self._sum

    def sum_blocks(self, blocks: Sequence[Sequence[tuple[float, Vector | LocalModel]]]) -> None:
        """Sum the weights d_i and updates Δ_i of the next blocks of clients, which ``end`` adds to the sum.

        Updates are measured on the way. If some don't count, or count less, the blocks are summed again.
        """
        self._begun, self._whole, self._block_kept = False, False, []
        self._accumulate(blocks, whole=True)

    def _accumulate(
        self, blocks: Sequence[Sequence[tuple[float, Vector | LocalModel]]], *, whole: bool
    ) -> None:
        """Add Σ d_i Δ_i of the updates of some blocks, the first of which may have begun, a chunk of all at a time.

        ``whole`` adds the sum of the blocks before as well, as it must with several: nothing more comes to them.
        """
        if not any(blocks):
            return
        self._second = np.empty(self._size) if self._second is None else self._second
        buffer, block_buffer = np.empty((2, min(CHUNK, self._size)))
        with np.errstate(over="ignore", invalid="ignore"):  # what isn't finite shows in the squares
            for place in chunks(self._size):
                out = self._second[place]
                before: Vector | float = 0.0 if self._sum is None else self._sum[place]
                block_sum, begun = out if len(blocks) == 1 else block_buffer[: len(out)], self._begun
                for updates in blocks:
                    for weight, update in updates:
                        delta = (
                            update.chunk(place, buffer) if isinstance(update, LocalModel) else update[place]
                        )
                        weighted = np.multiply(
                            delta, weight, out=buffer[: len(delta)] if begun else block_sum
                        )
                        if begun:
                            block_sum += weighted
                        begun = True
                    if whole and updates:
                        before, begun = np.add(block_sum, before, out=out), False
        self._begun, self._whole = True, whole
        self._block_kept += [weight for updates in blocks for weight, _ in updates]

    def skip(self) -> None:
        """Skip a client without a valid update."""
        self._left -= 1
        if not self._left:
            self.end()

    def add_block(self, total: Vector, squares: float, kept: Sequence[float], furthest: float = 0.0) -> None:
        """Add a block's Σ d_i Δ_i (D,), Σ d_i ‖Δ_i‖² and largest d_i ‖Δ_i‖, with the d_i of its valid updates."""
        self.furthest = max(self.furthest, furthest)
        np.add(self.total, total, out=self.total)
        self.squares += squares
        self.kept += kept

    def end(self) -> None:
        """Add the present block to the sum, full or not."""
        if self._begun:
            assert self._second is not None
            if not self._whole:  # the block isn't full
                self._second += 0.0 if self._sum is None else self._sum
            self._sum, self._second = self._second, self._sum
        self.squares += self._block_squares
        self.kept += self._block_kept
        self._begun, self._whole, self._left = False, False, self.block
        self._block_squares, self._block_kept = 0.0, []

    def result(self, weights: Sequence[float]) -> Vector | None:
        """Return the sum (D,), given the d_i of all; None without a weight above 0, or ``each``."""
        self.end()
        if not (self._each or sum(self.kept) > 0):
            return None
        total, self._sum, self._second = self.total, None, None  # the memory is the caller's
        if (share := self._share(weights)) != 1:
            total *= share
        return total

    def mean_square(self, weights: Sequence[float]) -> float:
        """Return Σ d_i ‖Δ_i‖², given the d_i of all clients; 0 unless ``squares``."""
        return self.squares * self._share(weights) if self.squares else 0.0

    def sensitivity(self, weights: Sequence[float]) -> float:
        """Return the sensitivity: the largest change of the sum by one update of norm 1."""
        return self._each or self._share(weights) * max(self.kept)

    def _share(self, weights: Sequence[float]) -> float:
        if self._each:
            return 1.0
        share = sum(weights) / sum(self.kept)  # exactly 1 if all updates are valid
        if self._private or not self.furthest:
            return share
        return min(share, max(1.0, self.bound / self.furthest))


class RobustRule:
    """A robust rule over updates.

    Parameters
    ----------
    rule : Rule
        The rule.
    bound : float
        S, upper bound of d_i ‖Δ_i‖; 0: no bound.
    """

    def __init__(self, rule: Rule, bound: float = 0.0) -> None:
        self.rule, self.bound = rule, bound
        self.kept: list[float] = []
        self.updates: list[Vector] = []

    def add(self, weight: float, update: Vector) -> None:
        """Keep the update Δ_i (D,) of a client."""
        self.updates.append(bounded(weight, update, self.bound))
        self.kept.append(weight)

    def skip(self) -> None:
        """Do nothing: the result doesn't depend on the order of updates."""

    def result(self, weights: Sequence[float]) -> Vector | None:
        """Return the rule's Δ (D,), or None if there are too few updates to tolerate f faulty ones."""
        most = max(self.kept, default=0.0)
        if len(self.updates) < self.rule.least or most <= 0:
            return None
        flower = self.rule.flower(len(self.updates))
        with without_chatter():
            # Equal weights are exactly 1.
            arrays, _ = flower.aggregate_train(
                0, [_reply(update, d / most) for update, d in zip(self.updates, self.kept, strict=True)]
            )
        return None if arrays is None else np.asarray(arrays[_UPDATE].numpy(), dtype=np.float64)

    def mean_square(self, weights: Sequence[float]) -> float:
        """Return 0: no step size rests on the lengths of updates that aren't summed."""
        return 0.0

    def sensitivity(self, weights: Sequence[float]) -> float:
        """Return infinity: no bound is known, so that no noise is calibrated by it."""
        return inf


def _reply(update: Vector, weight: float) -> Message:
    """Return a reply with an update as its arrays, as Flower's strategies expect it."""
    content: dict[str, ArrayRecord | MetricRecord | ConfigRecord] = {
        messages.ARRAYS: ArrayRecord({_UPDATE: Array(update)}),
        messages.METRICS: MetricRecord({messages.NUM_EXAMPLES: weight}),
    }
    return Message(RecordDict(content), dst_node_id=0, message_type=messages.TRAIN)
