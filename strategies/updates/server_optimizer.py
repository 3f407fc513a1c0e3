"""Server optimizers: how an aggregated update Δ = Σ d_i Δ_i moves the global model θ, with learning rate η_g.

S. Reddi et al., "Adaptive federated optimization", ICLR 2021, algorithm 2, with that paper's constants; on FedAvg,
momentum, Adagrad, Adam and Yogi are its FedAvgM, FedAdagrad, FedAdam and FedYogi. Powers, roots and quotients of
vectors are elementwise. The classes Nesterov and FedExP cite their own papers.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from strategies.flower.arrays import Vector, chunks

BETA_1, BETA_2 = 0.9, 0.99
TAU = 1e-3  # τ: lower bound of √v, also for a parameter that never moved
EPSILON = 1e-3  # ε of FedExP, the smallest value in the paper's experiments


class ServerOptimizer(ABC):
    """Moves the global model by an update.

    Parameters
    ----------
    lr : float
        η_g, the server's learning rate.
    """

    #: Names of the attributes that the optimizer keeps from step to step.
    memory: ClassVar[tuple[str, ...]] = ()
    #: Whether a step uses ``squares``, Σ d_i ‖Δ_i‖² of the updates in Δ.
    reads_squares: ClassVar[bool] = False
    #: Whether the result of a run is an average of models instead of the last model.
    averages: ClassVar[bool] = False
    #: Default η_g of the optimizer; 0: the method's default.
    usual_lr: float = 0.0
    #: Σ d_i ‖Δ_i‖² and the number of the aggregation in this ``start``, from 1, which the loop sets before a step.
    squares: float = 0.0
    number: int = 1

    def __init__(self, lr: float) -> None:
        self.lr = lr

    @property
    def gain(self) -> float:
        """How far an update moves the model in the end, over η_g times its length."""
        return 1.0

    @abstractmethod
    def step(self, model: Vector, update: Vector) -> Vector:
        """Return the new model (D,) from the old one and Δ (D,), which are not changed."""

    def step_in_place(self, model: Vector, update: Vector) -> Vector:
        """Return what ``step`` does, maybe in the memory of Δ (D,)."""
        return self.step(model, update)

    def outcome(self, model: Vector) -> Vector:
        """Return the result (D,) of a run, given the model (D,) after the last step."""
        return model

    def state(self) -> dict[str, Any]:
        """Return a copy of the optimizer's memory by name: arrays (D,), or a number before the first step."""
        kept = {name: getattr(self, name) for name in self.memory}
        return {name: each.copy() if isinstance(each, np.ndarray) else each for name, each in kept.items()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the optimizer's memory from what ``state`` returned."""
        for name in self.memory:
            kept = state[name]
            setattr(self, name, np.array(kept) if isinstance(kept, np.ndarray) else kept)


class SGD(ServerOptimizer):
    """Gradient descent: θ ← θ + η_g Δ."""

    def step(self, model: Vector, update: Vector) -> Vector:
        """Return θ + η_g Δ."""
        updated_model = self.lr * update
        updated_model += model
        return updated_model

    def step_in_place(self, model: Vector, update: Vector) -> Vector:
        """Return θ + η_g Δ in the memory of Δ."""
        if self.lr != 1:
            update *= self.lr
        update += model
        return update


class Elementwise(ServerOptimizer):
    """An optimizer whose step for a parameter follows from that parameter's values alone.

    It works on a chunk of the vectors at a time, which a core's cache holds, and keeps its memory (D,) in place.
    """

    @abstractmethod
    def moved(self, model: Vector, update: Vector, *memory: Any) -> tuple[Vector, ...]:
        """Return the new values of some parameters and of their ``memory``, in its order, from the old ones and Δ."""

    def step(self, model: Vector, update: Vector) -> Vector:
        """Return the new model (D,)."""
        return self._step(model, update, np.empty(len(update)))

    def step_in_place(self, model: Vector, update: Vector) -> Vector:
        """Return the new model in the memory of Δ (D,)."""
        return self._step(model, update, update)

    def _step(self, model: Vector, update: Vector, out: Vector) -> Vector:
        for name in self.memory:
            if not isinstance(kept := getattr(self, name), np.ndarray):
                setattr(self, name, np.full(len(update), float(kept)))
        memory = [getattr(self, name) for name in self.memory]
        for place in chunks(len(update)):
            out[place], *values = self.moved(model[place], update[place], *(kept[place] for kept in memory))
            for kept, new in zip(memory, values, strict=True):
                kept[place] = new
        return out


class Momentum(Elementwise):
    """Heavy-ball momentum: v ← β v + Δ, θ ← θ + η_g v, with β = 0.9 unless another one is given."""

    memory = ("velocity",)

    def __init__(self, lr: float, beta: float = BETA_1) -> None:
        super().__init__(lr)
        self.beta = beta
        self.velocity: Vector | float = 0.0

    @property
    def gain(self) -> float:
        """1/(1 − β): an update moves the model again in each later step, by β times as much."""
        return 1 / (1 - self.beta)

    def moved(self, model: Vector, update: Vector, *memory: Any) -> tuple[Vector, ...]:
        """Return θ + η_g v, with v the exponentially weighted sum of updates."""
        velocity = self.beta * memory[0] + update
        return model + self.lr * velocity, velocity


class Nesterov(Momentum):
    """Nesterov's momentum: v ← β v + Δ, θ ← θ + η_g (Δ + β v), the outer step of DiLoCo.

    A. Douillard et al., "DiLoCo: distributed low-communication training of language models", 2023, algorithm 1, with
    β = 0.9 (and there η_g = 0.7).
    """

    def moved(self, model: Vector, update: Vector, *memory: Any) -> tuple[Vector, ...]:
        """Return θ + η_g (Δ + β v), with v the exponentially weighted sum of updates, Δ among them."""
        velocity = self.beta * memory[0] + update
        return model + self.lr * (update + self.beta * velocity), velocity


class Adaptive(Elementwise):
    """m ← β₁ m + (1−β₁) Δ, θ ← θ + η_g m / (√v + τ), without bias correction; subclasses define v.

    Parameters
    ----------
    lr : float
        η_g.
    beta_1, beta_2 : float
        β₁ and β₂, the decay of m and v.
    tau : float
        τ.
    initial : float
        v₀, by default τ².
    usual_lr : float
        η_g where the config has none; 0: the method's. A step moves every parameter by about η_g, whatever the norm
        of the update: η_g = 1 would be far too large.
    """

    memory: ClassVar[tuple[str, ...]] = ("first", "second")

    def __init__(
        self,
        lr: float,
        beta_1: float = BETA_1,
        beta_2: float = BETA_2,
        tau: float = TAU,
        initial: float | None = None,
        usual_lr: float = 0.01,
    ) -> None:
        super().__init__(lr)
        self.usual_lr = usual_lr
        self.beta_1, self.beta_2, self.tau = beta_1, beta_2, tau
        self.first: Vector | float = 0.0
        self.second: Vector | float = tau**2 if initial is None else initial

    @property
    def rate(self) -> float:
        """The factor of m / (√v + τ) in this step: η_g."""
        return self.lr

    def moved(self, model: Vector, update: Vector, *memory: Any) -> tuple[Vector, ...]:
        """Return θ + η_g m / (√v + τ)."""
        first = self.beta_1 * memory[0] + (1 - self.beta_1) * update
        second = self.second_moment(memory[1], update**2)
        return model + self.rate * first / (np.sqrt(second) + self.tau), first, second

    @abstractmethod
    def second_moment(self, v: Vector, square: Vector) -> Vector:
        """Return the next v from the last one and Δ²."""


class Adagrad(Adaptive):
    """Adaptive step with v ← v + Δ²."""

    def second_moment(self, v: Vector, square: Vector) -> Vector:
        """Return v + Δ²."""
        return v + square


class Adam(Adaptive):
    """Adaptive step with v ← β₂ v + (1−β₂) Δ²."""

    def second_moment(self, v: Vector, square: Vector) -> Vector:
        """Return β₂ v + (1−β₂) Δ²."""
        return self.beta_2 * v + (1 - self.beta_2) * square


class AMSGrad(Adam):
    """Adam with the largest v so far in the step: v̂ ← max(v̂, v) (FADAS, Wang et al. 2024, algorithm 1)."""

    memory = ("first", "second", "largest")

    def __init__(self, lr: float) -> None:
        super().__init__(lr)
        self.largest: Vector | float = TAU**2

    def moved(self, model: Vector, update: Vector, *memory: Any) -> tuple[Vector, ...]:
        """Return θ + η_g m / (√v̂ + τ)."""
        first = self.beta_1 * memory[0] + (1 - self.beta_1) * update
        second = self.second_moment(memory[1], update**2)
        largest = np.maximum(memory[2], second)
        return model + self.lr * first / (np.sqrt(largest) + self.tau), first, second, largest


class Yogi(Adaptive):
    """Adaptive step with v ← v − (1−β₂) Δ² sign(v − Δ²)."""

    def second_moment(self, v: Vector, square: Vector) -> Vector:
        """Return v − (1−β₂) Δ² sign(v − Δ²)."""
        return np.asarray(v - (1 - self.beta_2) * square * np.sign(v - square))


class FedExP(ServerOptimizer):
    """θ ← θ + lr η_g Δ, η_g = max(1, Σ d_i ‖Δ_i‖² / (2 (‖Δ‖² + ε))); the result is the mean of the last two models.

    D. Jhunjhunwala, S. Wang & G. Joshi, "FedExP: Speeding up federated averaging via extrapolation", ICLR 2023,
    algorithm 1: the less the updates agree, the larger η_g. The factor ``lr`` is our addition; it is 1 in the paper.
    """

    memory = ("before",)
    reads_squares = True
    averages = True

    def __init__(self, lr: float) -> None:
        super().__init__(lr)
        self.before: Vector | float = 0.0  # no model yet

    def step(self, model: Vector, update: Vector) -> Vector:
        """Return θ + lr η_g Δ, and keep θ for ``outcome``."""
        square = float(np.einsum("i,i->", update, update))
        self.before = model.copy()
        return model + self.lr * max(1.0, self.squares / (2 * (square + EPSILON))) * update

    def outcome(self, model: Vector) -> Vector:
        """Return the mean of the last two models."""
        return 0.5 * (self.before + model) if isinstance(self.before, np.ndarray) else model


FEDEXP = "fedexp"

# Name in the run config → class.
OPTIMIZERS: dict[str, type[ServerOptimizer]] = {
    "sgd": SGD,
    "momentum": Momentum,
    "nesterov": Nesterov,
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
        If no optimizer has this name, or the learning rate isn't a positive number.
    """
    if name not in OPTIMIZERS:
        raise ValueError(f"server_optimizer = {name!r}: allowed are {', '.join(OPTIMIZERS)}")
    if not 0 < lr < float("inf"):
        raise ValueError(f"server_lr = {lr}: must be a number > 0")
    return OPTIMIZERS[name](lr)
