"""A task: all that a client's local training needs; and the tasks of many clients, by column.

A ``TaskBlock`` has the tasks of clients who are sent the same model and have their rows in the same data. What these
tasks share is looked up once, and no object is made for each task. The tasks that take their steps together are a
``TaskStack``, which can also be made of single tasks.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedapp.names import Precision
from fedapp.training.augment import Augmentation
from fedapp.training.batches import SENT, Batches, BatchesOfMany, Draws, steps_of_all
from fedapp.training.losses import CROSS_ENTROPY, Loss
from fedapp.training.optimizer import SGD, LocalOptimizer
from fedapp.training.rule import Anchors, LocalRule, Parameters, Stack
from fedapp.training.state import copied_state, names_of


@dataclass(frozen=True, eq=False)
class LocalTask:
    """All that a client's local training needs.

    Attributes
    ----------
    model : nn.Module
        Says what the parameters mean. Its own values are used of arrays that are in neither ``start`` nor ``fixed``.
    start : dict of str to Tensor
        Where training starts, on the data's device: w̄, the parameters sent to the client.
    x, y : Tensor
        Inputs (N, ...) and targets, labels (N,) or numbers (N, M): the client's own rows are those from
        ``offset`` on.
    offset : int
        0, or where the client's rows begin in data that are shared by many.
    batches : Batches
        What each local step sees of the client's rows.
    lr : float
        γ, the step size.
    rule : LocalRule
        The method's local step.
    neighbours : dict of str to Tensor, optional
        u, the neighbour average; needed if ``rule.beta`` < 1.
    constant : dict of str to Tensor, optional
        h, added to every gradient after it is clipped: a client's control variate.
    fixed : mapping of str to Tensor
        What of the model's state isn't trained, as it was sent: buffers that training changes.
    loss : Loss
        Of an example.
    optimizer : LocalOptimizer
        What moves the model along a step's direction.
    ids : three ints
        Seed, client and task: what the model's own random numbers (dropout) follow from.
    augmentation : Augmentation, optional
        What becomes of the images that each step reads.
    anchor : dict of str to Tensor, optional
        What ``rule.alpha`` pulls towards, where that isn't ``start``.
    draws : Draws
        The streams that its random numbers come from.
    precision : str
        Of forward and backward passes: ``fedapp.training.precision``.
    """

    model: nn.Module
    start: Parameters
    x: Tensor
    y: Tensor
    offset: int
    batches: Batches
    lr: float
    rule: LocalRule
    neighbours: Parameters | None = None
    constant: Parameters | None = None
    fixed: Mapping[str, Tensor] = field(default_factory=dict)
    loss: Loss = CROSS_ENTROPY
    optimizer: LocalOptimizer = SGD
    ids: tuple[int, int, int] = (0, 0, 0)
    augmentation: Augmentation | None = None
    anchor: Parameters | None = None
    draws: Draws = SENT
    precision: Precision = "fp32"

    def __post_init__(self) -> None:
        self.rule.check(self.neighbours)

    @property
    def noise(self) -> int:
        """Return the seed of the random numbers that the model draws in training."""
        seed, client, task = self.ids
        return self.draws.randomness(seed, client, task)

    @property
    def pulled_to(self) -> Parameters:
        """What ``rule.alpha`` pulls towards."""
        return self.start if self.anchor is None else self.anchor

    @property
    def rows(self) -> slice:
        """The client's rows of x and y."""
        return slice(self.offset, self.offset + self.batches.num_examples)


def plain_task(model: nn.Module, loss: Loss, x: Tensor, y: Tensor, *, steps: int, lr: float) -> LocalTask:
    """Return the task to train a model as it is on all rows of x and y, by steps of SGD."""
    names, state = names_of(model), copied_state(model)
    start, fixed = ({name: state[name] for name in part} for part in (names.trained, names.fixed))
    batches = steps_of_all(steps, len(x))
    return LocalTask(model, start, x, y, 0, batches, lr, LocalRule(), fixed=fixed, loss=loss)


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
        """Stack tasks with the same model, rule, loss, optimizer, x and y, all or none with a ``constant``.

        A longer one never comes after a shorter one.
        """
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
        """Stack tasks, sorted by decreasing number of steps; all share the sent model and have no other anchor."""
        like, count = self.one(places[0]), len(places)
        start = Stack.of([like.start] * count)
        anchors = Anchors[Stack](Stack.of([like.pulled_to] * count) if like.rule.alpha else None, None, None)
        indices, sizes = self.batches.stacked(places)
        chosen = np.asarray(places)
        lr = torch.tensor(self.lr[chosen], dtype=torch.float32, device=like.x.device)
        return TaskStack(like, start, anchors, lr, indices + self.offsets[chosen, None], sizes)
