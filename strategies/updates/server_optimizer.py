"""What the server does with an update Δ = Σ d_i Δ_i, the place of η_g in θ^{n+1} = θ^n + η_g Δ.

S. Reddi et al., "Adaptive federated optimization", ICLR 2021, algorithm 2, with that paper's constants; on FedAvg,
momentum, Adagrad, Adam and Yogi are its FedAvgM, FedAdagrad, FedAdam and FedYogi. Powers, roots and quotients of
vectors are those of their entries. FedExP is another paper's, named there.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from strategies.flower.arrays import Vector

BETA_1, BETA_2 = 0.9, 0.99
TAU = 1e-3  # τ: how much a parameter that never moved counts as moving
EPSILON = 1e-3  # ε of FedExP, the smallest that its authors try


class ServerOptimizer(ABC):
    """Moves the global model by an update.

    Parameters
    ----------
    lr : float
        η_g.
    """

    #: Names of the attributes that carry over from step to step.
    memory: ClassVar[tuple[str, ...]] = ()
    #: Whether a step rests on ``squares``, Σ d_i ‖Δ_i‖² of the updates in Δ.
    reads_squares: ClassVar[bool] = False
    #: Whether what a run comes to is another model than the one that is moved on.
    averages: ClassVar[bool] = False
    #: η_g where the config leaves it open; 0: the method says.
    usual_lr: ClassVar[float] = 0.0
    squares: float = 0.0

    def __init__(self, lr: float) -> None:
        self.lr = lr

    @abstractmethod
    def step(self, model: Vector, update: Vector) -> Vector:
        """Return the new model (D,) from the old one and Δ (D,); neither is written to."""

    def outcome(self, model: Vector) -> Vector:
        """Return what a run has come to (D,), from the model (D,) that the last step made."""
        return model

    def state(self) -> dict[str, Any]:
        """Return what the next step rests on: arrays (D,), or 0.0 before the first step."""
        return {name: getattr(self, name) for name in self.memory}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take up what ``state`` returned."""
        for name in self.memory:
            kept = state[name]
            setattr(self, name, np.array(kept) if isinstance(kept, np.ndarray) else kept)


class SGD(ServerOptimizer):
    """θ + η_g Δ."""

    def step(self, model: Vector, update: Vector) -> Vector:
        """Move by the update."""
        return model + self.lr * update


class Momentum(ServerOptimizer):
    """v ← 0.9 v + Δ, θ + η_g v."""

    memory = ("velocity",)

    def __init__(self, lr: float) -> None:
        super().__init__(lr)
        self.velocity: Vector | float = 0.0

    def step(self, model: Vector, update: Vector) -> Vector:
        """Move by the sum of updates, the older the less."""
        self.velocity = BETA_1 * self.velocity + update
        return model + self.lr * self.velocity


class Adaptive(ServerOptimizer):
    """m ← β₁ m + (1−β₁) Δ, θ + η_g m / (√v + τ) without bias correction; v₀ = τ², and each method has its own v."""

    memory: ClassVar[tuple[str, ...]] = ("first", "second")
    # A step moves every parameter by about η_g, whatever the lengths of updates: with 1 the first three by 2 or so.
    usual_lr = 0.01

    def __init__(self, lr: float) -> None:
        super().__init__(lr)
        self.first: Vector | float = 0.0
        self.second: Vector | float = TAU**2

    def step(self, model: Vector, update: Vector) -> Vector:
        """Move each parameter by its update, scaled by how much it usually moves."""
        self.first = BETA_1 * self.first + (1 - BETA_1) * update
        self.second = self.second_moment(self.second, update**2)
        return np.asarray(model + self.lr * self.first / (np.sqrt(self.second) + TAU))

    @staticmethod
    @abstractmethod
    def second_moment(v: Vector | float, square: Vector) -> Vector:
        """Return the next v (D,) from the last one and Δ² (D,)."""


class Adagrad(Adaptive):
    """v ← v + Δ²."""

    @staticmethod
    def second_moment(v: Vector | float, square: Vector) -> Vector:
        """Never shrinks."""
        return v + square


class Adam(Adaptive):
    """v ← β₂ v + (1−β₂) Δ²."""

    @staticmethod
    def second_moment(v: Vector | float, square: Vector) -> Vector:
        """Forgets exponentially."""
        return BETA_2 * v + (1 - BETA_2) * square


class AMSGrad(Adam):
    """Adam's v, of which the largest so far counts: v̂ ← max(v̂, v) (FADAS, Wang et al. 2024, algorithm 1)."""

    memory = ("first", "second", "largest")

    def __init__(self, lr: float) -> None:
        super().__init__(lr)
        self.largest: Vector | float = TAU**2

    def step(self, model: Vector, update: Vector) -> Vector:
        """Move each parameter by its update, scaled by how much it has moved at most."""
        self.first = BETA_1 * self.first + (1 - BETA_1) * update
        self.second = self.second_moment(self.second, update**2)
        self.largest = np.maximum(self.largest, self.second)
        return np.asarray(model + self.lr * self.first / (np.sqrt(self.largest) + TAU))


class Yogi(Adaptive):
    """v ← v − (1−β₂) Δ² sign(v − Δ²)."""

    @staticmethod
    def second_moment(v: Vector | float, square: Vector) -> Vector:
        """Moves towards Δ² by a share of Δ², however large v is."""
        return np.asarray(v - (1 - BETA_2) * square * np.sign(v - square))


class FedExP(ServerOptimizer):
    """η_g = max(1, Σ d_i ‖Δ_i‖² / (2 (‖Δ‖² + ε))), θ + lr η_g Δ; the result is the mean of the last two models.

    D. Jhunjhunwala, S. Wang & G. Joshi, "FedExP: Speeding up federated averaging via extrapolation", ICLR 2023,
    algorithm 1: the less the updates agree, the further their mean goes. ``lr`` is ours, 1 in the paper.
    """

    memory = ("before",)
    reads_squares = True
    averages = True

    def __init__(self, lr: float) -> None:
        super().__init__(lr)
        self.before: Vector | float = 0.0  # no model yet

    def step(self, model: Vector, update: Vector) -> Vector:
        """Move by the update, extrapolated."""
        square = float(np.einsum("i,i->", update, update))
        self.before = model.copy()
        return model + self.lr * max(1.0, self.squares / (2 * (square + EPSILON))) * update

    def outcome(self, model: Vector) -> Vector:
        """Return the mean of this model and the one before."""
        return 0.5 * (self.before + model) if isinstance(self.before, np.ndarray) else model


FEDEXP = "fedexp"

# Name in the run config → class.
OPTIMIZERS: dict[str, type[ServerOptimizer]] = {
    "sgd": SGD,
    "momentum": Momentum,
    "adagrad": Adagrad,
    "adam": Adam,
    "amsgrad": AMSGrad,
    "yogi": Yogi,
    FEDEXP: FedExP,
}


def make_optimizer(name: str, lr: float) -> ServerOptimizer:
    """Return a new optimizer.

    Parameters
    ----------
    name : str
        One of ``OPTIMIZERS``.
    lr : float
        η_g > 0.

    Raises
    ------
    ValueError
        If there is none of that name, or the rate isn't a positive number.
    """
    if name not in OPTIMIZERS:
        raise ValueError(f"server_optimizer = {name!r}: allowed are {', '.join(OPTIMIZERS)}")
    if not 0 < lr < float("inf"):
        raise ValueError(f"server_lr = {lr}: must be a number > 0")
    return OPTIMIZERS[name](lr)
