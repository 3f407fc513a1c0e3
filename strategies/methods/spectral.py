"""The spectral-graph perturbed method.

E. Buttaci and G. C. Calafiore, "Aiding global convergence in federated learning via local perturbation and mutual
similarity information", arXiv 2410.05545, 2024; here by Buttaci's thesis (docs/references.md), section 4.3 and
algorithm 2. Clients are nodes of a graph; the adjacency A_ij is the similarity of the data of clients i and j,
p_ij = A_ij / (1ᵀ A 1) and p_i = Σ_j p_ij:

    server, round t:         u_t^i = (1/p_i) Σ_j p_ij w_{t−1,E}^j                       eq. 4.6
    client i, from w ← w̄_t:  w̃ = β w + (1−β) u_t^i,   w ← w − γ g_i(w̃)                 E times
    server:                  w̄_{t+1} = w̄_t + Σ_i p_i (w_i − w̄_t)

The gradient is taken at w̃, the step at w. With β = 1 the method is exactly FedAvg with adjacency weights. A client
that doesn't take part in a round keeps its last local model; before its first round, that is the initial global
model.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from strategies.clients.roster import Client
from strategies.core.config import StrategyConfig, SynchronousConfig
from strategies.flower import messages
from strategies.flower.arrays import Vector
from strategies.methods.shared.neighbours import NeighbourModels, PerturbedConfig
from strategies.rounds.strategy import SynchronousStrategy


@dataclass(frozen=True)
class SpectralConfig(PerturbedConfig, SynchronousConfig):
    """Parameters of the spectral method; its weights p_i are always ``adjacency``, whose p_ij it needs."""


class Spectral(SynchronousStrategy):
    """The spectral-graph perturbed method (Buttaci 2024, algorithm 2).

    Rule: gradients are taken at β w + (1 − β) u_i, u_i the mean of the last models of clients with similar data.
    Needs: a direction of each client's data (`graph-source=data`).
    Sent: u_i.
    Kept: all clients' last models.
    Helps: where groups of clients have similar data; a small β needs small steps.
    """

    Config: ClassVar[type[StrategyConfig]] = SpectralConfig
    config: SpectralConfig
    aggregates_on_arrival: ClassVar[bool] = False
    leaks_models: ClassVar[bool] = True  # each client gets an average of its neighbours' models

    payload_off_hint: ClassVar[str] = "perturbation_beta = 1"
    _neighbours: NeighbourModels

    def resolve_config(self, config: StrategyConfig) -> StrategyConfig:
        """Return the config with adjacency weights, because the method needs the p_ij of the graph."""
        return replace(config, client_weights="adjacency")

    def local_rule(self) -> dict[str, float]:
        """Return β for the clients, or {} if β = 1, where the step is FedAvg's."""
        return self.config.local_rule

    def extra_vectors(self, clients: Sequence[Client]) -> Iterator[Mapping[str, Vector]]:
        """Yield u_t^i (D,) of each participant."""
        if self.config.local_rule and self.session.graph is not None:
            for u in self._neighbours.averages(self.session.graph, clients, self.session.model):
                yield {messages.NEIGHBOURS: u}

    def on_local_model(self, client: Client, local_model: Vector) -> None:
        """Keep the client's last local model w_{t,E}^i."""
        self._neighbours.put(client, local_model)

    def stateful_components(self) -> Sequence[Any]:
        """Return the clients' last local models."""
        self._neighbours = NeighbourModels(self.config.neighbour_memory)
        return [self._neighbours]
