"""The aggregation of a round's updates Δ_i: the weighted sum, or one of Flower's robust rules.

A robust rule tolerates f faulty clients, which may send anything. ``aggregation_rule`` needs uniform weights, as it
gives all clients equal ones; the rules under Flower's names (strategies/methods/flower_names.py) have Flower's
weights. Rules here get updates instead of models: the result is the same, and differences of updates lose fewer
digits.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import frexp, inf, isfinite, ldexp, sqrt
from typing import Protocol

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import Bulyan, FedAvg, FedMedian, FedTrimmedAvg, Krum, MultiKrum
from numpy.typing import NDArray

from strategies.flower import messages
from strategies.flower.arrays import BLOCK, Vector, add_weighted
from strategies.flower.internals import without_chatter
from strategies.updates.chain import ModelInReply
from strategies.updates.safeguards import bounded, moved_by

MEAN = "mean"
_NOTHING: Vector = np.empty(0)
_UPDATE = "update"
ORDINARY = 1e18  # norm of an update that is far too long to be one, and far below what makes a model invalid
CHUNK = 4 * BLOCK  # values of a model that are worked on at once: the L2 cache holds them with w̄ and the sums


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


class Gathered(Protocol):
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
        D. The sum keeps two vectors of this size.
    number : int
        Number of updates requested, which determines the size of a block; each must be added or skipped.
    squares : bool
        Compute Σ d_i ‖Δ_i‖² as well.
    bound : float
        S, upper bound of d_i ‖Δ_i‖; 0: no bound.
    private : bool
        Under differential privacy: always scale up by the full weight of missing updates, as ``sensitivity`` assumes.
        Otherwise the scale is reduced where d_i ‖Δ_i‖ would exceed the bound.
    each : float
        Under differential privacy with Poisson sampling, the d of every client that may be drawn: the sum isn't
        scaled up, and that of no update at all is 0, so that one client more or less changes it by d ‖Δ_i‖; else 0.
    """

    def __init__(
        self,
        size: int,
        number: int = 1,
        *,
        squares: bool = False,
        bound: float = 0.0,
        private: bool = False,
        each: float = 0.0,
    ) -> None:
        self.total = np.zeros(size)
        self.squares = 0.0
        self.bound, self._furthest, self._private, self._each = bound, 0.0, private, each
        self.kept: list[float] = []
        self._squares = squares
        # The block's sum between ``add`` and ``end``, what is tried between ``attempt`` and ``keep``; else anything.
        self._second, self._begun = np.empty(size), False
        self.block = self._left = block_size(number, size)
        self._block_squares, self._attempted = 0.0, list[float]()

    def add(self, weight: float, update: Vector) -> None:
        """Add the weight d_i and the update Δ_i (D,) of a client."""
        if self.bound:
            update = bounded(weight, update, self.bound)
            self._furthest = max(self._furthest, moved_by(weight, update))
        if not self._begun:
            self._second[:], self._begun = 0.0, True
        add_weighted(self._second, weight, update)
        self.kept.append(weight)
        if self._squares:
            self._block_squares += weight * square_of(update)
        self.skip()

    def skip(self) -> None:
        """Skip a client without a valid update."""
        self._left -= 1
        if not self._left:
            self.end()

    def add_block(self, total: Vector, squares: float, kept: Sequence[float], furthest: float = 0.0) -> None:
        """Add a block's Σ d_i Δ_i (D,), Σ d_i ‖Δ_i‖² and largest d_i ‖Δ_i‖, with the d_i of its valid updates."""
        self._furthest = max(self._furthest, furthest)
        self.total += total
        self.squares += squares
        self.kept += kept

    def end(self) -> None:
        """Add the last block to the sum, full or not."""
        if self._begun:
            self.total += self._second
        self.squares += self._block_squares
        self._begun, self._block_squares, self._left = False, 0.0, self.block

    def attempt(
        self,
        spans: Sequence[slice],
        models: Sequence[tuple[float, ModelInReply] | None],
        *,
        measure: bool,
    ) -> bool:
        """Compute the sum with models that are still in their replies; ``keep`` makes it the sum.

        Return what ``add_models`` returns: False if it must be tried again, with ``measure``.

        Parameters
        ----------
        spans : sequence of slice
            Where each array is in a vector (D,).
        models : sequence of (float, ModelInReply)
            The weights and models of the next clients, None for one to skip: whole blocks, or all that are left.
        """
        cut = [models[start : start + self.block] for start in range(0, len(models), self.block)]
        blocks = [[each for each in block if each is not None] for block in cut]
        self._attempted = [weight for block in blocks for weight, _ in block]
        if not self._attempted:
            return True
        there = [block for block in blocks if block]
        return add_models(self.total, self._second, spans, there, measure=measure)

    def keep(self) -> None:
        """Add the models of the last ``attempt`` to the sum."""
        if self._attempted:
            self.total, self._second = self._second, self.total
            self.kept += self._attempted

    def clear(self) -> None:
        """Begin again without any update."""
        self.total[:], self.kept = 0.0, []

    def result(self, weights: Sequence[float]) -> Vector | None:
        """Return the sum (D,), given the d_i of all; None without a weight above 0, or ``each``."""
        self.end()
        total, self.total, self._second = self.total, _NOTHING, _NOTHING  # the memory is the caller's
        if not (self._each or sum(self.kept) > 0):
            return None
        total *= self._share(weights)
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
        if self._private or not self._furthest:
            return share
        return min(share, max(1.0, self.bound / self._furthest))


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


def gathering(
    rule: Rule | None,
    size: int,
    number: int,
    *,
    squares: bool,
    bound: float,
    private: bool,
    each: float,
) -> Gathered:
    """Return the aggregate of a round's ``number`` updates (D,) by a rule, or their sum; D is ``size``."""
    if rule is None:
        return WeightedSum(size, number, squares=squares, bound=bound, private=private, each=each)
    return RobustRule(rule, bound)


def _reply(update: Vector, weight: float) -> Message:
    """Return a reply with an update as its arrays, as Flower's strategies expect it."""
    content: dict[str, ArrayRecord | MetricRecord | ConfigRecord] = {
        messages.ARRAYS: ArrayRecord({_UPDATE: Array(update)}),
        messages.METRICS: MetricRecord({messages.NUM_EXAMPLES: weight}),
    }
    return Message(RecordDict(content), dst_node_id=0, message_type=messages.TRAIN)


# ---- A sum in one pass over models in their replies ----------------------------------------------------------
#
# A model that is still in the bytes of its reply isn't copied as a whole. Its values go through a core's cache
# once, in blocks of CHUNK values, in which w_i becomes float64, w̄ is subtracted, ‖Δ_i‖² is summed, and d_i Δ_i
# is added. So it is known only afterwards whether all values are finite, and whether an update is longer than
# usual: the sum is therefore written to a second vector, and made again in the rare case that a model doesn't
# count, or counts less.
#
# Each operation is that of the chain for single replies (strategies/updates/chain.py, WeightedSum.add), and in
# its order, so that the sum and the norms have the same bits.

# The number of an array, a part of it, and the place of the part in a chunk.
_Piece = tuple[int, slice, slice]


def add_models(
    total: Vector,
    out: Vector,
    spans: Sequence[slice],
    blocks: Sequence[Sequence[tuple[float, ModelInReply]]],
    *,
    measure: bool,
) -> bool:
    """Write to ``out`` (D,) the sum of ``total`` (D,) and blocks of d_i Δ_i; each block is summed first.

    Without ``measure`` no norm is computed, which would take a pass of its own. The weights are then multiplied by a
    power of two, 2^k, by which any d_i Δ_i with a value above ``ORDINARY`` / √D overflows, and so its block's sum: no
    other update can cancel an infinite value. The sum is divided by 2^k again; both are exact, so that the bits of
    the sum are the same.

    Parameters
    ----------
    spans : sequence of slice
        Where each array is in a vector (D,).
    blocks : sequence of sequence of (float, ModelInReply)
        The weights d_i and models of each block, none of them empty; ``moved`` of the models is set, and ``square``,
        without ``measure`` to an upper bound.
    measure : bool
        Whether norms are computed. Otherwise arrays of floats have at most 32 bits, so that no product is subnormal.

    Returns
    -------
    bool
        Whether the squares are known; if not, ``out`` is of no use, and norms must be computed.
    """
    power = 0 if measure else _power_of_two([weight for block in blocks for weight, _ in block], len(total))
    if power is None:
        return False
    up, down, known = ldexp(1.0, power), ldexp(1.0, -power), True
    for block in blocks:
        for _, model in block:
            model.square = 0.0 if measure else ORDINARY**2
            model.moved = False
    length = min(CHUNK, len(total))
    delta, summed = np.empty(length), np.empty(length if len(blocks) > 1 else 0)
    with np.errstate(over="ignore", invalid="ignore"):  # what isn't finite shows in the square, or in the sum
        for chunk, pieces in _chunks(len(total), spans):
            before, after = total[chunk], out[chunk]
            update = delta[: len(after)]
            cuts = [slice(start, start + BLOCK) for start in range(0, len(update), BLOCK)]
            parts, places = [update[cut] for cut in cuts], [(a, part, update[at]) for a, part, at in pieces]
            for place, block in enumerate(blocks):
                block_sum = summed[: len(after)] if place else after
                for number, (weight, model) in enumerate(block):
                    arrays, base = model.arrays, model.base[chunk]
                    for array, inside, part in places:
                        part[:] = arrays[array][inside]
                    update -= base
                    if measure:
                        square = model.square
                        for part in parts:  # as in ``distance``
                            square += float(part.dot(part))
                        model.square, model.moved = square, square > 0
                    elif not model.moved:
                        model.moved = bool(update.any())
                    if model.scale is not None:  # as in ``shorten_update``
                        update *= model.scale
                        update += base
                        update -= base
                    if number:
                        update *= weight * up
                        block_sum += update
                    else:
                        np.multiply(update, weight * up, out=block_sum)
                if not measure:
                    block_sum *= down
                    known = known and all(isfinite(block_sum[cut].dot(block_sum[cut])) for cut in cuts)
                np.add(before, block_sum, out=after)
                before = after
    return known


def _power_of_two(weights: Sequence[float], size: int) -> int | None:
    """Return the k of ``add_models`` by the weights d_i, for D = ``size``; None if there is none."""
    least = min(weights, default=0.0) * ORDINARY / sqrt(max(size, 1))
    if not (least > 1 and max(weights) < least):
        return None
    return 1025 - frexp(least)[1]  # least · 2^k is 2^1024 or more


def _chunks(size: int, spans: Sequence[slice]) -> Iterator[tuple[slice, list[_Piece]]]:
    """Cut a vector of this size into chunks; yield each with the pieces of arrays that it consists of."""
    first = 0
    for start in range(0, size, CHUNK):
        stop, pieces = min(start + CHUNK, size), []
        while spans[first].stop <= start:
            first += 1
        for array in range(first, len(spans)):
            span = spans[array]
            if span.start >= stop:
                break
            low, high = max(span.start, start), min(span.stop, stop)
            if low < high:
                inside = slice(low - span.start, high - span.start)
                pieces.append((array, inside, slice(low - start, high - start)))
        yield slice(start, stop), pieces
