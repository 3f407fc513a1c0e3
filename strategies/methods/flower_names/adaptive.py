"""FedAdam, FedAdagrad and FedYogi under Flower's names, with Flower's keywords and steps.

S. Reddi et al., "Adaptive federated optimization", ICLR 2021, algorithm 2, as Flower has it: Δ is the mean of the
updates, and m₀ = v₀ = 0, where ``server_optimizer`` begins with v₀ = τ².

    m ← β₁ m + (1−β₁) Δ,   v as in the paper,   W ← W + η m / (√v + τ)

FedAdagrad has β₁ = 0. Only FedAdam corrects the bias of m and v: in round t its η is η √(1−β₂^(t+1)) / (1−β₁^(t+1)).
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from strategies.core.config import StrategyConfig, SynchronousConfig
from strategies.core.flower_attributes import FlowerAttribute
from strategies.core.parameters import parameter
from strategies.flower.arrays import Vector
from strategies.methods.flower_names.own_optimizer import OwnOptimizer
from strategies.updates.server_optimizer import Adagrad, Adam, ServerOptimizer, Yogi


class CorrectedAdam(Adam):
    """Adam's step with the bias of both moments corrected, by the number of the round (``number``)."""

    def step(self, model: Vector, update: Vector) -> Vector:
        """Return θ + η_t m / (√v + τ)."""
        given, t = self.lr, self.number + 1.0
        self.lr = given * np.sqrt(1 - self.beta_2**t) / (1 - self.beta_1**t)
        moved = super().step(model, update)
        self.lr = given
        return moved


@dataclass(frozen=True)
class FedAdagradConfig(SynchronousConfig):
    """Parameters of FedAdagrad; as in Flower all arguments are keywords.

    Parameters
    ----------
    eta : float
        η, the server's learning rate
    eta_l : float
        the clients' learning rate, which is only kept, as in Flower: no message has it
    tau : float
        τ, the lower bound of √v
    """

    positional: ClassVar[tuple[str, ...]] = ()

    eta: float = parameter(0.1, gt=0)
    eta_l: float = parameter(0.1, gt=0)
    tau: float = parameter(1e-3, gt=0)

    def new_optimizer(self) -> ServerOptimizer:
        """Return Adagrad with v₀ = 0 and without momentum."""
        return Adagrad(self.eta, 0.0, 0.0, self.tau, initial=0.0, usual_lr=0.0)


@dataclass(frozen=True)
class FedAdamConfig(FedAdagradConfig):
    """Parameters of FedAdam.

    Parameters
    ----------
    beta_1, beta_2 : float
        β₁ and β₂, the decay of m and v
    """

    beta_1: float = parameter(0.9, ge=0, lt=1)
    beta_2: float = parameter(0.99, ge=0, lt=1)

    def new_optimizer(self) -> ServerOptimizer:
        """Return Adam with v₀ = 0 and corrected bias."""
        return CorrectedAdam(self.eta, self.beta_1, self.beta_2, self.tau, initial=0.0, usual_lr=0.0)


@dataclass(frozen=True)
class FedYogiConfig(FedAdamConfig):
    """Parameters of FedYogi."""

    eta: float = parameter(0.01, gt=0)
    eta_l: float = parameter(0.0316, gt=0)

    def new_optimizer(self) -> ServerOptimizer:
        """Return Yogi with v₀ = 0."""
        return Yogi(self.eta, self.beta_1, self.beta_2, self.tau, initial=0.0, usual_lr=0.0)


class FedAdagrad(OwnOptimizer):
    """FedAdagrad (Reddi et al. 2021, algorithm 2), as Flower has it."""

    Config: ClassVar[type[StrategyConfig]] = FedAdagradConfig
    config: FedAdagradConfig
    lr_keyword = "eta"

    eta = FlowerAttribute()
    eta_l = FlowerAttribute()
    tau = FlowerAttribute()


class FedAdam(FedAdagrad):
    """FedAdam (Reddi et al. 2021, algorithm 2), as Flower has it: with the bias of the moments corrected."""

    Config: ClassVar[type[StrategyConfig]] = FedAdamConfig
    config: FedAdamConfig

    beta_1 = FlowerAttribute()
    beta_2 = FlowerAttribute()


class FedYogi(FedAdagrad):
    """FedYogi (Reddi et al. 2021, algorithm 2), as Flower has it."""

    Config: ClassVar[type[StrategyConfig]] = FedYogiConfig
    config: FedYogiConfig

    beta_1 = FlowerAttribute()
    beta_2 = FlowerAttribute()
