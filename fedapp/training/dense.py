"""Local training of models made of dense layers, many clients at once: gradients written out, parameters in place.

The same local step as ``fedapp.local_training.train``, for a stack of clients: parameters have a leading axis of G
clients, and every product is a batched one. The gradient of a layer y = W x + b is δ xᵀ for the error δ at y; it is
added to W without ever being stored, which is most of what a small model's step costs otherwise. Activations are
(clients, features, examples): with few classes, products and softmax are twice as fast that way round.

A client's result doesn't depend on the others in its stack, but for the rounding of batched products.
"""

import threading
from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fedapp.training.layers import Layer, dense_layers
from fedapp.training.rule import direction
from fedapp.training.task import LocalTask
from fedapp.training.vectors import Parameters, stack_parameters


def train_dense(tasks: Sequence[LocalTask]) -> tuple[Parameters, Tensor]:
    """Train a stack of G clients of one model and rule on shared data.

    Parameters
    ----------
    tasks : sequence of LocalTask
        With the same ``model``, ``rule``, ``x`` and ``y``, a longer one never after a shorter one: at each step those
        that still train are then the first of the stack.

    Returns
    -------
    dict of str to Tensor, Tensor
        The trained parameters, each (G, ...), and the losses averaged over each client's steps, (G,).
    """
    first = tasks[0]
    x, y, rule = first.x.flatten(1), first.y, first.rule
    layers = dense_layers(first.model)
    w = stack_parameters([task.start for task in tasks])
    lr = torch.tensor([task.lr for task in tasks], device=x.device)[:, None, None]
    pulled = stack_parameters([task.start for task in tasks]) if rule.alpha else {}
    neighbours = stack_parameters([task.neighbours or {} for task in tasks]) if rule.beta != 1 else {}
    direct = not rule.clip_norm and not rule.momentum
    total = torch.zeros(len(tasks), device=x.device)
    velocity: Parameters = {}
    gather = _Gather(x)
    for active, rows, share in _steps(tasks, x.device):
        step_w = _first(w, active)
        point = step_w
        if rule.beta != 1:
            point = {
                name: rule.beta * value + (1 - rule.beta) * neighbours[name][:active]
                for name, value in step_w.items()
            }
        inputs, labels = gather(rows).mT, y[rows].unsqueeze(1)
        activations, log_p = _forward(layers, point, inputs)
        total[:active] -= (log_p.gather(1, labels) * share).sum((1, 2))
        error = log_p.exp_()
        error.scatter_add_(1, labels, error.new_full((1, 1, 1), -1.0).expand_as(labels))
        error *= -lr[:active] * share if direct else share
        if direct:  # w ← w − γ [δ xᵀ + λ w̃ + α (w − w̄)], term by term
            factors = list(_backward(layers, point, activations, error))
            if rule.l2 or rule.alpha:
                _decay(step_w, point, _first(pulled, active), lr[:active], rule.l2, rule.alpha)
            for (weight, bias), delta, below in factors:
                step_w[weight].baddbmm_(delta, below.mT)
                step_w[bias] += delta.sum(2)
        else:
            g: Parameters = {}
            for (weight, bias), delta, below in _backward(layers, point, activations, error):
                g |= {weight: delta @ below.mT, bias: delta.sum(2)}
            start = _first(pulled, active) if rule.alpha else step_w
            g = torch.func.vmap(partial(direction, rule=rule))(
                g, step_w, point, start, _first(velocity, active)
            )
            velocity = g if rule.momentum else {}
            for name, value in step_w.items():
                value -= lr[:active].view(-1, *[1] * (value.dim() - 1)) * g[name]
    counts = torch.tensor([len(task.batches) for task in tasks], device=x.device)
    return w, total / counts.clamp(min=1)


def _steps(tasks: Sequence[LocalTask], device: torch.device) -> Iterator[tuple[int, Tensor, Tensor | float]]:
    """Yield for each step: how many clients still train, their rows (A, B) of the shared data, and what each example
    weighs in its client's mean: (A, 1, B), or a number if it's the same for all.
    """
    lengths = np.array([len(task.batches) for task in tasks])
    rows = np.zeros((lengths[0], len(tasks), max(task.batches.indices.shape[1] for task in tasks)), np.int64)
    sizes = np.zeros((lengths[0], len(tasks)), np.int64)
    for k, task in enumerate(tasks):
        steps, width = task.batches.indices.shape
        rows[:steps, k, :width] = task.batches.indices + task.offset
        sizes[:steps, k] = task.batches.sizes
    for step, real in enumerate(sizes):
        active = int((lengths > step).sum())
        width = real.max()
        share: Tensor | float = 1 / float(width)
        if (real[:active] != width).any():
            weights = (np.arange(width) < real[:active, None]) / real[:active, None]
            share = torch.from_numpy(weights.astype(np.float32)).to(device)[:, None]
        yield active, torch.from_numpy(rows[step, :active, :width]).to(device), share


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
        if not torch.equal(self.gathered, rows):
            torch.index_select(self.x, 0, rows.flatten(), out=found)
            self.gathered = rows
        return found.view(*rows.shape, -1)


def _forward(layers: list[Layer], w: Parameters, x: Tensor) -> tuple[list[Tensor], Tensor]:
    """Return the input of every layer (A, in, B) and log softmax of the last one's output (A, K, B)."""
    inputs = [x]
    for weight, bias in layers[:-1]:
        inputs.append(torch.baddbmm(w[bias].unsqueeze(2), w[weight], inputs[-1]).relu_())
    weight, bias = layers[-1]
    return inputs, F.log_softmax(torch.baddbmm(w[bias].unsqueeze(2), w[weight], inputs[-1]), dim=1)


def _backward(
    layers: list[Layer], w: Parameters, inputs: list[Tensor], error: Tensor
) -> Iterator[tuple[Layer, Tensor, Tensor]]:
    """Yield each layer, from the last, with the error δ at its output and its input: its gradient is δ inputᵀ."""
    for depth in range(len(layers) - 1, -1, -1):
        yield layers[depth], error, inputs[depth]
        if depth:
            below = w[layers[depth][0]].mT @ error
            error = torch.ops.aten.threshold_backward(below, inputs[depth], 0)


def _decay(w: Parameters, point: Parameters, start: Parameters, lr: Tensor, l2: float, alpha: float) -> None:
    """w ← w − γ [λ w̃ + α (w − w̄)], in place."""
    for name, value in w.items():
        rate = lr.view(-1, *[1] * (value.dim() - 1))
        value *= 1 - rate * (alpha + l2 if point is w else alpha)
        if point is not w:
            value -= rate * l2 * point[name]
        if alpha:
            value.addcmul_(rate, start[name], value=alpha)


def _first(stack: Parameters, count: int) -> Parameters:
    return {name: value[:count] for name, value in stack.items()}
