"""Tasks of many clients, by column: what they share is looked up once, and no object is made for each.

A ``TaskBlock`` is of clients who are sent the same model and have their rows in the same data. Those of its tasks
that take their steps together are a ``TaskStack``, as tasks from anywhere may be.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedapp.training.batches import BatchesOfMany
from fedapp.training.rule import Anchors
from fedapp.training.task import LocalTask
from fedapp.training.vectors import Stack


@dataclass(frozen=True, eq=False)
class TaskStack:
    """Tasks of G clients that take their steps together, of which none is longer than the one before.

    Attributes
    ----------
    like : LocalTask
        One of them: all have its model, data, rule, loss and optimizer.
    start : Stack
        Where training starts, (G, ...).
    anchors : Anchors
        What the rule pulls towards, and the like.
    lr : Tensor (G,)
        γ of each.
    rows : int array (S, G, B)
        Rows of the data that each step sees; where it sees fewer, some row of the client's own.
    sizes : int array (S, G)
        How many of them; 0 after a client's last step.
    """

    like: LocalTask
    start: Stack
    anchors: Anchors[Stack]
    lr: Tensor
    rows: NDArray[np.int64]
    sizes: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.lr)

    @property
    def steps(self) -> NDArray[np.int64]:
        """S_i of each, (G,)."""
        return np.asarray((self.sizes > 0).sum(0))

    @classmethod
    def of(cls, tasks: Sequence[LocalTask]) -> "TaskStack":
        """Stack tasks with the same model, rule, loss, optimizer, x and y, all or none with a ``constant``."""
        first, rule = tasks[0], tasks[0].rule
        anchors = Anchors(
            Stack.of([task.pulled_to for task in tasks]) if rule.alpha else None,
            Stack.of([task.neighbours or {} for task in tasks]) if rule.beta != 1 else None,
            Stack.of([task.constant or {} for task in tasks]) if first.constant is not None else None,
        )
        steps, width = len(first.batches), max(task.batches.indices.shape[1] for task in tasks)
        rows = np.zeros((steps, len(tasks), width), np.int64)
        sizes = np.zeros((steps, len(tasks)), np.int64)
        for k, task in enumerate(tasks):
            count, own = task.batches.indices.shape
            rows[:, k] = task.offset
            rows[:count, k, :own] += task.batches.indices
            sizes[:count, k] = task.batches.sizes
        start = Stack.of([task.start for task in tasks])
        lr = torch.tensor([task.lr for task in tasks], device=first.x.device)
        return cls(first, start, anchors, lr, rows, sizes)


@dataclass(frozen=True, eq=False)
class TaskBlock:
    """Tasks of G clients.

    Attributes
    ----------
    one : callable
        Returns one of them, by its place.
    batches : BatchesOfMany
        What their steps see.
    offsets : int array (G,)
        Where the clients' rows begin in the data.
    lr : array (G,)
        γ of each.
    """

    one: Callable[[int], LocalTask]
    batches: BatchesOfMany
    offsets: NDArray[np.int64]
    lr: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.offsets)

    @property
    def kinds(self) -> list[tuple[int, int, int]]:
        """Steps, width and examples of each: of two that are alike in these, both are trained in the same way."""
        batches = self.batches
        columns = (batches.steps, batches.widths, batches.num_examples)
        return list(zip(*(column.tolist() for column in columns), strict=True))

    def stacked(self, places: Sequence[int]) -> TaskStack:
        """Return some, of which none is longer than the one before, as a stack: they have but the model."""
        like, count = self.one(places[0]), len(places)
        start = Stack.of([like.start] * count)
        anchors = Anchors[Stack](Stack.of([like.pulled_to] * count) if like.rule.alpha else None, None, None)
        indices, sizes = self.batches.stacked(places)
        chosen = np.asarray(places)
        lr = torch.tensor(self.lr[chosen], dtype=torch.float32, device=like.x.device)
        return TaskStack(like, start, anchors, lr, indices + self.offsets[chosen, None], sizes)
