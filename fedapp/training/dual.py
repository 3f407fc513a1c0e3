"""Training of a linear model in its dual form: for few examples of many features, and many passes over them.

All gradients of a linear model are combinations of the client's rows, so that after any number of local steps ::

    W = a W̄ + b V + c U + e H + A X    the bias counts as the weights of a feature that is always 1

with the model that it starts from W̄, another one V that it is pulled to, the neighbour average U, the constant H,
the client's rows X (n, d) and dual coefficients A (K, n): a ``Span``. Steps on a, b, c, e and A need the rows'
products with each other only, the Gram matrix X Xᵀ, and that stays the same from round to round: a pass over the data
costs n² K instead of 2 n d K, and X itself is read twice in a task instead of twice in a pass.
"""

import weakref
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from fedapp.training.layers import Layer, dense_layers
from fedapp.training.losses import columns
from fedapp.training.optimizer import SGD
from fedapp.training.rule import Anchors, step
from fedapp.training.task import LocalTask
from fedapp.training.vectors import Columns, Parameters, Span

# What training costs, in nanoseconds of a core: for each feature of an example in a step on W; and for each example
# in a step on A, each feature of an example once in a task, and each step. They are rough, but constants: a task must
# be trained in the same way in every process and every run.
PRIMAL = 1.6
DUAL, ONCE, STEP = 1.0, 1.5, 50_000.0

# How many times as fast the dual form must be, for the Gram matrix to be worth its making.
WORTH = 2


def has_dual(task: LocalTask) -> bool:
    """Say whether a task has a dual form: a linear model, and no norm taken of its gradient."""
    plain = not task.rule.clip_norm and task.optimizer == SGD and task.loss.errors is not None
    return len(dense_layers(task.model)) == 1 and plain


def is_dual_faster(task: LocalTask) -> bool:
    """Say whether a CPU trains a task faster in its dual form; with n ≤ d, XXᵀ takes no more memory than X."""
    n, d = task.batches.num_examples, task.x.shape[1:].numel()
    seen = int(task.batches.sizes.sum())
    dual = DUAL * seen * n + ONCE * n * d + STEP * len(task.batches)
    return n <= d and WORTH * dual < PRIMAL * seen * d


def train_dual(task: LocalTask) -> tuple[Parameters, Tensor]:
    """Train one client.

    Parameters
    ----------
    task : LocalTask
        One that ``has_dual``.

    Returns
    -------
    dict of str to Tensor, Tensor
        The trained parameters, and the loss averaged over the steps.
    """
    (layer,) = dense_layers(task.model)
    other = task.anchor if task.rule.alpha else None
    given = (other, task.neighbours if task.rule.beta != 1 else None, task.constant)
    known = [task.start, *(one for one in given if one is not None)]
    client = _Client(task, layer, known)
    start, *units = _units(len(known))
    rest = iter(units)
    sent, *others = (None if one is None else Span(next(rest), {}) for one in given)
    anchors = Anchors(sent or Span(start, {}), *others)
    w = Span(start, {torch.zeros_like(client.logits[0]): 1.0})
    velocity: Span | None = None
    total = client.x.new_zeros(())
    for gradient in client.gradients():
        velocity, loss = step(task.rule, w, anchors, gradient, task.lr, velocity)
        total += loss
    return client.worked_out(w), total / max(len(task.batches), 1)


def _units(count: int) -> list[tuple[float, ...]]:
    return [tuple(float(i == j) for j in range(count)) for i in range(count)]


class _Client:
    """A client's rows, and their products with each other and with the known models."""

    def __init__(self, task: LocalTask, layer: Layer, known: list[Parameters]) -> None:
        self.layer, self.known, self.batches = layer, known, task.batches
        assert task.loss.errors is not None
        self.errors = task.loss.errors
        self.x, self.y = task.x[task.rows].flatten(1), task.y[task.rows]
        self.gram = _grams.of(task.x, task.rows)
        weight, bias = layer
        # Classes come first: with few of them products are several times as fast that way round.
        self.logits = [torch.addmm(one[bias].unsqueeze(1), one[weight], self.x.mT) for one in known]
        self.memory = self.gram.new_empty(task.batches.indices.shape[1], len(self.gram))

    def gradients(self) -> Iterator[Callable[[Span], tuple[Span, Tensor]]]:
        """Yield the gradient and loss of each step, as functions of the model."""
        indices = torch.from_numpy(self.batches.indices.copy())
        for rows, size in zip(indices, self.batches.sizes.tolist(), strict=True):
            yield partial(self._gradient, rows[:size].to(self.x.device))

    def _gradient(self, batch: Tensor, point: Span) -> tuple[Span, Tensor]:
        products = self.gram
        if not self.batches.whole:
            products = torch.index_select(products, 0, batch, out=self.memory[: len(batch)])
        ((dual, factor),) = point.rows.items()
        assert isinstance(dual, Tensor)
        first, *others = (logits.index_select(1, batch) for logits in self.logits)
        logits = torch.addmm(first, dual, products.mT, beta=point.known[0], alpha=factor)
        for other, multiple in zip(others, point.known[1:], strict=True):
            logits.add_(other, alpha=multiple)
        losses, error = self.errors(logits, columns(self.y[batch]))
        return Span((0.0,) * len(self.known), {Columns(batch, error): 1 / len(batch)}), losses.mean()

    def worked_out(self, w: Span) -> Parameters:
        """Return W itself, by the names of its weights and bias."""
        weight, bias = self.layer
        result = {name: w.known[0] * self.known[0][name] for name in (weight, bias)}
        for multiple, other in zip(w.known[1:], self.known[1:], strict=True):
            for name, value in result.items():
                value.add_(other[name], alpha=multiple)
        ((dual, _),) = w.rows.items()
        assert isinstance(dual, Tensor)
        result[weight].addmm_(dual, self.x)
        result[bias] += dual.sum(1)
        return result


class _Grams:
    """Gram matrices of clients' rows, kept for as long as the tensor that the rows are in."""

    def __init__(self) -> None:
        self._kept: dict[int, dict[tuple[int, int], Tensor]] = {}

    def of(self, x: Tensor, rows: slice) -> Tensor:
        """Return 1 + X Xᵀ, (n, n), of some rows of x: the 1 is the product of the feature that is always 1."""
        if id(x) not in self._kept:
            # Two threads may come here at once: the second finalizer finds it gone.
            weakref.finalize(x, self._kept.pop, id(x), None)
        kept = self._kept.setdefault(id(x), {})
        key = (rows.start, rows.stop)
        if key not in kept:
            own = x[rows].flatten(1)
            kept[key] = (own @ own.mT).add_(1.0)
        return kept[key]


_grams = _Grams()
