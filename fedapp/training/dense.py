"""Training of models made of dense layers, many clients at once: gradients written out, parameters in place.

Parameters have a leading axis of G clients, and every product is a batched one.

Most rules have steps of their own here, ``FusedSteps``. The gradient of a layer y = W x + b is δ xᵀ for the error δ
at y; it is added to W without ever being stored, which is most of what a small model's step costs otherwise.

A client's result doesn't depend on the others in its stack, but for the rounding of batched products.
"""

import threading
from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass
from operator import methodcaller
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedapp.training.layers import Layer, backward, dense_layers, forward
from fedapp.training.losses import ErrorsAt, columns
from fedapp.training.rule import Anchors, LocalRule, Parameters, Stack, step
from fedapp.training.task import TaskStack


def train_dense(stack: TaskStack) -> tuple[Parameters, Tensor]:
    """Train a stack of G clients in place; at each step the clients that still train are the first of the stack.

    Returns
    -------
    dict of str to Tensor, Tensor
        The trained parameters, each (G, ...), and the losses averaged over each client's steps, (G,).
    """
    like, w, anchors, lr = stack.like, stack.start, stack.anchors, stack.lr
    x, rule, layers = like.x.flatten(1), like.rule, dense_layers(like.model)
    move = like.optimizer.begin()
    assert like.loss.errors is not None
    total = torch.zeros(len(stack), device=x.device)
    fused = FusedSteps(rule, w, anchors, lr) if move is None and has_fused(rule) else None
    velocity: Stack | None = None
    gather = _Gather(x)
    for batch in _steps(stack):
        count = len(batch.rows)
        gradient = _Gradient(layers, gather(batch.rows).mT, batch.targets, batch.share, like.loss.errors)
        if fused is not None:
            loss = fused.first(count).step(gradient)
        else:
            own, around = w, anchors
            if count < len(stack):
                own, around = w.first(count), anchors.each(methodcaller("first", count))
                velocity = None if velocity is None else velocity.first(count)
            velocity, loss = step(rule, own, around, gradient, lr[:count], velocity, move)
        total[:count].add_(loss)
    counts = torch.from_numpy(stack.steps).to(x.device)
    return w.named, total / counts.clamp(min=1)


@dataclass(frozen=True, eq=False)
class _Gradient:
    """The gradient of a step's examples: inputs (A, d, B), and targets (A, 1 or M, B).

    ``share`` is each example's weight in its client's mean, (A, 1, B), or a number if all weigh the same.
    """

    layers: list[Layer]
    inputs: Tensor
    targets: Tensor
    share: Tensor | float
    errors: ErrorsAt

    def __call__(self, point: Stack) -> tuple[Stack, Tensor]:
        """Return the gradient at a point, and the losses there, (A,)."""
        loss, activations, error = self.forward(point.named)
        error *= self.share
        g: Parameters = {}
        for (weight, bias), delta, below in self.backward(point.named, activations, error):
            g |= {weight: delta @ below.mT, bias: delta.sum(2)}
        return Stack(g), loss

    def forward(self, w: Parameters) -> tuple[Tensor, list[Tensor], Tensor]:
        """Return the losses (A,), the layers' inputs (A, in, B), and the unweighted output errors (A, K, B)."""
        weight, bias = self.layers[0]
        outputs = torch.baddbmm(w[bias].unsqueeze(2), w[weight], self.inputs)
        activations, outputs = forward(self.layers, w, outputs)
        losses, error = self.errors(outputs, self.targets)
        return (losses * self.share).sum((1, 2)), [self.inputs, *activations], error

    def backward(
        self, w: Parameters, activations: list[Tensor], error: Tensor
    ) -> Iterator[tuple[Layer, Tensor, Tensor]]:
        """Yield each layer, from the last, with the error δ at its output and its input: its gradient is δ inputᵀ."""
        for depth, delta in backward(self.layers, w, activations[1:], error):
            yield self.layers[depth], delta, activations[depth]


def has_fused(rule: LocalRule) -> bool:
    """Say whether ``FusedSteps`` may stand in for the rule's ``step``: no gradient is needed as a whole."""
    return not rule.clip_norm and not rule.momentum


class FusedSteps:
    """Steps w ← w − γ [δ xᵀ + λ w̃ + α (w − w̄) + h], term by term: ``fedapp.training.rule.step``'s, to rounding.

    What no step changes is computed once, (1−β) u and γ h, and takes the place of the anchors u and h.

    Parameters
    ----------
    rule : LocalRule
        For which ``has_fused`` is true.
    w : Stack
        The models (G, ...), which move.
    anchors : Anchors
        w̄, u and h; u and h are overwritten.
    rate : Tensor
        γ of each client, (G,).
    """

    def __init__(self, rule: LocalRule, w: Stack, anchors: Anchors[Stack], rate: Tensor) -> None:
        self.rule, self.w, self.anchors, self.rate = rule, w, anchors, rate
        self.point = w
        if rule.beta != 1:
            rule.check(anchors.neighbours)
            assert anchors.neighbours is not None
            for value in anchors.neighbours.named.values():
                value *= 1 - rule.beta
            self.point = Stack({name: torch.empty_like(value) for name, value in w.named.items()})
        if anchors.constant is not None:
            for value in anchors.constant.named.values():
                value *= w.each(rate, value)

    def first(self, count: int) -> "FusedSteps":
        """Return the steps of the first clients."""
        if count == len(self.rate):  # views cost as much as a small product
            return self
        steps = copy(self)
        steps.w, steps.point, steps.rate = self.w.first(count), self.point.first(count), self.rate[:count]
        steps.anchors = self.anchors.each(methodcaller("first", count))
        return steps

    def step(self, gradient: _Gradient) -> Tensor:
        """Take a step by a gradient; return the losses at w̃ = β w + (1−β) u, (A,)."""
        rule, w, rate, anchors = self.rule, self.w, self.rate, self.anchors
        point = self._point()
        loss, activations, error = gradient.forward(point)
        error *= -rate.view(-1, 1, 1) * gradient.share
        factors = list(gradient.backward(point, activations, error))
        if rule.l2 or rule.alpha:
            self._decay(point)
        if anchors.constant is not None:
            for name, value in anchors.constant.named.items():
                w.named[name] -= value
        for (weight, bias), delta, below in factors:
            w.named[weight].baddbmm_(delta, below.mT)
            w.named[bias] += delta.sum(2)
        return loss

    def _point(self) -> Parameters:
        """Return w̃, where the gradient is taken."""
        if self.rule.beta != 1:
            assert self.anchors.neighbours is not None
            for name, value in self.point.named.items():
                torch.mul(self.w.named[name], self.rule.beta, out=value)
                value += self.anchors.neighbours.named[name]
        return self.point.named

    def _decay(self, point: Parameters) -> None:
        """w ← w − γ [λ w̃ + α (w − w̄)], in place."""
        rule, rate, anchors = self.rule, self.rate, self.anchors
        for name, value in self.w.named.items():
            each = rate.view(-1, *[1] * (value.dim() - 1))
            value *= 1 - each * (rule.alpha + rule.l2 if rule.beta == 1 else rule.alpha)
            if rule.beta != 1:
                value -= each * rule.l2 * point[name]
            if anchors.sent is not None:
                value.addcmul_(each, anchors.sent.named[name], value=rule.alpha)


class _StackedBatch(NamedTuple):
    """The batch of the A clients that still train in a step: rows (A, B) of the shared data, targets (A, 1 or M, B).

    ``share`` is each example's weight in its client's mean, (A, 1, B), or a number if all weigh the same.
    """

    rows: Tensor
    targets: Tensor
    share: Tensor | float


def _steps(stack: TaskStack) -> Iterator[_StackedBatch]:
    """Yield the batch of each step; what all steps need is looked up once."""
    y, sizes = stack.like.y, stack.sizes
    widths = sizes.max(1)
    active = (sizes > 0).sum(1)
    even = ((sizes == widths[:, None]) | (sizes == 0)).all(1)
    rows = torch.from_numpy(stack.rows).to(y.device)
    targets = columns(y[rows])
    for number, (count, width) in enumerate(zip(active.tolist(), widths.tolist(), strict=True)):
        share: Tensor | float = 1 / float(width)
        if not even[number]:
            real = sizes[number, :count, None]
            weights = ((np.arange(width) < real) / real).astype(np.float32)
            share = torch.from_numpy(weights).to(y.device)[:, None]
        yield _StackedBatch(rows[number, :count, :width], targets[number, :count, :, :width], share)


_memory = threading.local()


class _Gather:
    """Gathers rows of x into memory that this thread keeps: new memory costs as much as the products do."""

    def __init__(self, x: Tensor) -> None:
        self.x = x
        self.gathered = torch.empty(0)

    def __call__(self, rows: Tensor) -> Tensor:
        """Return x[rows], (A, B, d), until the next call; rows that are there already stay (full batches)."""
        needed = rows.numel() * self.x.shape[1]
        kept: Tensor | None = getattr(_memory, "inputs", None)
        if (
            kept is None
            or kept.numel() < needed
            or kept.device != self.x.device
            or kept.dtype != self.x.dtype
        ):
            kept = _memory.inputs = self.x.new_empty(needed)
        found = kept[:needed].view(rows.numel(), -1)
        # On a GPU the comparison would wait for all steps before.
        if self.x.device.type != "cpu" or not torch.equal(self.gathered, rows):
            torch.index_select(self.x, 0, rows.reshape(-1), out=found)
            self.gathered = rows
        return found.view(*rows.shape, -1)
