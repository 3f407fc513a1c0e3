"""Published methods, written on the public hooks of the library: what a method of one's own looks like.

None needs a member that begins with an underscore, and none says more than its algorithm does. FedNova and
SCAFFOLD are in the library, too, where clients tell how far their steps went; here they are an outsider's, and short.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from strategies import (
    AsynchronousConfig,
    AsynchronousStrategy,
    Client,
    Contribution,
    FedAvg,
    SynchronousConfig,
    Vector,
    messages,
)


class FedNova(FedAvg):
    """FedNova: w + τ Σ p_i Δ_i / τ_i with τ = Σ p_i τ_i, for clients of τ_i steps (J. Wang et al. 2020, eq. 9)."""

    def aggregate(
        self, model: Vector, contributions: Sequence[Contribution], weights: Sequence[float]
    ) -> Vector:
        steps = np.array([c.metrics["num-steps"] for c in contributions])
        updates = np.array([c.update for c in contributions])
        return np.asarray(model + (weights @ steps) * ((weights / steps) @ updates))


@dataclass(frozen=True)
class ScaffoldConfig(SynchronousConfig):
    """γ and K of the clients."""

    lr: float = 0.1
    local_steps: int = 1


class Scaffold(FedAvg):
    """SCAFFOLD, option II (S. Karimireddy et al. 2020, algorithm 1); the server holds every c_i, clients nothing."""

    Config = ScaffoldConfig
    config: ScaffoldConfig
    aggregates_on_arrival = False  # a round that is cut off leaves no trace in the variates

    def extra_vectors(self, clients: Sequence[Client]) -> Iterator[Mapping[str, Vector]]:
        variates = self.session.client_vectors("variates")
        self.common = variates.weighted_sum(self.session.client_weights())
        for client in clients:
            yield {messages.CONSTANT: self.common - variates.get(client.index)}

    def transform_update(self, contribution: Contribution) -> Vector:
        variates, i = self.session.client_vectors("variates"), contribution.client.index
        speed = self.config.lr * self.config.local_steps
        variates.put(i, variates.get(i) - self.common - contribution.update / speed)
        return contribution.update


@dataclass(frozen=True)
class PowerOfChoiceConfig(SynchronousConfig):
    """d candidates, of whom the m with the largest losses take part."""

    candidates: int = 10
    chosen: int = 3


class PowerOfChoice(FedAvg):
    """Power-of-choice selection (Y. Cho et al. 2022, algorithm 1), by the last training losses, 1/m each."""

    Config = PowerOfChoiceConfig
    config: PowerOfChoiceConfig
    aggregates_on_arrival = False

    def select(self, clients: Sequence[Client], rng: np.random.Generator) -> tuple[list[Client], list[float]]:
        losses, client_weights = self.session.memory.setdefault("losses", {}), self.session.client_weights()
        p = np.array([client_weights[client.index] for client in clients])  # of all others, some aren't there
        number = min(self.config.candidates, len(clients))
        drawn = [clients[i] for i in rng.choice(len(clients), number, replace=False, p=p / p.sum())]
        drawn.sort(key=lambda client: (-losses.get(str(client.index), np.inf), client.index))
        chosen = sorted(drawn[: self.config.chosen], key=lambda client: client.index)
        return chosen, [1 / len(chosen)] * len(chosen)

    def transform_update(self, contribution: Contribution) -> Vector:
        self.session.memory["losses"][str(contribution.client.index)] = contribution.metrics["train-loss"]
        return contribution.update


@dataclass(frozen=True)
class FedAsyncConfig(AsynchronousConfig):
    """α and a: a contribution that is δ aggregations old counts α (δ + 1)^−a."""

    mixing_alpha: float = 0.6
    mixing_power: float = 0.5


class FedAsync(AsynchronousStrategy):
    """FedAsync: W ← (1 − α_δ) W + α_δ w_i, of whole models w_i (C. Xie et al. 2019, algorithm 1)."""

    Config = FedAsyncConfig
    config: FedAsyncConfig

    def ready(self, arrived: int) -> bool:
        return True

    def weigh(self, contributions: Sequence[Contribution]) -> list[float]:
        alpha, power = self.config.mixing_alpha, self.config.mixing_power
        return [alpha * (c.staleness + 1) ** -power for c in contributions]

    def transform_update(self, contribution: Contribution) -> Vector:
        return contribution.model - self.session.model


@dataclass(frozen=True)
class RingmasterConfig(AsynchronousConfig):
    """R: work that is R aggregations old or older is thrown away."""

    delay_threshold: int = 10


class Ringmaster(AsynchronousStrategy):
    """Ringmaster ASGD: every arrival is a step, unless it is too old (A. Maranjyan et al. 2025, algorithm 4)."""

    Config = RingmasterConfig
    config: RingmasterConfig

    def ready(self, arrived: int) -> bool:
        return True

    def is_fresh_enough(self, staleness: int) -> bool:
        return staleness < self.config.delay_threshold

    def weigh(self, contributions: Sequence[Contribution]) -> list[float]:
        return [1.0] * len(contributions)
