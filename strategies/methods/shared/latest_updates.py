"""A vector of every client, such as its last update, and their mean: h_i, 0 at first, and h = Σ p_i h_i."""

from collections.abc import Iterable, Mapping

import numpy as np

from strategies.core.client_vectors import ClientVectors
from strategies.core.run_state import Memory
from strategies.core.session import Session
from strategies.flower.arrays import Vector
from strategies.updates.pipeline import Contribution

NAME = "latest"  # of the vectors, strategies.core.run_state.Memory.vectors
_MEAN, _OF = "latest-mean", "latest-mean-of"


class LatestUpdates:
    """h_i and h, kept in a method's memory: C vectors of float32, 4 C D bytes, and one of float64.

    h moves with each h_i that is put in, in D steps; only when the p_i change is it summed anew, over all clients.

    Parameters
    ----------
    memory : Memory
        The method's.
    client_vectors : ClientVectors
        Its h_i.
    client_weights : mapping of int to float
        p_i of the clients that count now, by index.
    """

    def __init__(
        self, memory: Memory, client_vectors: ClientVectors, client_weights: Mapping[int, float]
    ) -> None:
        self.memory, self.client_vectors, self.client_weights = memory, client_vectors, client_weights
        of = np.array([list(client_weights), list(client_weights.values())])
        if not np.array_equal(memory.get(_OF, ()), of):
            memory[_OF], memory[_MEAN] = of, client_vectors.weighted_sum(client_weights)

    @classmethod
    def of(cls, session: Session, name: str, client_weights: Mapping[int, float]) -> "LatestUpdates":
        """Return the vectors of a run under a name, and their mean by these p_i."""
        return cls(session.memory, session.client_vectors(name), client_weights)

    @staticmethod
    def forget(memory: Memory) -> None:
        """Let h be summed anew, as other vectors have taken the place of the h_i."""
        memory.pop(_OF, None)

    @property
    def mean(self) -> Vector:
        """h (D,)."""
        return np.asarray(self.memory[_MEAN])

    def get(self, client: int) -> Vector:
        """Return h_i (D,)."""
        return self.client_vectors.get(client)

    def put(self, client: int, update: Vector) -> None:
        """Let an update Δ_i (D,) be h_i."""
        before = self.get(client)
        self.client_vectors.put(client, update)
        moved = self.get(client) - before  # as it is kept, in float32
        self.memory[_MEAN] = self.mean + self.client_weights.get(client, 0.0) * moved

    def take(self, contributions: Iterable[Contribution]) -> None:
        """Let the updates of contributions be the h_i of their clients."""
        for contribution in contributions:
            self.put(contribution.client.index, contribution.update)

    def add(self, client: int, factor: float, vector: Vector) -> None:
        """Add factor × vector (D,) to h_i; h has it in float64."""
        self.client_vectors.put(client, self.get(client) + factor * vector)
        self.memory[_MEAN] = self.mean + factor * self.client_weights.get(client, 0.0) * vector
