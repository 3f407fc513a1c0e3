"""A small vector space: what the local step does with a model's parameters, in each representation of them.

``Tensors`` are the parameters by name, and ``Stack`` those of many clients at once; a model in its dual form is in
``fedapp.training.span``. The step (``fedapp.training.rule``) is written in sums and multiples of vectors, once for
all of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, Self

import torch
from torch import Tensor

Parameters = dict[str, Tensor]


class Vector(Protocol):
    """A model, or a difference of models. Sums and multiples are new vectors; ``descend`` alone works in place."""

    def __add__(self, other: Self, /) -> Self: ...

    def __sub__(self, other: Self, /) -> Self: ...

    def __rmul__(self, factor: float, /) -> Self: ...

    def clipped(self, norm: float) -> Self:
        """Return the vector, cut to ``norm`` if it is longer."""
        ...

    def descend(self, rate: float | Tensor, direction: Self) -> None:
        """w ← w − γ v, in place: new memory at every step costs more than the sum."""
        ...


@dataclass(frozen=True, eq=False, slots=True)
class Tensors:
    """Parameters by name, of one client (under ``torch.func.vmap``: of each)."""

    named: Parameters

    def __add__(self, other: Self) -> Self:
        return type(self)({name: value + other.named[name] for name, value in self.named.items()})

    def __sub__(self, other: Self) -> Self:
        return type(self)({name: value - other.named[name] for name, value in self.named.items()})

    def __rmul__(self, factor: float) -> Self:
        return type(self)({name: factor * value for name, value in self.named.items()})

    def clipped(self, norm: float) -> Self:
        """Return the vector, cut to ``norm`` if it is longer; its norm is that of all tensors together."""
        scale = (norm / torch.sqrt(self.square()).clamp(min=1e-12)).clamp(max=1.0)
        return type(self)({name: self.each(scale, value) * value for name, value in self.named.items()})

    def square(self) -> Tensor:
        """Return the square of the norm, of all tensors together."""
        return sum((self._total(value.square()) for value in self.named.values()), start=torch.zeros(()))

    def descend(self, rate: float | Tensor, direction: "Tensors") -> None:
        """w ← w − γ v, tensor by tensor."""
        for name, other in direction.named.items():
            value = self.named[name]
            if isinstance(rate, float):
                value.sub_(other, alpha=rate)
            else:
                value -= self.each(rate, value) * other

    def _total(self, value: Tensor) -> Tensor:
        return value.sum()

    def each(self, number: float | Tensor, value: Tensor) -> float | Tensor:
        """Shape a number of each client so that it multiplies the client's part of ``value``."""
        return number


class Stack(Tensors):
    """Parameters (G, ...) of G clients; norms and step sizes are one for each client, (G,)."""

    __slots__ = ()

    @classmethod
    def of(cls, parameters: Sequence[Parameters]) -> Self:
        """Stack the parameters of G clients."""
        first = parameters[0]
        if all(one is first for one in parameters):
            count = len(parameters)
            return cls({name: value.expand(count, *value.shape).clone() for name, value in first.items()})
        return cls({name: torch.stack([one[name] for one in parameters]) for name in parameters[0]})

    def first(self, count: int) -> Self:
        """Return a view of the first clients."""
        return type(self)({name: value[:count] for name, value in self.named.items()})

    def _total(self, value: Tensor) -> Tensor:
        return value.reshape(len(value), -1).sum(1)

    def each(self, number: float | Tensor, value: Tensor) -> float | Tensor:
        assert isinstance(number, Tensor)
        return number.view(-1, *[1] * (value.dim() - 1))
