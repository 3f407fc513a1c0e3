"""What the server does with an update: the place of η_g in θ^{n+1} = θ^n + η_g Σ d_i Δ_i.

Momentum and Adam on the update are FedAvgM and FedAdam (S. Reddi et al., "Adaptive federated optimization", ICLR
2021, algorithm 2), with that paper's constants.
"""

from typing import Protocol

import numpy as np

from strategies.arrays import Vector

OPTIMIZERS = ("sgd", "momentum", "adam")


class ServerOptimizer(Protocol):
    """Moves the global model by an update.

    Attributes
    ----------
    memory : tuple of str
        Names of the attributes that carry over from step to step.
    """

    memory: tuple[str, ...]

    def step(self, model: Vector, update: Vector) -> Vector:
        """Return the new model (D,) from the old one and Σ d_i Δ_i."""


class SGD:
    """θ + η_g Δ."""

    memory: tuple[str, ...] = ()

    def __init__(self, lr: float) -> None:
        self.lr = lr

    def step(self, model: Vector, update: Vector) -> Vector:
        """Move by the update."""
        return model + self.lr * update


class Momentum:
    """v ← β v + Δ, θ + η_g v; β = 0.9."""

    memory: tuple[str, ...] = ("velocity",)

    def __init__(self, lr: float, beta: float = 0.9) -> None:
        self.lr = lr
        self.beta = beta
        self.velocity: Vector | None = None

    def step(self, model: Vector, update: Vector) -> Vector:
        """Move by the sum of updates, the older the less."""
        self.velocity = update if self.velocity is None else self.beta * self.velocity + update
        return model + self.lr * self.velocity


class Adam:
    """m ← β₁ m + (1−β₁) Δ, v ← β₂ v + (1−β₂) Δ², θ + η_g m / (√v + τ); 0.9, 0.99, 1e-3, without bias correction."""

    memory: tuple[str, ...] = ("first", "second")

    def __init__(self, lr: float, beta_1: float = 0.9, beta_2: float = 0.99, tau: float = 1e-3) -> None:
        self.lr = lr
        self.beta_1, self.beta_2, self.tau = beta_1, beta_2, tau
        self.first: Vector | float = 0.0
        self.second: Vector | float = tau**2

    def step(self, model: Vector, update: Vector) -> Vector:
        """Move each parameter by its update, scaled by how much it usually moves."""
        self.first = self.beta_1 * self.first + (1 - self.beta_1) * update
        self.second = self.beta_2 * self.second + (1 - self.beta_2) * update**2
        return np.asarray(model + self.lr * self.first / (np.sqrt(self.second) + self.tau))


def make_optimizer(name: str, lr: float) -> ServerOptimizer:
    """Return the optimizer called ``name``, one of ``OPTIMIZERS``, with learning rate η_g."""
    kinds: dict[str, type[SGD] | type[Momentum] | type[Adam]] = {
        "sgd": SGD,
        "momentum": Momentum,
        "adam": Adam,
    }
    if name not in kinds:
        raise ValueError(f"server-optimizer = {name!r}: allowed are {', '.join(OPTIMIZERS)}")
    return kinds[name](lr)
