"""Mean and deviation of inputs, put together from what each client knows of its own.

A client's part is three things in float64: the number of its values, their sums, and the sums of the squares of their
distances from its own mean. Put together (Chan, Golub & LeVeque 1983, "Algorithms for computing the sample variance",
eq. 2.1) they give what pooling the rows gives, to rounding, however large the mean is beside the deviation.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]

# Relative to the mean, a deviation up to this one is rounding of float32.
_RESOLUTION = float(np.finfo(np.float32).eps)


@dataclass(frozen=True)
class Moments:
    """Mean and deviation of inputs, of each feature (``Dataset.num_features``); a deviation is never 0."""

    mean: tuple[float, ...]
    std: tuple[float, ...]


@dataclass(frozen=True, eq=False)
class Sums:
    """The sums that one client, or several together, have over their inputs.

    Attributes
    ----------
    count : float64 array (F,)
        Number of values of each feature: of rows, and for images times their pixels; a value that is missing (NaN)
        isn't one.
    total : float64 array (F,)
        Sum of the values of each feature.
    squares : float64 array (F,)
        Sums of (value − own mean)².
    """

    count: Vector
    total: Vector
    squares: Vector

    @classmethod
    def of(cls, blocks: Iterable[NDArray[Any]]) -> "Sums":
        """Sum up blocks of inputs (n, F), (n, F, T) or (n, F, H, W)."""
        return cls.merged([cls._of_block(block) for block in blocks])

    @classmethod
    def _of_block(cls, block: NDArray[Any]) -> "Sums":
        values = np.asarray(block, np.float64).reshape(*block.shape[:2], -1)
        there = ~np.isnan(values)
        count = there.sum(axis=(0, 2), dtype=np.float64)
        total = np.where(there, values, 0).sum(axis=(0, 2))
        centred = np.where(there, values - _mean(total, count)[:, None], 0)
        return cls(count, total, np.einsum("nfp,nfp->f", centred, centred))

    @classmethod
    def merged(cls, parts: Sequence["Sums"]) -> "Sums":
        """Put the parts of several clients together; ValueError if there are none."""
        if not parts:
            raise ValueError("merged needs the sums of at least one client or block, has none")
        total = np.sum([part.total for part in parts], axis=0)
        count = np.sum([part.count for part in parts], axis=0)
        mean = _mean(total, count)
        squares = np.sum(
            [part.squares + part.count * (_mean(part.total, part.count) - mean) ** 2 for part in parts],
            axis=0,
        )
        return cls(count, total, squares)

    def moments(self) -> Moments:
        """Return mean and deviation (of the population); 1 for a feature that is constant, as float32 tells."""
        mean = _mean(self.total, self.count)
        std = np.sqrt(_mean(self.squares, self.count))
        constant = std <= _RESOLUTION * np.abs(mean)
        return Moments(tuple(mean.tolist()), tuple(np.where(constant, 1.0, std).tolist()))


def _mean(total: Vector, count: Vector) -> Vector:
    """Return means (F,), 0 of a feature without values."""
    found: Vector = total / np.maximum(count, 1)
    return found
