"""CA²FL: FedBuff whose step is corrected by the last update of every client.

Y. Wang, Y. Cao, J. Wu, R. Chen and J. Chen, "Tackling the data heterogeneity in asynchronous federated learning with
cached update calibration", ICLR 2024. The server keeps each client's last update h_i, 0 at first, and
h = Σ p_i h_i (the paper's p_i are 1/C). When m contributions have arrived

    W ← W + η_g (h + (1/m) Σ_S (Δ_i − h_i)),   and then h_i ← Δ_i for i ∈ S

Once every client has an update in the cache, each has weight p_i, however fast it is. A contribution moves the model
by 1/m when it arrives, by p_i in each aggregation until the client's next contribution, and then back by 1/m: in
total by p_i P_i, the time-based d_i that the run reports. With a decreasing step size schedule, h_i has the step size
of the time when client i trained, which is larger than the current one.

Each step is as long as a synchronous round's, so that η_g is 1/Σ p_i P_i by default (``server_lr = 0``), about m/C;
the paper's is 1.

A client receives the model and sends one back; the server keeps C vectors of float32, 4 C D bytes, and h
(``bytes-kept``). Beyond 4 GiB they go to a temporary file.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from strategies.core.config import StrategyConfig
from strategies.flower.arrays import Vector
from strategies.methods.shared.arrivals import Buffered, BufferedConfig
from strategies.methods.shared.latest_updates import NAME, LatestUpdates
from strategies.updates.pipeline import Contribution


@dataclass(frozen=True)
class CA2FLConfig(BufferedConfig):
    """Parameters of CA²FL: ``buffer_size`` is m."""


class CA2FL(Buffered):
    """CA²FL (Wang et al. 2024, algorithm 2).

    Rule: W moves by h + mean(Δ_i − h_i), h_i the last update of client i, h = Σ p_i h_i.
    Kept: all h_i.
    Helps: where data are non-IID and speeds differ.
    """

    Config: ClassVar[type[StrategyConfig]] = CA2FLConfig
    config: CA2FLConfig

    @property
    def latest(self) -> LatestUpdates:
        """The last updates h_i of all clients, and their weighted sum h = Σ p_i h_i."""
        return LatestUpdates.of(self.session, NAME, self.session.client_weights())

    def default_server_lr(self) -> float:
        """Return 1/Σ p_i P_i: each step has updates of all clients, however few are at work."""
        return self.session.contribution_weights.step()

    def transform_update(self, contribution: Contribution) -> Vector:
        """Return Δ_i − h_i, (D,)."""
        return contribution.update - self.session.client_vectors(NAME).get(contribution.client.index)

    def server_update(self, total: Vector) -> Vector:
        """Return h + (1/m) Σ (Δ_i − h_i), (D,)."""
        return self.latest.mean + total

    def aggregate(
        self, model: Vector, contributions: Sequence[Contribution], weights: Sequence[float]
    ) -> Vector:
        """Return the next model, with weight 1/m for each contribution, and then set h_i ← Δ_i."""
        number = len(contributions)
        updated_model = super().aggregate(model, contributions, [1 / number] * number)
        self.latest.take(contributions)
        return updated_model
