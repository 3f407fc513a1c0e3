"""Arrays that a client's steps don't train, such as the running statistics of a normalisation layer.

What a method does with updates, to weigh them by more or less than 1, to shorten them, to take them with momentum or
noise, would make nonsense of them: a variance below 0, a count that jumps. They are set apart when a reply is read,
and averaged convexly:

    in rounds         b ← Σ d_i b_i / Σ d_i
    without rounds    b ← (1 − a) b + a Σ d_i b_i / Σ d_i, with a = min(1, η Σ d_i), η the method's own step size
"""

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
from numpy.typing import NDArray

from strategies.flower.arrays import Layout, Vector

# Arrays that a client's steps don't train: the running statistics of PyTorch's normalisation layers.
UNTRAINED = ("*running_mean", "*running_var", "*num_batches_tracked")


def untrained_names(layout: Layout, patterns: Sequence[str]) -> tuple[str, ...]:
    """Return the names of a model's arrays that hold whole numbers, or are called so."""
    return tuple(
        name
        for name, dtype in zip(layout.names, layout.dtypes, strict=True)
        if dtype.kind != "f" or any(fnmatchcase(name, pattern) for pattern in patterns)
    )


def untrained_positions(layout: Layout, patterns: Sequence[str]) -> NDArray[np.intp]:
    """Return where in a model's vector (D,) the values of ``untrained_names`` stand."""
    names = set(untrained_names(layout, patterns))
    spans = (span for name, span in zip(layout.names, layout.spans, strict=True) if name in names)
    return np.concatenate([np.empty(0, dtype=np.intp), *(np.arange(span.start, span.stop) for span in spans)])


class Untrained:
    """What clients say of the values that aren't trained.

    Parameters
    ----------
    positions : array (B,)
        Where they stand in a model's vector.
    robust : bool
        Take their median in place of their mean, beside a robust rule.
    """

    def __init__(self, positions: NDArray[np.intp], *, robust: bool = False) -> None:
        self.positions = positions
        self.robust = robust
        self._values: list[Vector] = []
        self._weights: list[float] = []

    def take_out(self, model: Vector, base: NDArray[Any]) -> Vector | None:
        """Return a client's values (B,), and put those of the model it was sent in their place; None if B = 0."""
        if not len(self.positions):
            return None
        values = model[self.positions].copy()
        model[self.positions] = base[self.positions]
        return values

    def add(self, weight: float, values: Vector | None) -> None:
        """Take in what a client with weight d_i says."""
        if values is not None:
            self._values.append(values)
            self._weights.append(max(weight, 0.0))

    @property
    def weight(self) -> float:
        """Σ d_i of what was taken in."""
        return sum(self._weights)

    def put_into(self, model: Vector, share: float = 1.0, before: Vector | None = None) -> None:
        """Move the values in a global model (D,), in place, by a share of the way to the clients' average.

        They start from those of the model ``before`` (D,), whatever the method made of them in its step.
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
