"""Gradients of large dense layers as the products that they are, never worked out.

A layer y = W x + b has the gradient δᵀ x for the errors δ (B, out) at its outputs and its inputs x (B, in). With a
small batch, most of what a large W costs in a step is memory that is written and read: the gradient, its multiple, W.
Where a step needs no gradient as a whole, W is moved by the product itself, and the gradient never stored.

``Factors`` collects δ and x of a model's layers while one gradient is taken; at all other times, and for gradients
that a model takes within its own forward pass, its layers are PyTorch's.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedapp.training.vectors import Factored, Parameters, Product, Products

# Weights of a layer that is worth it: a smaller one stays in a processor's cache.
LARGE = 1 << 16


class Factors:
    """The products that the large dense layers of a module (one of a thread's own) are to be moved by.

    Parameters
    ----------
    module : nn.Module
        Its layers take part from now on.
    """

    def __init__(self, module: nn.Module) -> None:
        self.offered = self.taking = False
        self._found: dict[int, Products] = {}
        for layer in module.modules():
            if type(layer) is nn.Linear and layer.weight.numel() >= LARGE and "forward" not in vars(layer):
                # The instance's own: hooks, names and tied weights stay as they are.
                layer.forward = partial(_forward, layer, self)  # type: ignore[method-assign]

    def add(self, key: int, product: Product) -> None:
        """Note a product, of the parameter whose ``id`` is ``key``."""
        self._found.setdefault(key, []).append(product)

    def gradient(self, loss: Callable[[], Tensor], leaves: Parameters) -> tuple[Factored, Tensor]:
        """Return the gradient of a loss by its leaves, and its value."""
        self.offered = True
        try:
            value = loss()
            self.taking = True
            taken = torch.autograd.grad(value, list(leaves.values()), allow_unused=True)
        finally:
            self.offered = self.taking = False
            found, self._found = self._found, {}
        dense = {name: g for name, g in zip(leaves, taken, strict=True) if g is not None}
        products = {name: found[id(leaf)] for name, leaf in leaves.items() if id(leaf) in found}
        for name in leaves.keys() - dense.keys() - products.keys():  # the loss doesn't depend on it
            dense[name] = torch.zeros_like(leaves[name])
        return Factored(dense, products), value.detach()


def _forward(layer: nn.Linear, factors: Factors, x: Tensor) -> Tensor:
    # A weight that follows from others (weight_norm) needs its gradient as a whole.
    taken = layer.weight.requires_grad and layer.weight.is_leaf
    if factors.offered and taken and torch.is_grad_enabled():
        outputs: Tensor = _Linear.apply(x, layer.weight, layer.bias, factors, id(layer.weight))
        return outputs
    return F.linear(x, layer.weight, layer.bias)


class _Linear(torch.autograd.Function):
    """``F.linear``, whose weights' gradient goes to ``Factors`` while those are ``taking``."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, factors: Factors, key: int
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.factors, ctx.key = factors, key
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, error: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        rows, below = error.reshape(-1, error.shape[-1]), x.reshape(-1, x.shape[-1])
        of_x = error @ weight if ctx.needs_input_grad[0] else None
        of_bias = rows.sum(0) if ctx.needs_input_grad[2] else None
        if ctx.factors.taking and not torch.is_grad_enabled():
            ctx.factors.add(ctx.key, (1.0, rows, below.detach()))
            return of_x, None, of_bias, None, None
        return of_x, rows.mT @ below, of_bias, None, None
