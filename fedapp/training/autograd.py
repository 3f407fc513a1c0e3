"""Training by automatic differentiation: any model, one client or, under ``torch.func.vmap``, a batch of clients.

Ragged clients of a batch are padded, and a mask says which examples are real.
"""

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import repeat
from typing import Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from fedapp.names import Precision
from fedapp.training.augment import augmented
from fedapp.training.batches import Batch
from fedapp.training.losses import Loss
from fedapp.training.memory import keep_freed
from fedapp.training.optimizer import Move
from fedapp.training.parts import inputs_of
from fedapp.training.precision import passed
from fedapp.training.rule import Anchors, LocalRule, Parameters, Stack, Tensors, step
from fedapp.training.task import LocalTask
from fedapp.training.trainee import (
    Trainee,
    as_it_is,
    by_channel,
    draws_globally,
    global_stream,
    takes_by_channel,
)

T = TypeVar("T", bound=Tensors)

# Which images of a batch are mirrored (B,), and where they are cut out (B, 2).
Change = tuple[Tensor, Tensor]


class BatchLoss(Protocol):
    """Mean loss of a batch, a scalar; ``mask`` (B,) weighs the examples of a padded batch."""

    def __call__(self, parameters: Parameters, x: Tensor, y: Tensor, mask: Tensor | None) -> Tensor: ...


def batch_loss(trainee: Trainee, loss: Loss, fixed: Parameters, precision: Precision = "fp32") -> BatchLoss:
    """Return the mean loss of a batch as a function of what is trained; buffers in ``fixed`` are kept up to date."""

    def of(parameters: Parameters, x: Tensor, y: Tensor, mask: Tensor | None) -> Tensor:
        state = {**fixed, **parameters}
        outputs = passed(precision, x.device, partial(trainee, state, x))
        for name, value in fixed.items():
            fixed[name] = _up_to_date(name, value, state[name], in_place=not trainee.is_alone)
        return loss.mean(outputs, y, mask, lambda: inputs_of(trainee.module, x))

    return of


def _up_to_date(name: str, value: Tensor, found: Tensor, *, in_place: bool) -> Tensor:
    """Return the value of a buffer after the forward pass, which may have put another tensor in its place.

    The value is in new memory, as the backward pass may need the old value. With ``in_place`` it is written to the
    old memory, as ``vmap`` demands, which raises an error if the buffer would differ from client to client.
    """
    if found is value:
        return value.detach() if value.requires_grad else value
    if found.shape != value.shape:
        raise RuntimeError(
            f"the buffer {name} {tuple(value.shape)} is assigned {tuple(found.shape)} in the forward pass"
        )
    if in_place:
        return value.copy_(found.detach())
    return found.detach().to(value, copy=True)  # of the same type, and no part of the data


def _gradient(
    loss: BatchLoss, x: Tensor, y: Tensor, mask: Tensor | None, point: Tensors
) -> tuple[Tensors, Tensor]:
    """Return gradient and value at a point.

    What the loss of a batch doesn't depend on, such as a layer that is left out at random, has gradient 0.
    """
    leaves = {name: value.detach().requires_grad_() for name, value in point.named.items()}
    value = loss(leaves, x, y, mask)
    return Tensors(_by_leaves(value, leaves)), value.detach()


def _by_leaves(value: Tensor, leaves: Parameters) -> Parameters:
    """Return the gradients; those of ``nn.Embedding(sparse=True)`` are dense, as the terms of a method's rule are."""
    gradients = torch.autograd.grad(value, list(leaves.values()), allow_unused=True, materialize_grads=True)
    return {name: each.to_dense() for name, each in zip(leaves, gradients, strict=True)}


def train(
    loss: BatchLoss,
    start: Parameters,
    x: Tensor,
    y: Tensor,
    batches: Iterable[Batch],
    lr: float | Tensor,
    rule: LocalRule,
    *,
    anchor: Parameters | None = None,
    neighbours: Parameters | None = None,
    constant: Parameters | None = None,
    move: Move | None = None,
    changes: Iterable[Change] | None = None,
) -> tuple[Parameters, Tensor]:
    """Train a model on one client's data; ``start`` is left as it is.

    Parameters
    ----------
    loss : BatchLoss
        Mean loss of a batch.
    start : dict of str to Tensor
        Where training starts: w̄, the model sent to the client.
    x, y : Tensor
        The client's inputs (n, ...) and targets (n, ...).
    batches : iterable of Batch
        One per local step; a batch whose mask is all zero leaves the model as it is.
    lr : float or Tensor
        γ, the step size.
    rule : LocalRule
        The method's local step.
    anchor : dict of str to Tensor, optional
        What ``alpha`` pulls towards; by default ``start``.
    neighbours, constant : dict of str to Tensor, optional
        u, the neighbour average, without which ``rule.beta`` < 1 is a ValueError; h, added to every gradient.
    move : callable, optional
        An optimizer's, in place of w ← w − γ v.
    changes : iterable of Change, optional
        The augmentation of each step's images; none by default.

    Returns
    -------
    dict of str to Tensor, Tensor
        The trained parameters, and the loss averaged over the steps (without the terms of λ, α and h).
    """
    w = Tensors({name: value.clone() for name, value in start.items()})
    fixed = (start if anchor is None else anchor, neighbours, constant)
    anchors = Anchors(*(None if one is None else Tensors(one) for one in fixed))
    steps = (
        (
            partial(_gradient, loss, _changed(x, rows, change), y[rows], mask),
            1.0 if mask is None else (mask.sum() > 0).to(next(iter(start.values())).dtype),
        )
        for (rows, mask), change in zip(batches, _or_none(changes), strict=False)
    )
    losses = _Losses(x.new_zeros((), dtype=torch.float32))
    _descend(rule, w, anchors, steps, lr, move, losses)
    return w.named, losses.mean


def _descend(
    rule: LocalRule,
    w: T,
    anchors: Anchors[T],
    steps: Iterable[tuple[Callable[[T], tuple[T, Tensor]], float | Tensor]],
    lr: float | Tensor,
    move: Move | None,
    losses: "_Losses",
) -> None:
    """Take steps in place: of each its gradient, and 1, or 0 for clients whose step is all padding."""
    velocity: T | None = None
    for gradient, active in steps:
        # A step that is all padding must not move the model by momentum, λ, α or h either.
        velocity, value = step(rule, w, anchors, gradient, lr * active, velocity, move)
        losses.add(value, active)


class _Losses:
    """The losses of a task's steps.

    Parameters
    ----------
    zero : Tensor
        A loss of 0, a scalar, or of each client, (G,).
    """

    def __init__(self, zero: Tensor) -> None:
        self._total, self._count = zero, zero

    def add(self, losses: Tensor, active: float | Tensor) -> None:
        """Add the losses of a step; ``active``: 0 for clients that took none, else 1.

        A step of whose positions none counts has no loss.
        """
        unknown = losses.isnan()
        self._total = self._total + (losses * active).masked_fill(unknown, 0)
        self._count = self._count + active * ~unknown

    @property
    def mean(self) -> Tensor:
        """The losses averaged over the steps that have one; NaN if none has."""
        return self._total / self._count


def _changed(x: Tensor, rows: Tensor | slice, change: tuple[Tensor, ...]) -> Tensor:
    if not change:
        return x[rows]
    inputs = augmented(x[rows], *change)
    return inputs.contiguous() if x.is_contiguous() else inputs  # as a model that uses ``view`` wants them


def _or_none(changes: Iterable[Change] | None) -> Iterable[tuple[Tensor, ...]]:
    return repeat(()) if changes is None else changes


def train_single(task: LocalTask) -> tuple[Parameters, Tensor]:
    """Train one client; return its parameters and its buffers, and its loss averaged over the steps."""
    keep_freed()
    fixed = {name: value.clone() for name, value in task.fixed.items()}
    move = task.optimizer.begin()
    state, x = {**fixed, **task.start}, task.x[task.rows]
    with _own_copy(task.model, state) as trainee:
        drawn = draws_globally(task.model, trainee, state, x)
        laid_out = by_channel if takes_by_channel(task.model, trainee, state, x) else as_it_is
        if trainee.drops:
            trainee.begin(task.noise)
        with global_stream(task.noise, task.x.device) if drawn else nullcontext(), trainee.alone():
            w, loss = train(
                batch_loss(trainee, task.loss, fixed, task.precision),
                {name: laid_out(value) for name, value in task.start.items()},
                laid_out(x),
                task.y[task.rows],
                task.batches.ragged(task.x.device),
                task.lr,
                task.rule,
                anchor=task.anchor,
                neighbours=task.neighbours,
                constant=task.constant,
                move=move,
                changes=_changes(task),
            )
    return w | fixed, loss


def _changes(task: LocalTask) -> list[Change] | None:
    """Return the flips and shifts of the images of each step, for one client; None without augmentation."""
    if task.augmentation is None:
        return None
    flips, shifts = (
        torch.from_numpy(drawn).to(task.x.device)
        for drawn in (task.augmentation.flips, task.augmentation.shifts)
    )
    return [
        (flips[step, :size], shifts[step, :size]) for step, size in enumerate(task.batches.sizes.tolist())
    ]


_copies = threading.local()


@contextmanager
def _own_copy(model: nn.Module, sent: Collection[str]) -> Iterator[Trainee]:
    """Yield this thread's copy of a model for training; check that training changes no array that isn't ``sent``."""
    if getattr(_copies, "model", None) is not model:
        _copies.model, _copies.trainee = model, Trainee(model)
    own: Trainee = _copies.trainee
    own.forget()
    _copies.model = None  # unless all goes well
    yield own
    own.check_constant(sent)
    _copies.model = model


def train_vmapped(tasks: Sequence[LocalTask]) -> tuple[Parameters, Tensor]:
    """Train a batch of clients on shared data, padded and masked.

    Parameters
    ----------
    tasks : sequence of LocalTask
        With the same model, rule, loss, optimizer, x and y, and all or none with a ``constant``, with an
        ``augmentation`` and with an ``anchor``.

    Returns
    -------
    dict of str to Tensor, Tensor
        The trained parameters, each (G, ...), and the losses averaged over each client's steps, (G,).
    """
    first, device = tasks[0], tasks[0].x.device
    lr = torch.tensor([task.lr for task in tasks], device=device)
    w = Stack.of([task.start for task in tasks])
    fixed = Stack.of([dict(task.fixed) for task in tasks]).named
    losses = _Losses(torch.zeros(len(tasks), device=device))
    with _own_copy(first.model, {*first.start, *first.fixed}) as trainee:
        if trainee.convolutions.take_products(device):
            state = {**first.fixed, **first.start}
            trainee.convolutions.by_channel = takes_by_channel(
                first.model, trainee, state, first.x[first.rows]
            )
            trainee.forget()

        def loss_of(own: Parameters, fixed: Parameters, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
            return batch_loss(trainee, first.loss, fixed)(own, x, y, mask)

        steps = (
            (partial(_gradients, loss_of, fixed, x, y, mask), (mask.sum(1) > 0).to(lr.dtype))
            for x, y, mask in _padded_batches(tasks)
        )
        _descend(first.rule, w, _anchors(tasks, w), steps, lr, first.optimizer.begin(), losses)
    return {**w.named, **fixed}, losses.mean


def _anchors(tasks: Sequence[LocalTask], start: Stack) -> Anchors[Stack]:
    """Return the anchors of a batch of clients, w̄ being their ``start`` unless the tasks have another."""
    first = tasks[0]

    def stacked(name: str) -> Stack | None:
        unread = getattr(first, name) is None or (name == "neighbours" and first.rule.beta == 1)
        return None if unread else Stack.of([getattr(task, name) for task in tasks])

    sent = stacked("anchor") or Stack({name: value.clone() for name, value in start.named.items()})
    return Anchors(sent, stacked("neighbours"), stacked("constant"))


def _padded_batches(tasks: Sequence[LocalTask]) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield inputs (G, B, ...), targets (G, B, ...) and mask (G, B) of each step of a batch of G clients."""
    first, device = tasks[0], tasks[0].x.device
    steps = max(len(task.batches) for task in tasks)
    width = max(task.batches.indices.shape[1] for task in tasks)
    padded = [task.batches.padded(steps, width) for task in tasks]
    offsets = np.array([task.offset for task in tasks])[:, None, None]
    rows = torch.from_numpy(np.stack([indices for indices, _ in padded]) + offsets).to(device)
    masks = torch.from_numpy(np.stack([mask for _, mask in padded])).to(device)
    drawn = [task.augmentation.padded(steps, width) for task in tasks if task.augmentation is not None]
    changes = [torch.from_numpy(np.stack(each)).to(device) for each in zip(*drawn, strict=True)]
    for step_rows, mask, *change in zip(
        rows.unbind(1), masks.unbind(1), *(each.unbind(1) for each in changes), strict=True
    ):
        x = first.x[step_rows]
        if change:
            images = augmented(x.flatten(0, 1), *(each.flatten(0, 1) for each in change))
            x = images.reshape(x.shape).contiguous()  # as a model that uses ``view`` wants them
        yield x, first.y[step_rows], mask


def _gradients(
    loss_of: Callable[..., Tensor], fixed: Parameters, x: Tensor, y: Tensor, mask: Tensor, point: Stack
) -> tuple[Stack, Tensor]:
    """Return the gradients (G, ...) and losses (G,) of a batch (G, B, ...) of each client.

    The forward pass is under ``vmap``. The backward pass goes through what PyTorch has noted of it, the products of
    all clients at once, and needs none: no client's loss depends on another's parameters.
    """
    leaves = {name: value.detach().requires_grad_() for name, value in point.named.items()}
    losses: Tensor = torch.func.vmap(loss_of)(leaves, fixed, x, y, mask)
    return Stack(_by_leaves(losses.sum(), leaves)), losses.detach()
