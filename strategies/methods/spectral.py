"""The spectral-graph perturbed method.

Buttaci 2024, section 4.3 and algorithm 2. Clients are nodes of a graph; the adjacency A_ij is
the similarity of the data of clients i and j, p_ij = A_ij / (1ᵀ A 1) and p_i = Σ_j p_ij:

    server, round t:         u_t^i = (1/p_i) Σ_j p_ij w_{t−1,E}^j                       eq. 4.6
    client i, from w ← w̄_t:  w̃ = β w + (1−β) u_t^i,   w ← w − γ g_i(w̃)                 E times
    server:                  w̄_{t+1} = w̄_t + Σ_i p_i (w_i − w̄_t)

The gradient is taken at w̃, the step at w. With β = 1 the method is exactly FedAvg with adjacency weights. A client
that doesn't take part in a round keeps its last local model; before its first round, that is the initial global
model.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from strategies.clients import graph
from strategies.clients.roster import Client
from strategies.core.client_vectors import ClientVectors
from strategies.core.config import StrategyConfig, SynchronousConfig
from strategies.core.parameters import parameter
from strategies.core.run_state import State
from strategies.flower import messages
from strategies.flower.arrays import Vector
from strategies.rounds.strategy import SynchronousStrategy

# The matrix of local models is averaged in blocks of columns, each of this many bytes in float64, to fit a CPU cache.
BLOCK = 1 << 21

# Averages are computed for this many clients at once, or for as many as take this many bytes, because each pass
# converts the whole matrix to float64.
TOGETHER, TOGETHER_BYTES = 64, 1 << 26


@dataclass(frozen=True)
class SpectralConfig(SynchronousConfig):
    """Parameters of the spectral method; its weights p_i are always ``adjacency``, whose p_ij it needs.

    Parameters
    ----------
    perturbation_beta : float
        β: the gradient is taken at β w + (1 − β) u, where u is the weighted average of the neighbours' models
    neighbour_memory : float
        memory for the clients' last models; beyond it they are in a memory-mapped file
    """

    client_weights: Literal["samples", "uniform", "adjacency"] = "adjacency"
    perturbation_beta: float = parameter(0.5, ge=0, le=1)
    neighbour_memory: float = parameter(4.0, ge=0, unit="GiB")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.refuse_protection("each client of the spectral method gets an average of its neighbours' models")


def neighbour_average(
    rows: NDArray[np.float64], models: NDArray[np.float32], order: Sequence[int]
) -> NDArray[np.float32]:
    """Return u = (p_ij / p_i) W (L, D) for L clients: a matrix product in float64, by blocks of columns (eq. 4.6).

    Parameters
    ----------
    rows : array (L, C)
        Rows of the row-stochastic neighbour matrix.
    models : array (M, D), M ≥ C
        Last local models; ``order`` (C,) holds the row of ``models`` for each column of ``rows``.
    """
    average = np.empty((len(rows), models.shape[1]), dtype=np.float32)
    width = max(1, BLOCK // (8 * len(order)))
    for start in range(0, models.shape[1], width):
        block = models[order, start : start + width].astype(np.float64)
        average[:, start : start + width] = rows @ block
    return average


class Spectral(SynchronousStrategy):
    """The spectral-graph perturbed method (Buttaci 2024, algorithm 2).

    Rule: gradients are taken at β w + (1 − β) u_i, u_i the mean of the last models of clients with similar data.
    Needs: a direction of each client's data.
    Sent: u_i.
    Kept: the last model of each client.
    Helps: where groups of clients have similar data; as u_i is a round old, a small β needs small steps.
    """

    Config: ClassVar[type[StrategyConfig]] = SpectralConfig
    config: SpectralConfig
    streams: ClassVar[bool] = False
    _models: ClientVectors | None = None

    def adapted(self, config: StrategyConfig) -> StrategyConfig:
        """Return the config with adjacency weights, because the method needs the p_ij of the graph."""
        return replace(config, client_weights="adjacency")

    def local_rule(self) -> dict[str, float]:
        """Return β for the clients, or {} if β = 1, where the step is FedAvg's."""
        return {messages.BETA: self.config.perturbation_beta} if self._perturbs else {}

    def without_companions(self) -> str:
        """Return the parameter with which no average of the neighbours is sent."""
        return "perturbation_beta = 1"

    def unseen_by_wrappers(self) -> str:
        """Return the part of the messages that a wrapper, such as Flower's for differential privacy, doesn't see."""
        if not self._perturbs:
            return ""
        return (
            f"perturbation_beta = {self.config.perturbation_beta}, allowed there is 1: each client is sent a mean "
            "of its neighbours' models"
        )

    def companions(self, clients: Sequence[Client]) -> Iterator[Mapping[str, Vector]]:
        """Yield u_t^i (D,) of each participant."""
        if not self._perturbs or self.graph is None:
            return
        if self._models is None:
            self._models = ClientVectors(self.model, len(self.graph.clients), self.config.neighbour_memory)
        order = self._models.rows(self.graph.clients)
        position = {index: i for i, index in enumerate(self.graph.clients)}
        rows = graph.neighbour_matrix(self.graph.adjacency)[[position[c.index] for c in clients]]
        step = max(TOGETHER, TOGETHER_BYTES // (4 * len(self.model)))
        for start in range(0, len(rows), step):
            for average in neighbour_average(rows[start : start + step], self._models.matrix, order):
                yield {messages.NEIGHBOURS: average.astype(np.float64)}

    def bytes_kept(self) -> int:
        """Return the size of the local models in bytes."""
        return super().bytes_kept() + (0 if self._models is None else self._models.matrix.nbytes)

    def state(self) -> State:
        """Return the state of the run, with the local models."""
        return super().state() | ({} if self._models is None else self._models.state("local-models"))

    def restore(self, state: State) -> None:
        """Restore the state of the run, with the local models."""
        super().restore(state)
        self._models = ClientVectors.restored(state, "local-models", self.config.neighbour_memory)

    def reset(self) -> None:
        """Reset the run, and forget the local models."""
        super().reset()
        self._models = None

    def received(self, client: Client, local_model: Vector) -> None:
        """Keep the client's last local model w_{t,E}^i."""
        if self._models is not None:
            self._models.put(client.index, local_model)

    @property
    def _perturbs(self) -> bool:
        return self.config.perturbation_beta < 1
