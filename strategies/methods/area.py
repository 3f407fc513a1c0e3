"""AREA: the server's model is the mean of the last local models of all clients, however often each takes part.

C. Iakovidou & K. Kim, "Asynchronous federated stochastic optimization for heterogeneous objectives under arbitrary
delays", arXiv 2405.10123, 2024. y_i is the last local model of client i, W_0 at first. When m contributions have
arrived (``buffer_size``), with w_i the local model of client i,

    y_i ← w_i for i ∈ S,   and then   W ← W + η_g (Σ p_i y_i − W)   over all clients

In the paper the p_i are 1/C, each client keeps its y_i and sends the residual w_i − y_i, and the server adds the
residuals: W ← W + Σ_S p_i (w_i − y_i). Residuals telescope, so that W = Σ p_i y_i after every aggregation, which is
the rule above with η_g = 1, the default. With residuals, a step η_g ≠ 1 would keep W near W_0 for ever: then
W − W_0 = η_g (Σ p_i y_i − W_0). Here clients send their models and the server keeps the y_i: the models are the same,
and a client that restarts has lost nothing.

Every client has weight p_i, however fast it is: a contribution counts p_i in each aggregation until the client's next
one replaces it, p_i P_i in total, the time-based d_i that the run reports. One contribution of every client together
moves the model as a round of FedAvg does; with m = C and equal speeds AREA is FedAvg, up to rounding.

When the set of clients that count changes, so does Σ p_i y_i, and the next aggregation moves the model accordingly. A
client that joins has the model of that time as its y_i until its first contribution, so that with η_g = 1 its joining
moves nothing.

A client receives the model and sends one back; the server keeps C vectors of float32, 4 C D bytes, and their mean
(``bytes-kept``). Beyond 4 GiB the vectors go to a temporary file.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from strategies.core.config import StrategyConfig
from strategies.flower.arrays import Vector
from strategies.methods.shared.arrivals import Buffered, BufferedConfig
from strategies.methods.shared.latest_updates import LatestUpdates
from strategies.updates.pipeline import Contribution

MODELS = "models"  # the vectors y_i


@dataclass(frozen=True)
class AREAConfig(BufferedConfig):
    """Parameters of AREA: ``buffer_size`` is m; 1, or 0: a new model at every arrival, as in the paper."""


class AREA(Buffered):
    """AREA (Iakovidou and Kim 2024, algorithm 1).

    Rule: W is Σ p_i y_i, y_i the last local model of client i.
    Kept: all y_i.
    Helps: where data are non-IID and speeds differ.
    """

    Config: ClassVar[type[StrategyConfig]] = AREAConfig
    config: AREAConfig

    def own_buffer_size(self, num_clients: int) -> int:
        """Return m = 1."""
        return 1

    def default_server_lr(self) -> float:
        """Return η_g = 1: a contribution moves the model by p_i of the way, one of every client by a round's."""
        return 1.0

    def aggregate(
        self, model: Vector, contributions: Sequence[Contribution], weights: Sequence[float]
    ) -> Vector:
        """Set y_i ← w_i, and return step(W, Σ p_i y_i − W), (D,)."""
        models, p = self.session.client_vectors(MODELS, model), self.session.client_weights()
        for newcomer in sorted(p.keys() - set(models.clients)):
            models.put(newcomer, model)
        latest = LatestUpdates(self.session.memory, models, p)
        for contribution in contributions:
            self.session.server_step.note_nonzero(contribution.update)
            latest.put(contribution.client.index, contribution.base + contribution.update)
        return self.session.server_step.apply(model, latest.mean - model)
