"""Buffers: arrays that a client's steps don't train, such as the running statistics of a normalisation layer.

Methods weight updates by more or less than 1, shorten them, and apply momentum or noise. Such operations make buffers
invalid: a variance below 0, a count that jumps. Buffers are therefore separated when a reply is read, and averaged
convexly:

    synchronous       b ← Σ d_i b_i / Σ d_i
    asynchronous      b ← (1 − a) b + a Σ d_i b_i / Σ d_i, with a = min(1, η Σ d_i), η the method's own step size

With safeguards each value is bounded first, by the median and the spread of recent clients' values.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
from numpy.typing import NDArray

from strategies.flower.arrays import ArraysMismatchError, Layout, ModelView, Vector

# Default patterns of the names of buffers: the running statistics of PyTorch's normalisation layers.
UNTRAINED = ("*running_mean", "*running_var", "*num_batches_tracked")
# Patterns of the names of variances among them, which are 0 or more: PyTorch's, Keras's and Flax's.
VARIANCES = ("*running_var", "*moving_var", "*moving_variance", "*batch_stats*var")

MOST_RECENT = 32  # clients whose buffers are compared
SPREADS = 5.0  # median absolute deviations from the median; 3.4 standard deviations of a normal law


def untrained_names(layout: Layout, patterns: Sequence[str]) -> tuple[str, ...]:
    """Return the names of a model's buffers: arrays of integers, or whose name matches a pattern."""
    return tuple(
        name
        for name, dtype in zip(layout.names, layout.dtypes, strict=True)
        if dtype.kind != "f" or any(fnmatchcase(name, pattern) for pattern in patterns)
    )


def untrained_positions(layout: Layout, patterns: Sequence[str]) -> NDArray[np.intp]:
    """Return the positions (B,) of the values of buffers in a model's vector (D,)."""
    return Buffers.of(layout, patterns).positions


@dataclass(frozen=True, eq=False)
class Buffers:
    """Where the buffers of a model are.

    Attributes
    ----------
    positions : array (B,)
        Positions of the buffers' values in a model's vector (D,).
    counters, variances : array (B,) of bool
        Which of these values belong to arrays of integers, and which to variances.
    arrays : tuple of int
        The numbers of the buffers among a model's arrays.
    """

    positions: NDArray[np.intp]
    counters: NDArray[np.bool_]
    variances: NDArray[np.bool_]
    arrays: tuple[int, ...] = ()

    @classmethod
    def of(cls, layout: Layout, patterns: Sequence[str]) -> "Buffers":
        """Find the buffers of a layout: arrays of integers, or whose name matches a pattern."""
        names = set(untrained_names(layout, patterns))
        arrays = zip(layout.names, layout.dtypes, layout.spans, strict=True)
        found = [(name, dtype, span) for name, dtype, span in arrays if name in names]
        sizes = [span.stop - span.start for _, _, span in found]
        of_variances = [any(fnmatchcase(name, each) for each in VARIANCES) for name, _, _ in found]
        return cls(
            np.concatenate(
                [np.empty(0, dtype=np.intp), *(np.arange(span.start, span.stop) for _, _, span in found)]
            ),
            np.repeat(np.array([dtype.kind != "f" for _, dtype, _ in found], dtype=bool), sizes),
            np.repeat(np.array(of_variances, dtype=bool), sizes),
            tuple(place for place, name in enumerate(layout.names) if name in names),
        )

    def __len__(self) -> int:
        return len(self.positions)

    def take_out(self, model: Vector | ModelView, base: NDArray[Any]) -> Vector | None:
        """Return a client's buffers (B,), and replace them in its model by those of ``base``; None if B = 0."""
        if not len(self.positions):
            return None
        if isinstance(model, ModelView):
            return model.exchange(self.arrays, base)
        values = model[self.positions]
        model[self.positions] = base[self.positions]
        return values

    def check(self, values: Vector | None) -> None:
        """Raise ArraysMismatchError if a variance among the values (B,) of buffers is negative."""
        if values is not None and (least := float(values[self.variances].min(initial=0.0))) < 0:
            raise ArraysMismatchError(
                f"its running variances go down to {least:.3g}; a variance is 0 or more"
            )

    def counter_origin(self, base: NDArray[Any]) -> Vector:
        """Return the origin (B,) of what is compared: for counters what was sent, of ``base`` (D,), else 0."""
        return np.where(self.counters, base[self.positions], 0.0)

    def shorten(self, values: Vector, base: NDArray[Any], norm: float) -> bool:
        """Shorten the change of the statistics, in place, to a norm; return True if it was longer.

        Counters are left alone: their change is a number of steps.
        """
        statistics = ~self.counters
        change = (values - base[self.positions])[statistics]
        if (length := float(np.linalg.norm(change))) <= norm:
            return False
        values[statistics] -= change * (1 - norm / length)
        return True


class UsualBuffers:
    """Bounds what clients report of each buffer by the spread of what recent clients reported.

    The values of statistics are compared, and the changes of counters, because counters grow. m is the median of a
    value over the last ``MOST_RECENT`` clients, one value for each, and s = median |value − m| is its spread. A value
    counts as at most ``SPREADS`` s from m. A counter counts as no lower than it was sent, unless most clients lower
    it. With fewer than ``least`` clients nothing is bounded.

    Parameters
    ----------
    least : int
        Least number of clients for a median.
    """

    def __init__(self, least: int) -> None:
        self._least = least
        self._recent: dict[int, Vector] = {}  # the last values (B,) by client index, the latest last

    def __len__(self) -> int:
        return len(self._recent)

    def observe(self, index: int, values: Vector) -> None:
        """Record what a client, by index, reports (B,)."""
        self._recent.pop(index, None)
        self._recent[index] = values.copy()

    def bound(self, buffers: Buffers, reported: Sequence[tuple[int, Vector]]) -> None:
        """Bound what clients, by index, report (B,), in place; all of them are recent ones."""
        for index, values in reported:
            self.observe(index, values)
        recent = list(self._recent.items())[-max(MOST_RECENT, len(reported)) :]
        if len(recent) >= self._least:
            known = np.array([values for _, values in recent])
            median = np.median(known, axis=0)
            spread = SPREADS * np.median(np.abs(known - median), axis=0)
            low = np.where(buffers.counters & (median >= 0), np.maximum(median - spread, 0), median - spread)
            for _, values in reported:
                np.clip(values, low, median + spread, out=values)
        self._recent = dict(recent[-MOST_RECENT:])

    def state(self) -> dict[str, Any]:
        """Return what a run goes on from."""
        if not self._recent:
            return {}
        return {"buffers-of": list(self._recent), "buffers": np.array(list(self._recent.values()))}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state``."""
        of = state.get("buffers-of", ())
        self._recent = dict(zip(of, map(np.array, state.get("buffers", ())), strict=True))


class BufferAverage:
    """The values of buffers that clients report, and their average.

    Parameters
    ----------
    buffers : Buffers
        Where they are in a model.
    robust : bool
        Use the median in place of the weighted mean, together with a robust rule.
    """

    def __init__(self, buffers: Buffers, *, robust: bool = False) -> None:
        self.buffers, self.robust = buffers, robust
        self._weights: list[float] = []
        self._values: list[Vector] = []
        self._clients: list[int] = []
        self._counter_origin: list[Vector | float] = []

    def add(
        self, client: int, weight: float, values: Vector | None, counter_origin: Vector | float = 0.0
    ) -> None:
        """Add the buffers (B,) of a client, by index, with weight d_i; None adds nothing.

        Parameters
        ----------
        counter_origin : array (B,), or 0
            The counters as they were sent, and 0 for the other buffers.
        """
        if values is not None:
            self._weights.append(max(weight, 0.0))
            self._values.append(values)
            self._clients.append(client)
            self._counter_origin.append(counter_origin)

    def bound(self, usual: UsualBuffers) -> None:
        """Bound all values that were added, in place, by what is usual."""
        for values, origin in zip(self._values, self._counter_origin, strict=True):
            values -= origin
        if self._values:
            usual.bound(self.buffers, list(zip(self._clients, self._values, strict=True)))
        for values, origin in zip(self._values, self._counter_origin, strict=True):
            values += origin

    @property
    def weight(self) -> float:
        """Σ d_i of the clients whose buffers were added."""
        return sum(self._weights)

    def put_into(self, model: Vector, share: float = 1.0, before: Vector | None = None) -> None:
        """Move the buffers of a global model (D,), in place, by a share of the way to the clients' average.

        They start from the buffers of the model ``before`` (D,), so that the method's step doesn't affect them.
        """
        positions = self.buffers.positions
        if before is not None:
            model[positions] = before[positions]
        if not self._values or not self.weight > 0:
            return
        if self.robust:
            average = np.median(self._values, axis=0)
        else:
            average = np.zeros(len(positions))
            for weight, values in zip(self._weights, self._values, strict=True):
                average += weight / self.weight * values
        if share < 1:
            average = (1 - share) * model[positions] + share * average
        model[positions] = average
