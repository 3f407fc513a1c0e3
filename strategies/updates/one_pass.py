"""A round's sum in one pass over its replies: models are read, measured and added while a block of them is in cache.

A model that is still in the bytes of its reply isn't copied as a whole. Its values go through a core's cache once, in
blocks of ``CHUNK`` values, in which w_i becomes float64, w̄ is subtracted, ‖Δ_i‖² is summed, and d_i Δ_i is added. So
it is known only afterwards whether all values are finite, and whether an update is longer than usual: the sum is
therefore written to a second vector, and made again in the rare case that a model doesn't count, or counts less.

Each operation is that of the chain for single replies (strategies/updates/chain.py, ``WeightedSum.add``), and in its
order, so that the sum and the norms have the same bits.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from strategies.clients.roster import Client
from strategies.flower.arrays import BLOCK, LARGEST_SQUARE, Vector

CHUNK = 2 * BLOCK  # values of a model that are worked on at once: the L2 cache holds them with w̄ and the sums


@dataclass
class ModelInReply:
    """A local model w_i (D,) whose arrays are still in the bytes of its reply, and w̄ (D,), which its client was sent.

    Attributes
    ----------
    arrays : sequence of array
        The values of each array, flat, in the model's order; of buffers, those that were sent.
    untrained : Vector, optional
        The buffers (B,) of the reply.
    counted_from : Vector, or 0
        (B,): the counters as they were sent, 0 for other buffers.
    square : float
        ‖Δ_i‖², once the model was added; not finite if a value isn't.
    scale : float, optional
        The factor by which the update is shortened.
    """

    client: Client
    arrays: Sequence[NDArray[Any]]
    base: NDArray[Any]
    untrained: Vector | None = None
    counted_from: Vector | float = 0.0
    square: float = 0.0
    scale: float | None = None

    def norm(self) -> float:
        """Return ‖Δ_i‖, once the model was added."""
        return math.sqrt(self.square)

    def surely_sound(self, base_norm: float) -> bool:
        """Return True if the model surely passes ``check_values``, by its square and ‖w̄‖: ‖w_i‖ ≤ ‖w̄‖ + ‖Δ_i‖."""
        most = (base_norm + self.norm()) ** 2
        if self.untrained is not None:
            most += float(self.untrained.dot(self.untrained))
        return most <= LARGEST_SQUARE * (1 - 1e-6)  # False for NaN, too; more than rounding errors are


def add_models(
    total: Vector,
    out: Vector,
    spans: Sequence[slice],
    blocks: Sequence[Sequence[tuple[float, ModelInReply]]],
) -> None:
    """Write to ``out`` (D,) the sum of ``total`` (D,) and blocks of d_i Δ_i; each block is summed first.

    Parameters
    ----------
    spans : sequence of slice
        Where each array is in a vector (D,).
    blocks : sequence of sequence of (float, ModelInReply)
        The weights d_i and models of each block, none of them empty; ``square`` of the models is set.
    """
    for block in blocks:
        for _, model in block:
            model.square = 0.0
    delta, summed = np.empty(min(CHUNK, len(total))), np.empty(min(CHUNK, len(total)))
    with np.errstate(over="ignore", invalid="ignore"):  # what isn't finite shows in the square
        for chunk, pieces in _chunks(len(total), spans):
            before, after = total[chunk], out[chunk]
            update, block_sum = delta[: len(after)], summed[: len(after)]
            parts = [update[start : start + BLOCK] for start in range(0, len(update), BLOCK)]
            for block in blocks:
                for place, (weight, model) in enumerate(block):
                    _read_update(model, chunk, pieces, update, parts)
                    if place:
                        update *= weight
                        block_sum += update
                    else:
                        np.multiply(update, weight, out=block_sum)
                np.add(before, block_sum, out=after)
                before = after


def _read_update(
    model: ModelInReply,
    chunk: slice,
    pieces: Sequence["_Piece"],
    update: Vector,
    parts: Sequence[Vector],
) -> None:
    """Write a chunk of Δ_i to ``update``, whose blocks are ``parts``, and add its square to the model's.

    It is shortened by ``scale`` after that.
    """
    base, arrays, square = model.base[chunk], model.arrays, model.square
    for array, inside, place in pieces:
        update[place] = arrays[array][inside]
    update -= base
    for part in parts:  # as in ``distance``
        square += float(part.dot(part))
    model.square = square
    if model.scale is not None:  # as in ``shorten_update``
        update *= model.scale
        update += base
        update -= base


_Piece = tuple[
    int, slice, slice
]  # the number of an array, a part of it, and the place of the part in a chunk


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
