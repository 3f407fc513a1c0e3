"""Models in dual form, as vectors: the first layer in the span of a client's rows, what is above it as it is.

``Span`` is the first layer, ``Network`` the whole model. The step (``fedapp.training.rule``) takes them as it takes
``fedapp.training.rule.Tensors``.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import torch
from torch import Tensor

from fedapp.training.rule import Tensors


@dataclass(frozen=True, eq=False, slots=True)
class Columns:
    """A matrix (K, n) that is zero outside some columns: ``values`` (K, B) at the places ``index`` (B,)."""

    index: Tensor
    values: Tensor


class Basis:
    """What a ``Span`` is a combination of, as far as sums and norms need it: products, not the vectors themselves.

    Parameters
    ----------
    known : sequence of Tensor
        The known layers W_j, biases in their last column, (K, d + 1).
    outputs : sequence of Tensor
        W_j X^T, (K, n) each: the products of the known layers with the rows.
    gram : Tensor
        X X^T, (n, n), where each row has a last feature that is 1.
    """

    def __init__(self, known: Sequence[Tensor], outputs: Sequence[Tensor], gram: Tensor) -> None:
        self.known, self.outputs, self.gram = known, outputs, gram

    @cached_property
    def products(self) -> list[list[Tensor]]:
        """Products of the known layers with each other, J by J."""
        return [[(one * other).sum() for other in self.known] for one in self.known]

    def square(self, known: Sequence[float], rows: "dict[Tensor | Columns, float]") -> Tensor:
        """Return ‖Σ k_j W_j + A X‖² = kᵀ⟨W,W⟩k + 2 Σ k_j ⟨A, W_j Xᵀ⟩ + ⟨A X Xᵀ, A⟩, A the sum of ``rows``."""
        if not any(known) and len(rows) == 1 and isinstance(only := next(iter(rows)), Columns):
            among = self.gram.index_select(0, only.index).index_select(1, only.index)
            own = rows[only] ** 2 * ((only.values @ among) * only.values).sum()
            return own.clamp_(min=0)
        dual = worked_out(rows, self.outputs[0])
        total = ((dual @ self.gram) * dual).sum()
        counting = [j for j, factor in enumerate(known) if factor]  # the others don't change a bit
        for j in counting:
            total += 2 * known[j] * (dual * self.outputs[j]).sum()
            for i in counting:
                total += known[i] * known[j] * self.products[i][j]
        return total.clamp_(min=0)


class Span:
    """A layer in the span of a few known ones W_j and the client's rows X (n, d): Σ k_j W_j + A X.

    Parameters
    ----------
    known : tuple of float
        k_j, one for each known layer.
    rows : dict of (Tensor or Columns) to float
        A (K, n) as a sum of matrices by their factors, worked out only when a model descends along the vector:
        each matrix is then read once, however many terms of the step it comes from.
    basis : Basis
        What it is a combination of.
    """

    __slots__ = ("basis", "known", "rows")

    def __init__(self, known: tuple[float, ...], rows: dict[Tensor | Columns, float], basis: Basis) -> None:
        self.known, self.rows, self.basis = known, rows, basis

    def __add__(self, other: Self) -> Self:
        rows = dict(self.rows)
        for matrix, factor in other.rows.items():
            rows[matrix] = rows.get(matrix, 0.0) + factor
        known = tuple([a + b for a, b in zip(self.known, other.known, strict=True)])
        return type(self)(known, rows, self.basis)

    def __sub__(self, other: Self) -> Self:
        return self + (-1.0) * other

    def __rmul__(self, factor: float) -> Self:
        rows = {matrix: factor * own for matrix, own in self.rows.items()}
        return type(self)(tuple([factor * k for k in self.known]), rows, self.basis)

    def square(self) -> Tensor:
        """Return the square of the norm of weights and biases."""
        return self.basis.square(self.known, self.rows)

    def descend(self, rate: float | Tensor, step_direction: Self) -> None:
        """w ← w − γ v; from then on the A of v is one matrix."""
        assert isinstance(rate, float)
        (own,) = self.rows
        assert isinstance(own, Tensor)
        step = worked_out(step_direction.rows, own)
        own.sub_(step, alpha=rate)
        self.known = tuple([a - rate * b for a, b in zip(self.known, step_direction.known, strict=True)])
        step_direction.rows = {step: 1.0}


def worked_out(rows: dict[Tensor | Columns, float], like: Tensor) -> Tensor:
    """Return the sum of matrices by their factors, (K, n), as a new matrix."""
    total: Tensor | None = None
    for matrix, factor in rows.items():
        if isinstance(matrix, Tensor):
            total = factor * matrix if total is None else total.add_(matrix, alpha=factor)
    total = torch.zeros_like(like) if total is None else total
    for matrix, factor in rows.items():
        if isinstance(matrix, Columns):
            total.index_add_(1, matrix.index, matrix.values, alpha=factor)
    return total


@dataclass(frozen=True, eq=False, slots=True)
class Network:
    """A dense network: its first layer in dual form, and the parameters of the layers above it."""

    first: Span
    above: Tensors

    def __add__(self, other: Self) -> Self:
        return type(self)(self.first + other.first, self.above + other.above)

    def __sub__(self, other: Self) -> Self:
        return type(self)(self.first - other.first, self.above - other.above)

    def __rmul__(self, factor: float) -> Self:
        return type(self)(factor * self.first, factor * self.above)

    def clipped(self, norm: float) -> Self:
        """Return the vector, cut to ``norm`` if it is longer; its norm is that of all layers together."""
        length = float(torch.sqrt(self.first.square() + self.above.square()))
        return self if length <= norm else (norm / length) * self

    def descend(self, rate: float | Tensor, step_direction: Self) -> None:
        """w ← w − γ v, layer by layer."""
        self.first.descend(rate, step_direction.first)
        self.above.descend(rate, step_direction.above)
