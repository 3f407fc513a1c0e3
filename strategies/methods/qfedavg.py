"""QFedAvg under Flower's name: clients with a larger loss count more.

T. Li, M. Sanjabi, A. Beirami and V. Smith, "Fair resource allocation in federated learning", ICLR 2020, algorithm 2.
With F_i the loss that client i reports, γ the clients' learning rate and L = 1/γ:

    h_i = q F_i^(q−1) ‖L Δ_i‖² + L F_i^q,   W ← W + Σ_i F_i^q L Δ_i / Σ_i h_i

F_i is the loss plus 1e-10, as in Flower. In the paper it is the loss of the global model W on the client's data; here
it is what the client reports under ``train_loss_key``. With q = 0 the model moves by the plain mean of the updates.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from strategies.core.config import FLOWERS_ORDER, StrategyConfig, SynchronousConfig
from strategies.core.flower_attributes import FlowerAttribute
from strategies.core.parameters import parameter
from strategies.flower.arrays import Vector
from strategies.flower.errors import RunError
from strategies.rounds.strategy import SynchronousStrategy
from strategies.updates.pipeline import Contribution


@dataclass(frozen=True)
class QFedAvgConfig(SynchronousConfig):
    """Parameters of QFedAvg."""

    positional: ClassVar[tuple[str, ...]] = ("client_learning_rate", "q", "train_loss_key", *FLOWERS_ORDER)

    client_learning_rate: float = parameter(0.0, "γ, the clients' learning rate, which has to be given", ge=0)
    q: float = parameter(0.1, "how much more a client with a larger loss counts; 0: all count alike", ge=0)
    train_loss_key: str = parameter("train_loss", "the metric of replies to training that holds the loss F_i")


class QFedAvg(SynchronousStrategy):
    """QFedAvg (Li et al. 2020, algorithm 2), as Flower has it."""

    Config: ClassVar[type[StrategyConfig]] = QFedAvgConfig
    config: QFedAvgConfig

    client_learning_rate, q, train_loss_key = FlowerAttribute(), FlowerAttribute(), FlowerAttribute()

    def resolve_config(self, config: StrategyConfig) -> StrategyConfig:
        """Return the config; refuse one without the clients' learning rate."""
        assert isinstance(config, QFedAvgConfig)
        if not config.client_learning_rate:
            raise TypeError("QFedAvg() needs client_learning_rate, a number above 0")
        return config

    def aggregate(
        self, model: Vector, contributions: Sequence[Contribution], weights: Sequence[float]
    ) -> Vector:
        """Return the next model; raise RunError if a client reports no loss, or one below 0."""
        q, lipschitz = self.config.q, 1.0 / self.config.client_learning_rate
        total, h = np.zeros(len(model)), 0.0
        for contribution in contributions:
            loss = self._loss(contribution)
            update = self.session.server_step.note_nonzero(contribution.update)
            powered = loss**q
            total += powered * lipschitz * update
            square = lipschitz**2 * float(np.einsum("i,i->", update, update))
            h += q * loss ** (q - 1) * square + lipschitz * powered
        return self.session.server_step.apply(model, total / h)

    def _loss(self, contribution: Contribution) -> float:
        """Return F_i of a client's reply."""
        key = self.config.train_loss_key
        loss, reply = contribution.metrics.get(key), f"the reply of client {contribution.client.display_name}"
        if not isinstance(loss, int | float):
            raise RunError(f"train_loss_key = {key!r}: {reply} has no such number among its metrics")
        if not loss >= 0:  # also NaN
            raise RunError(
                f"train_loss_key = {key!r}: {reply} has {loss:g}; QFedAvg takes losses to the power q, so that they "
                "must be >= 0"
            )
        return loss + 1e-10
