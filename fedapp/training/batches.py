"""Which examples each local step of a task sees, and the random streams that a task draws from.

A task's model is sent to the server, is the client's own, or is fitted to the client's rows before it is scored: each
of the three purposes has random streams of its own (``Draws``).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from strategies import streams

Generator = Callable[[int, int, int], np.random.Generator]


@dataclass(frozen=True)
class Draws:
    """The streams of a task."""

    batches: Generator
    augmentation: Generator
    randomness: Callable[[int, int, int], int]


#: Of the task whose result is sent.
SENT = Draws(
    lambda seed, *ids: streams.generator(seed, "batches", *ids),
    lambda seed, *ids: streams.generator(seed, "augmentation", *ids),
    lambda seed, *ids: streams.whole_number(seed, "local-randomness", *ids),
)
#: Of a client's own model.
PERSONAL = Draws(
    lambda seed, *ids: streams.generator(seed, "personal-batches", *ids),
    lambda seed, *ids: streams.generator(seed, "personal-augmentation", *ids),
    lambda seed, *ids: streams.whole_number(seed, "personal-randomness", *ids),
)
#: Of a model that is fitted to a client's rows before it is scored.
FINE_TUNING = Draws(
    lambda seed, *ids: streams.generator(seed, "fine-tuning-batches", *ids),
    lambda seed, *ids: streams.generator(seed, "fine-tuning-augmentation", *ids),
    lambda seed, *ids: streams.whole_number(seed, "fine-tuning-randomness", *ids),
)


def batches_of_many(seed: int, clients: Sequence[int], task: int) -> Iterator[np.random.Generator]:
    """Yield the generator from which ``SENT`` draws the batches of a task, for each client."""
    return streams.generators(seed, "batches", [(client, task) for client in clients])


# Rows of a batch: an index into the client's data, or everything; and the mask of a padded batch.
Batch = tuple[Tensor | slice, Tensor | None]

# Up to this number of examples a list is shuffled faster than an array.
FEW = 24


@dataclass(frozen=True)
class Batches:
    """Which examples each local step sees.

    Attributes
    ----------
    indices : np.ndarray
        Shape (S, B), int64: rows of the client's data; entries past ``sizes`` are padding (0).
    sizes : np.ndarray
        Shape (S,): real examples of each step.
    num_examples : int
        n_i: the rows are 0 to n_i − 1.
    whole : bool
        Every step sees all examples, in order.
    """

    indices: np.ndarray
    sizes: np.ndarray
    num_examples: int
    whole: bool = False

    def __len__(self) -> int:
        return len(self.sizes)

    def ragged(self, device: torch.device | str = "cpu") -> list[Batch]:
        """Return the batches of one client without padding."""
        if self.whole:
            return [(slice(None), None)] * len(self)
        indices = torch.from_numpy(self.indices).to(device)
        return [(indices[step, :size], None) for step, size in enumerate(self.sizes.tolist())]

    def padded(self, steps: int, width: int) -> tuple[np.ndarray, np.ndarray]:
        """Return indices and mask, each (steps, width), for training as one of a batch of clients."""
        indices = np.zeros((steps, width), dtype=np.int64)
        mask = np.zeros((steps, width), dtype=np.float32)
        indices[: len(self), : self.indices.shape[1]] = self.indices
        mask[: len(self), : self.indices.shape[1]] = np.arange(self.indices.shape[1]) < self.sizes[:, None]
        return indices, mask


def plan_batches(
    num_examples: int, *, batch_size: int, epochs: int, steps: int, rng: np.random.Generator
) -> Batches:
    """Draw the batches of one task.

    Parameters
    ----------
    num_examples : int
        n_i ≥ 1.
    batch_size : int
        B; 0, or more than n_i: all examples.
    epochs, steps : int
        One of the two is 0. Epochs pass over a fresh permutation each, the last batch of an epoch may be smaller;
        a step draws B different examples at random.
    rng : np.random.Generator
        The task's own random stream.
    """
    one = np.ones(1, np.int64)
    planned = plan_many(
        num_examples * one, batch_size=batch_size, epochs=epochs * one, steps=steps * one, rngs=[rng]
    )
    return planned.of(0)


def steps_of_all(count: int, rows: int) -> Batches:
    """Return steps that see all rows, by their indices."""
    return Batches(np.tile(np.arange(rows), (count, 1)), np.full(count, rows), rows)


def _whole(num_examples: int, steps: int) -> Batches:
    everything = np.broadcast_to(np.arange(num_examples), (steps, num_examples))
    return Batches(everything, np.full(steps, num_examples), num_examples, whole=True)


@dataclass(frozen=True, eq=False)
class BatchesOfMany:
    """Which examples each local step of G tasks sees: the arrays of G ``Batches``, column by column.

    Attributes
    ----------
    num_examples, steps, widths : int array (G,)
        n_i, S_i and B_i: a task's indices are (S_i, B_i).
    per_epoch, last : int array (G,)
        Number of steps of an epoch, and number of examples in the last of them; the other steps see B_i.
    order, starts : int array (T,), (G,)
        The indices of all tasks, one task after the other, and where each task's begin; empty with ``whole``.
    whole : bool
        Every step sees all examples of its task, in order.
    """

    num_examples: NDArray[np.int64]
    steps: NDArray[np.int64]
    widths: NDArray[np.int64]
    per_epoch: NDArray[np.int64]
    last: NDArray[np.int64]
    order: NDArray[np.int64]
    starts: NDArray[np.int64]
    whole: bool

    def __len__(self) -> int:
        return len(self.steps)

    def of(self, place: int) -> Batches:
        """Return the batches of one task."""
        steps, width, number = int(self.steps[place]), int(self.widths[place]), int(self.num_examples[place])
        if self.whole:
            return _whole(number, steps)
        start = int(self.starts[place])
        indices = self.order[start : start + steps * width].reshape(steps, width)
        return Batches(indices, self._sizes(np.array([place]), steps)[:, 0], number)

    def stacked(self, places: Sequence[int]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the indices (S, G, B) and sizes (S, G) of some tasks, the one with most steps first.

        Indices and sizes of steps that a task doesn't have are 0.
        """
        chosen = np.asarray(places)
        steps = int(self.steps[chosen[0]])
        indices = np.zeros((steps, len(chosen), int(self.widths[chosen].max())), np.int64)
        shapes = zip(self.steps[chosen].tolist(), self.widths[chosen].tolist(), strict=True)
        begin = 0
        for (own, width), alike in groupby(shapes):
            end = begin + len(list(alike))
            seen: NDArray[np.int64] = np.arange(own * width) % width
            if not self.whole:
                seen = self.order[self.starts[chosen[begin:end], None] + np.arange(own * width)]
            indices[:own, begin:end, :width] = seen.reshape(-1, own, width).transpose(1, 0, 2)
            begin = end
        return indices, self._sizes(chosen, steps)

    def _sizes(self, chosen: NDArray[np.int64], steps: int) -> NDArray[np.int64]:
        number = np.arange(1, steps + 1)[:, None]
        ends_epoch = number % self.per_epoch[chosen] == 0
        sizes = np.where(ends_epoch, self.last[chosen], self.widths[chosen])
        return np.where(number <= self.steps[chosen], sizes, 0)


def permutation(number: int, rng: np.random.Generator) -> Sequence[int] | NDArray[np.int64]:
    """Return ``rng.permutation(number)``.

    A list is shuffled by the same draws, and without giving away Python's lock: of few, a thread would wait for it
    longer than it shuffles.
    """
    if number > FEW:
        return rng.permutation(number)
    numbers = list(range(number))
    rng.shuffle(numbers)
    return numbers


def plan_many(
    num_examples: NDArray[np.int64],
    *,
    batch_size: int,
    epochs: NDArray[np.int64],
    steps: NDArray[np.int64],
    rngs: Iterable[np.random.Generator],
) -> BatchesOfMany:
    """Draw the batches of G tasks, as ``plan_batches`` does for one; arrays are (G,), and so is ``rngs``."""
    widths = np.minimum(num_examples, batch_size) if batch_size else num_examples
    in_epochs, once = bool(epochs.any()) and batch_size > 0, np.ones_like(widths)
    per_epoch = -(-num_examples // widths) if in_epochs else once
    last = num_examples - (per_epoch - 1) * widths if in_epochs else widths
    count = np.where(epochs > 0, epochs * per_epoch, steps)
    ends = np.cumsum(count * widths)
    order = np.zeros(int(ends[-1]) if batch_size else 0, np.int64)
    planned = BatchesOfMany(
        num_examples, count, widths, per_epoch, last, order, ends - count * widths, not batch_size
    )
    if not batch_size:
        return planned
    strides = (per_epoch * widths).tolist()  # from one permutation, or one step's draw, to the next
    numbers, drawn, starts = num_examples.tolist(), last.tolist(), planned.starts.tolist()
    for rng, number, width, stride, start, end in zip(
        rngs, numbers, drawn, strides, starts, ends.tolist(), strict=True
    ):
        for begin in range(start, end, stride):
            if in_epochs:
                order[begin : begin + number] = permutation(number, rng)
            else:
                order[begin : begin + width] = rng.choice(number, width, replace=False, shuffle=False)
    return planned


def task_rng(seed: int, client: int, task: int) -> np.random.Generator:
    """Return the random stream of a client's task: the same whichever engine or worker runs it."""
    return SENT.batches(seed, client, task)
