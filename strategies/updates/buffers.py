"""Buffers: arrays that a client's steps don't train, such as the running statistics of a normalisation layer.

Methods weight updates by more or less than 1, shorten them, and apply momentum or noise. Such operations make buffers
invalid: a variance below 0, a count that jumps. Buffers are therefore separated when a reply is read, and averaged
convexly:

    synchronous       b ← Σ d_i b_i / Σ d_i
    asynchronous      b ← (1 − a) b + a Σ d_i b_i / Σ d_i, with a = min(1, η Σ d_i), η the method's own step size
"""

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
from numpy.typing import NDArray

from strategies.flower.arrays import Layout, Vector

# Default patterns of the names of buffers: the running statistics of PyTorch's normalisation layers.
UNTRAINED = ("*running_mean", "*running_var", "*num_batches_tracked")


def untrained_names(layout: Layout, patterns: Sequence[str]) -> tuple[str, ...]:
    """Return the names of a model's buffers: arrays of integers, or whose name matches a pattern."""
    return tuple(
        name
        for name, dtype in zip(layout.names, layout.dtypes, strict=True)
        if dtype.kind != "f" or any(fnmatchcase(name, pattern) for pattern in patterns)
    )


def untrained_positions(layout: Layout, patterns: Sequence[str]) -> NDArray[np.intp]:
    """Return the positions (B,) of the values of buffers in a model's vector (D,)."""
    names = set(untrained_names(layout, patterns))
    spans = (span for name, span in zip(layout.names, layout.spans, strict=True) if name in names)
    return np.concatenate([np.empty(0, dtype=np.intp), *(np.arange(span.start, span.stop) for span in spans)])


class Untrained:
    """The values of buffers that clients report, and their average.

    Parameters
    ----------
    positions : array (B,)
        Positions of the buffers' values in a model's vector.
    robust : bool
        Use the median in place of the weighted mean, together with a robust rule.
    """

    def __init__(self, positions: NDArray[np.intp], *, robust: bool = False) -> None:
        self.positions = positions
        self.robust = robust
        self._values: list[Vector] = []
        self._weights: list[float] = []

    def take_out(self, model: Vector, base: NDArray[Any]) -> Vector | None:
        """Return a client's buffers (B,), and replace them in its model by those of ``base``; None if B = 0."""
        if not len(self.positions):
            return None
        values = model[self.positions].copy()
        model[self.positions] = base[self.positions]
        return values

    def add(self, weight: float, values: Vector | None) -> None:
        """Add the buffers (B,) of a client with weight d_i; None adds nothing."""
        if values is not None:
            self._values.append(values)
            self._weights.append(max(weight, 0.0))

    @property
    def weight(self) -> float:
        """Σ d_i of the clients whose buffers were added."""
        return sum(self._weights)

    def put_into(self, model: Vector, share: float = 1.0, before: Vector | None = None) -> None:
        """Move the buffers of a global model (D,), in place, by a share of the way to the clients' average.

        They start from the buffers of the model ``before`` (D,), so that the method's step doesn't affect them.
        """
        if before is not None:
            model[self.positions] = before[self.positions]
        if not self._values or not self.weight > 0:
            return
        if self.robust:
            average = np.median(self._values, axis=0)
        else:
            average = np.zeros(len(self.positions))
            for weight, values in zip(self._weights, self._values, strict=True):
                average += weight / self.weight * values
        if share < 1:
            average = (1 - share) * model[self.positions] + share * average
        model[self.positions] = average
