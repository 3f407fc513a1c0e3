"""The last local models of a graph's clients, and each client's average of its neighbours' (Buttaci 2024, eq. 4.6).

The spectral method, with and without rounds, takes gradients at β w + (1 − β) u_i with this average u_i.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from strategies.clients import graph
from strategies.clients.client_graph import ClientGraph
from strategies.clients.roster import Client
from strategies.core.client_vectors import ClientVectors
from strategies.core.config import StrategyConfig
from strategies.core.parameters import parameter
from strategies.core.run_state import State
from strategies.flower import messages
from strategies.flower.arrays import Vector

# The matrix of local models is averaged in blocks of columns, each of this many bytes in float64, to fit a CPU cache
# beside what it is made of.
BLOCK = 1 << 19

# Averages are computed for this many clients at once, or for as many as take this many bytes, because each pass
# converts the whole matrix to float64.
TOGETHER, TOGETHER_BYTES = 64, 1 << 26

NAME = "local-models"  # in a checkpoint


@dataclass(frozen=True)
class PerturbedConfig(StrategyConfig):
    """Parameters of local steps that neighbours perturb.

    Parameters
    ----------
    perturbation_beta : float
        β: gradients are taken at β w + (1 − β) u, with u the neighbours' weighted mean
    neighbour_memory : float
        memory for clients' last models; others are in a file
    graph_source : str
        what the graph is made of: directions of clients' data, or their last updates
    """

    client_weights: Literal["samples", "uniform", "adjacency"] = "adjacency"
    perturbation_beta: float = parameter(0.5, ge=0, le=1)
    neighbour_memory: float = parameter(4.0, ge=0, unit="GiB")
    graph_source: Literal["data", "updates"] = "data"

    @property
    def local_rule(self) -> dict[str, float]:
        """The field of training messages that holds β; none if β = 1, where the local step is FedAvg's."""
        return {messages.BETA: self.perturbation_beta} if self.perturbation_beta < 1 else {}

    @property
    def why_not_wrappable(self) -> str:
        """How work affects others, unseen by a wrapper such as one of Flower's for privacy; "" if it doesn't."""
        if self.graph_source == "updates":
            return "graph_source = 'updates', allowed there is 'data': clients count by each other's last updates"
        if not self.local_rule:
            return ""
        return (
            f"perturbation_beta = {self.perturbation_beta}, allowed there is 1: each client is sent a mean of its "
            "neighbours' models"
        )

    def updates_memory(self) -> float | None:
        """Return the GiB of last updates that may be in memory; None with ``graph_source = "data"``."""
        return self.neighbour_memory if self.graph_source == "updates" else None


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
    number = len(order)
    chosen = models[:number] if list(order) == list(range(number)) else None  # as they lie: not copied first
    for start in range(0, models.shape[1], width):
        part = slice(start, start + width)
        block = (models[order, part] if chosen is None else chosen[:, part]).astype(np.float64)
        average[:, part] = rows @ block
    return average


class NeighbourModels:
    """The last local model of each client of a graph: before a client's first, the initial model.

    Parameters
    ----------
    memory : float
        GiB of models that may be in memory; beyond it they are in a memory-mapped file.
    """

    _models: ClientVectors | None
    _adjacency: NDArray[np.float64] | None  # whose neighbour matrix, and order of clients, these are
    _matrix: NDArray[np.float64]
    _position: dict[int, int]

    def __init__(self, memory: float) -> None:
        self._memory = memory
        self._models = self._adjacency = None
        self._matrix, self._position = np.empty((0, 0)), {}

    def averages(
        self,
        of: ClientGraph,
        clients: Sequence[Client],
        model: Vector,
        discount_factors: NDArray[np.float64] | None = None,
    ) -> Iterator[Vector]:
        """Yield u_i (D,) of some clients of a graph.

        Parameters
        ----------
        model : array (D,)
            The global model; at the first call, the initial one.
        discount_factors : array (C,), optional
            The factor of each client's last model, in the order of the graph's clients.
        """
        models = self._models = self._models or ClientVectors(model, len(of.clients), self._memory)
        order = models.rows(of.clients)
        if self._adjacency is not of.adjacency:  # a graph whose clients change has another array
            self._adjacency, self._matrix = of.adjacency, graph.neighbour_matrix(of.adjacency)
            self._position = {index: i for i, index in enumerate(of.clients)}
        # A client whose node has just gone may be asked before that is noticed: it has no edge for now.
        unweighted = np.full(len(of.clients), 1 / len(of.clients))
        places = [self._position.get(client.index) for client in clients]
        rows = np.stack([unweighted if place is None else self._matrix[place] for place in places])
        if discount_factors is not None:
            rows = discounted(rows, discount_factors)
        step = max(TOGETHER, TOGETHER_BYTES // (4 * len(model)))
        for start in range(0, len(rows), step):
            for average in neighbour_average(rows[start : start + step], models.matrix, order):
                yield average.astype(np.float64)

    def put(self, client: Client, local_model: Vector) -> None:
        """Keep a client's last local model (D,), if averages are asked for at all."""
        if self._models is not None:
            self._models.put(client.index, local_model)

    @property
    def num_bytes(self) -> int:
        """The size of the local models in bytes."""
        return 0 if self._models is None else self._models.matrix.nbytes

    def state(self) -> State:
        """Return the local models for a checkpoint."""
        return {} if self._models is None else self._models.state(NAME)

    def restore(self, state: State) -> None:
        """Restore the local models."""
        self._models = ClientVectors.restored(state, NAME, self._memory)


def discounted(rows: NDArray[np.float64], discount_factors: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return A_ij s_j / Σ_j A_ij s_j (L, C) from rows A_ij / Σ_j A_ij (L, C) and factors s_j (C,).

    Where all factors are the same they cancel, and the rows are as they were, bit for bit. So is a row whose factors
    are all 0, as (δ + 1)^−A is in float64 for a large A.
    """
    if (discount_factors == discount_factors[0]).all():
        return rows
    weighted = rows * discount_factors
    totals = weighted.sum(axis=1, keepdims=True)
    return np.where(totals > 0, weighted / np.where(totals > 0, totals, 1.0), rows)
