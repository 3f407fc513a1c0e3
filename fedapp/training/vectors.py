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
        if isinstance(direction, Factored):
            direction.multiplied_into(self.named, -float(rate))

    def _total(self, value: Tensor) -> Tensor:
        return value.sum()

    def each(self, number: float | Tensor, value: Tensor) -> float | Tensor:
        """Shape a number of each client so that it multiplies the client's part of ``value``."""
        return number


# A factor, δ (B, out) and x (B, in): the matrix factor · δᵀ x.
Product = tuple[float, Tensor, Tensor]
Products = list[Product]


@dataclass(frozen=True, eq=False, slots=True)
class Factored(Tensors):
    """A vector some of whose matrices are sums of products δᵀ x, worked out only if they must be.

    Attributes
    ----------
    named : dict of str to Tensor
        The others, and what is to be added to the products; a name may be here, there or in both.
    products : dict of str to list of Product
    """

    products: dict[str, Products]

    def __add__(self, other: Tensors) -> "Factored":
        named = {**self.named, **other.named}
        named |= {name: self.named[name] + other.named[name] for name in self.named.keys() & other.named}
        products = {name: list(own) for name, own in self.products.items()}
        for name, more in other.products.items() if isinstance(other, Factored) else ():
            products.setdefault(name, []).extend(more)
        return Factored(named, products)

    __radd__ = __add__

    def __sub__(self, other: Tensors) -> "Factored":
        return self + (-1.0) * other

    def __rsub__(self, other: Tensors) -> "Factored":
        return (-1.0) * self + other

    def __rmul__(self, factor: float) -> "Factored":
        products = {
            name: [(factor * own, delta, x) for own, delta, x in each] for name, each in self.products.items()
        }
        return Factored({name: factor * value for name, value in self.named.items()}, products)

    def clipped(self, norm: float) -> Tensors:  # type: ignore[override]
        return self.worked_out().clipped(norm)

    def square(self) -> Tensor:
        return self.worked_out().square()

    def worked_out(self) -> Tensors:
        """Return the vector with every matrix as a tensor."""
        named = dict(self.named)
        for name, ((factor, delta, x), *more) in self.products.items():
            first = (factor * delta).mT @ x
            named[name] = named[name] + first if name in named else first
            Factored({}, {name: more}).multiplied_into(named, 1.0)
        return Tensors(named)

    def multiplied_into(self, named: Parameters, factor: float) -> None:
        """Add a multiple of the products to some tensors, in place."""
        for name, products in self.products.items():
            for own, delta, x in products:
                named[name].addmm_(delta.mT, x, alpha=factor * own)


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
