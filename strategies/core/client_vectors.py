"""Vectors of each client, such as its last local model or its last update, for methods with a memory."""

import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from strategies.flower.arrays import Vector

# Columns of a matrix of models are worked on in blocks of this many bytes, in float64.
BLOCK = 1 << 26


def pooled(weights: NDArray[np.float64], models: NDArray[np.float32], rows: Sequence[int]) -> Vector:
    """Return Σ_j weights_ij models_j (L, D) in float64: one matrix product, by blocks of columns.

    Parameters
    ----------
    weights : array (L, C)
        Of L sums.
    models : array (M, D), M ≥ C
        ``rows`` (C) names those that the columns of ``weights`` stand for.
    """
    sums = np.empty((len(weights), models.shape[1]))
    for columns in _blocks(models.shape[1], len(rows)):
        sums[:, columns] = weights @ models[rows, columns].astype(np.float64)
    return sums


def squared_distances(
    models: NDArray[np.float32], rows: Sequence[int], own: Sequence[int], left_out: NDArray[np.intp]
) -> NDArray[np.float64]:
    """Return ‖model_i − model_j‖² (L, C) of some models (M, D), named by ``rows`` (C), ``own`` (L) of these to all.

    By the models' differences from their mean: those that are near each other are told apart however large they are.
    Columns that are ``left_out`` don't count.
    """
    counts = np.ones(models.shape[1], dtype=bool)
    counts[left_out] = False
    products = np.zeros((len(own), len(rows)))
    squares = np.zeros(len(rows))
    for columns in _blocks(models.shape[1], len(rows)):
        block = models[rows, columns].astype(np.float64)[:, counts[columns]]
        block -= block.mean(0)
        products += block[own] @ block.T
        squares += np.einsum("ij,ij->i", block, block)
    distances = np.maximum(squares[list(own), None] + squares - 2 * products, 0.0)
    distances[np.arange(len(own)), own] = 0.0
    return np.asarray(distances)


def _blocks(width: int, rows: int) -> Iterator[slice]:
    size = max(1, BLOCK // (8 * max(rows, 1)))
    return (slice(start, start + size) for start in range(0, width, size))


class ClientVectors:
    """A C × D matrix of float32, a row per client, in memory or, beyond a limit, in a temporary file.

    Parameters
    ----------
    initial : Vector
        What the row of a client holds before one is put there, shape (D,).
    num_clients : int
        C; clients that join later get rows of their own.
    limit : float
        GiB that may be in memory.

    Attributes
    ----------
    matrix : array (M, D), M ≥ C
        Its rows are in the order of ``clients``; those beyond are spare.
    """

    def __init__(self, initial: Vector, num_clients: int, limit: float = 4.0) -> None:
        self.initial = initial
        self.limit = limit
        self._rows: dict[int, int] = {}
        self.matrix = self._allocate(num_clients)
        self.matrix[:] = initial

    @property
    def clients(self) -> list[int]:
        """The clients that have a row, in the order of their rows."""
        return list(self._rows)

    def rows(self, clients: Sequence[int]) -> list[int]:
        """Return the rows of clients; new clients get new rows."""
        rows = [self._rows.setdefault(client, len(self._rows)) for client in clients]
        if len(self._rows) > len(self.matrix):
            known, self.matrix = self.matrix, self._allocate(len(self._rows))
            self.matrix[: len(known)] = known
            self.matrix[len(known) :] = self.initial
        return rows

    def get(self, client: int) -> Vector:
        """Return a client's vector (D,)."""
        (row,) = self.rows([client])  # may make the matrix anew
        return np.asarray(self.matrix[row], dtype=np.float64)

    def put(self, client: int, vector: Vector) -> None:
        """Set a client's vector (D,)."""
        (row,) = self.rows([client])
        self.matrix[row] = vector

    def weighted_sum(self, weights: Mapping[int, float]) -> Vector:
        """Return Σ weight_i × vector_i (D,), over clients by index and in that order."""
        total = np.zeros(len(self.initial))
        for client in sorted(weights if self.initial.any() else weights.keys() & self._rows.keys()):
            total += weights[client] * self.get(client)
        return total

    def state(self, name: str) -> dict[str, Any]:
        """Return the entries of a strategy's ``state`` under this name."""
        return {name: self.matrix, f"{name}-initial": self.initial, f"{name}-clients": self.clients}

    @classmethod
    def restored(cls, state: Mapping[str, Any], name: str, limit: float = 4.0) -> "ClientVectors | None":
        """Return the vectors of a state; None if the state has none of this name."""
        if name not in state:
            return None
        vectors = cls(np.array(state[f"{name}-initial"]), len(state[name]), limit)
        vectors.rows(state[f"{name}-clients"])
        vectors.matrix[:] = state[name]
        return vectors

    def _allocate(self, num_rows: int) -> NDArray[np.float32]:
        shape = (num_rows, len(self.initial))
        if 4 * shape[0] * shape[1] <= self.limit * 2**30:
            return np.empty(shape, dtype=np.float32)
        # The map keeps the file open, and nothing stays behind.
        with tempfile.TemporaryFile(prefix="client-vectors-") as file:
            os.posix_fallocate(file.fileno(), 0, 4 * shape[0] * shape[1])  # a full disk fails here
            return np.memmap(file, dtype=np.float32, mode="r+", shape=shape)
