"""Training of dense networks with the first layer in dual form: many passes over few examples of many features.

All gradients of a dense first layer are combinations of the client's rows, so that after any number of local steps ::

    W = a W̄ + b V + c U + e H + A X    the bias counts as the weights of a feature that is always 1

with the layer that it starts from W̄, another one V that it is pulled to, the neighbour average U, the constant H,
the client's rows X (n, d) and dual coefficients A (K, n) for K outputs: a ``Span``. Steps on a, b, c, e and A need
the rows' products with each other only, the Gram matrix X Xᵀ, and that stays the same from round to round: a pass
over the data costs n² K instead of 2 n d K, and X itself is read twice in a task instead of twice in a pass. The
layers above, if there are any, are trained as they are.
"""

import weakref
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from fedapp.training.layers import backward, dense_layers, forward
from fedapp.training.losses import columns
from fedapp.training.optimizer import SGD
from fedapp.training.rule import Anchors, Parameters, Tensors, step
from fedapp.training.span import Basis, Columns, Network, Span
from fedapp.training.task import LocalTask


def has_dual(task: LocalTask) -> bool:
    """Say whether a task has a dual form: a network of dense layers, and plain steps."""
    return bool(dense_layers(task.model)) and task.optimizer == SGD and task.loss.errors is not None


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
    pulls_elsewhere = task.anchor if task.rule.alpha else None
    given = (pulls_elsewhere, task.neighbours if task.rule.beta != 1 else None, task.constant)
    known = [task.start, *(one for one in given if one is not None)]
    client = _Client(task, known)
    start, *others = client.known_models()
    models = iter(others)
    pulled_to, *rest = (None if one is None else next(models) for one in given)
    anchors = Anchors(start if pulled_to is None else pulled_to, *rest)
    w = client.sent()
    velocity: Network | None = None
    total = client.x.new_zeros(())
    for gradient in client.gradients():
        velocity, loss = step(task.rule, w, anchors, gradient, task.lr, velocity)
        total += loss
    return client.worked_out(w), total / max(len(task.batches), 1)


class _Client:
    """A client's rows, and their products with each other and with the known models' first layers."""

    def __init__(self, task: LocalTask, known: list[Parameters]) -> None:
        self.layers, self.known, self.batches = dense_layers(task.model), known, task.batches
        assert task.loss.errors is not None
        self.errors = task.loss.errors
        self.x, self.y = task.x[task.rows].flatten(1), task.y[task.rows]
        self.gram = _grams.of(task.x, task.rows)
        weight, bias = self.layers[0]
        # Outputs come first: with few classes products are several times as fast that way round.
        self.outputs = [torch.addmm(one[bias].unsqueeze(1), one[weight], self.x.mT) for one in known]
        first = (
            [torch.cat([one[weight], one[bias].unsqueeze(1)], 1) for one in known]
            if task.rule.clip_norm
            else []
        )
        self.basis = Basis(first, self.outputs, self.gram)
        self.memory = self.gram.new_empty(task.batches.indices.shape[1], len(self.gram))

    def known_models(self) -> list[Network]:
        """Return the known models."""
        units = [tuple(float(i == j) for j in range(len(self.known))) for i in range(len(self.known))]
        return [
            Network(Span(unit, {}, self.basis), Tensors(self._above(one)))
            for unit, one in zip(units, self.known, strict=True)
        ]

    def sent(self) -> Network:
        """Return the model that was sent, to be moved."""
        model = self.known_models()[0]
        model.first.rows = {torch.zeros_like(self.outputs[0]): 1.0}
        return Network(
            model.first, Tensors({name: value.clone() for name, value in model.above.named.items()})
        )

    def _above(self, model: Parameters) -> Parameters:
        """Return the parameters above the first layer, with an axis of one client."""
        return {name: model[name].unsqueeze(0) for layer in self.layers[1:] for name in layer}

    def gradients(self) -> Iterator[Callable[[Network], tuple[Network, Tensor]]]:
        """Yield the gradient and loss of each step, as functions of the model."""
        indices = torch.from_numpy(self.batches.indices.copy())
        for rows, size in zip(indices, self.batches.sizes.tolist(), strict=True):
            yield partial(self._gradient, rows[:size].to(self.x.device))

    def _gradient(self, batch: Tensor, point: Network) -> tuple[Network, Tensor]:
        w = point.above.named
        activations, outputs = forward(self.layers, w, self._first_outputs(batch, point.first).unsqueeze(0))
        losses, error = self.errors(outputs, columns(self.y[batch]).unsqueeze(0))
        share, above = 1 / len(batch), {}
        for depth, delta in backward(self.layers, w, activations, error):
            if depth:
                weight, bias = self.layers[depth]
                above[weight] = share * (delta @ activations[depth - 1].mT)
                above[bias] = share * delta.sum(2)
        first = Span((0.0,) * len(self.known), {Columns(batch, delta[0]): share}, self.basis)
        return Network(first, Tensors({name: above[name] for name in w})), losses.mean()

    def _first_outputs(self, batch: Tensor, point: Span) -> Tensor:
        """Return what the first layer makes of some rows, (K, B)."""
        products = self.gram
        if not self.batches.whole:
            products = torch.index_select(products, 0, batch, out=self.memory[: len(batch)])
        ((dual, factor),) = point.rows.items()
        assert isinstance(dual, Tensor)
        first, *others = (outputs.index_select(1, batch) for outputs in self.outputs)
        outputs = torch.addmm(first, dual, products.mT, beta=point.known[0], alpha=factor)
        for other, multiple in zip(others, point.known[1:], strict=True):
            outputs.add_(other, alpha=multiple)
        return outputs

    def worked_out(self, model: Network) -> Parameters:
        """Return the parameters by their names, with W itself."""
        weight, bias = self.layers[0]
        w = model.first
        result = {name: w.known[0] * self.known[0][name] for name in (weight, bias)}
        for multiple, other in zip(w.known[1:], self.known[1:], strict=True):
            for name, value in result.items():
                value.add_(other[name], alpha=multiple)
        ((dual, _),) = w.rows.items()
        assert isinstance(dual, Tensor)
        result[weight].addmm_(dual, self.x)
        result[bias] += dual.sum(1)
        return result | {name: value.squeeze(0) for name, value in model.above.named.items()}


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
