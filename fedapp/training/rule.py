"""The local step of every method, written once for every representation of a model.

Every method's local rule fits one form, so a client needs no branch per method::

    w̃ = at(w, u)          = β w + (1−β) u        β = 1: w itself
    g = ∇f_i(w̃) + λ w̃                            clipped to norm G, if asked
    v ← ρ v + g + pull(w, w̄) + h,  pull = α (w − w̄)
    w ← w − γ v                                   or what an optimizer makes of v

α: FedProx (Li et al. 2020, eq. 2); from a model v of the client's own, with w̄ as it was sent, Ditto (Li et al. 2021,
algorithm 1). β and u: the spectral-graph method (Buttaci 2024, algorithm 2). h: the difference c − c_i of control
variates in SCAFFOLD (Karimireddy et al. 2020, algorithm 1); beside α, the linear term of FedDyn's objective (Acar et
al. 2021, algorithm 1).

The step is written in sums and multiples of vectors. ``Tensors`` are a model's parameters by name, ``Stack`` those of
many clients at once; a model in its dual form is in ``fedapp.training.span``.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, Self, TypeVar

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

    def descend(self, rate: float | Tensor, step_direction: Self) -> None:
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

    def descend(self, rate: float | Tensor, step_direction: "Tensors") -> None:
        """w ← w − γ v, tensor by tensor."""
        for name, other in step_direction.named.items():
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


V = TypeVar("V", bound=Vector)


@dataclass(frozen=True)
class LocalRule:
    """The symbols of the local step.

    Parameters
    ----------
    alpha : float
        α ≥ 0, the pull towards the model that was sent, w̄, wherever training starts; 0: none.
    beta : float
        β in [0, 1]: the gradient is taken at β w + (1−β) u; 1: at w.
    momentum : float
        Heavy-ball momentum on the whole step, in [0, 1).
    l2 : float
        λ of ½ λ ‖w‖², all parameters; its gradient is taken at w̃ too.
    clip_norm : float
        G: the gradient's norm is cut to G; 0: not.
    """

    alpha: float = 0.0
    beta: float = 1.0
    momentum: float = 0.0
    l2: float = 0.0
    clip_norm: float = 0.0

    def check(self, neighbours: object | None) -> None:
        """Raise ValueError if the rule needs a neighbour average u, and there is none."""
        if self.beta != 1 and neighbours is None:
            raise ValueError(f"beta = {self.beta}: needs the neighbour average u")


@dataclass(frozen=True, eq=False)
class Anchors(Generic[V]):
    """The vectors that a task holds fixed; those that its rule doesn't read may be left out.

    Attributes
    ----------
    sent : Vector, optional
        w̄, what α pulls towards.
    neighbours : Vector, optional
        u, the neighbour average.
    constant : Vector, optional
        h, added to every gradient.
    """

    sent: V | None = None
    neighbours: V | None = None
    constant: V | None = None

    def each(self, change: Callable[[V], V]) -> "Anchors[V]":
        """Return all of them, changed alike."""
        vectors = (self.sent, self.neighbours, self.constant)
        return Anchors(*(None if vector is None else change(vector) for vector in vectors))


def path(rule: LocalRule, rate: float, steps: int) -> float:
    """Return how far local steps of SGD go along a gradient that stays 1: γ ‖a‖₁ (Wang et al. 2020, section 3).

    γ K for plain SGD; with momentum ρ and pull α as far as ``step`` would go.
    """
    gone = velocity = 0.0
    for _ in range(steps):
        velocity = rule.momentum * velocity + 1.0 - rule.alpha * gone
        gone += rate * velocity
    return gone


def at(rule: LocalRule, w: V, anchors: Anchors[V]) -> V:
    """Return w̃ = β w + (1−β) u, where the gradient is taken: w itself if β = 1."""
    if rule.beta == 1:
        return w
    rule.check(anchors.neighbours)
    assert anchors.neighbours is not None
    return rule.beta * w + (1 - rule.beta) * anchors.neighbours


def step(
    rule: LocalRule,
    w: V,
    anchors: Anchors[V],
    gradient: Callable[[V], tuple[V, Tensor]],
    rate: float | Tensor,
    velocity: V | None = None,
    move: Callable[[V, V, float | Tensor], None] | None = None,
) -> tuple[V | None, Tensor]:
    """Take a local step: ``w`` moves, in place.

    Parameters
    ----------
    rule : LocalRule
        The symbols.
    w : Vector
        The model.
    anchors : Anchors
        w̄ and u, where the rule reads them, and h if there is one.
    gradient : callable
        Returns ∇f_i at a point, and the loss there, for the examples of this step.
    rate : float or Tensor
        γ.
    velocity : Vector, optional
        What the step before returned.
    move : callable, optional
        Moves w along v by an optimizer (``fedapp.training.optimizer``) in place of w ← w − γ v.

    Returns
    -------
    Vector or None, Tensor
        The direction of this step, v, if there is momentum, and the loss at w̃ (without the terms of λ, α and h).

    Raises
    ------
    ValueError
        If β < 1 and there is no u.
    """
    point = at(rule, w, anchors)
    g, loss = gradient(point)
    if rule.l2:
        g = g + rule.l2 * point
    if rule.clip_norm:
        g = g.clipped(rule.clip_norm)
    if rule.alpha:
        assert anchors.sent is not None
        g = g + rule.alpha * (w - anchors.sent)
    if anchors.constant is not None:
        g = g + anchors.constant
    if velocity is not None:
        g = rule.momentum * velocity + g
    if move is None:
        w.descend(rate, g)
    else:
        move(w, g, rate)
    return g if rule.momentum else None, loss
