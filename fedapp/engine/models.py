"""The models that stacks of tasks end with, and their sum: on the host, or on a GPU where they were trained."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedapp.training.rule import Parameters
from fedapp.training.state import as_array
from strategies.flower.arrays import Vector
from strategies.updates.aggregation import added_in_order

# Where the sum of the squares of a stack's values, in float32, is below this, all values are finite and small enough.
HARMLESS = 1e30

# Values of models that are added up at once, in float64: half of a core's cache; on a GPU an eighth of a GiB.
AT_ONCE, AT_ONCE_ON_GPU = 1 << 17, 1 << 24


class Models(ABC):
    """The models of some stacks; a client's row is its place in all stacks, one after the other."""

    @property
    @abstractmethod
    def harmless(self) -> bool:
        """Whether no model can hold a value that ``strategies.flower.arrays.check_values`` refuses."""

    @abstractmethod
    def model(self, row: int, base: Vector) -> Vector:
        """Return a client's model (D,); values that aren't trained are those of ``base`` (D,), which it was sent."""

    @abstractmethod
    def weighted_sum(self, rows: Sequence[int], weights: Sequence[float], base: Vector) -> Vector:
        """Return Σ d_i Δ_i (D,) over the clients in ``rows``, in this order, float64; 0 for untrained values."""


def models_of(stacks: Sequence[Parameters], starts: Mapping[str, int]) -> Models:
    """Return the models of stacks.

    Parameters
    ----------
    stacks : sequence of Parameters
        The trained arrays of each stack of G clients, (G, ...) each.
    starts : mapping of str to int
        Where each array begins in a model (D,).
    """
    on_gpu = next(iter(stacks[0].values())).device.type != "cpu"
    return (ModelsOnGPU if on_gpu else ModelsOnHost)(stacks, starts)


def _flat(values: Tensor) -> Tensor:
    """Return an array of G clients, (G, ...) or (G,), as (G, d)."""
    return values.unsqueeze(-1).flatten(1)


class ModelsOnHost(Models):
    """Models in this process's memory; parameters are those of ``models_of``."""

    def __init__(self, stacks: Sequence[Parameters], starts: Mapping[str, int]) -> None:
        # Pairs, not keys: an array of no values begins where the next one does.
        self.arrays: list[tuple[int, NDArray[np.float32]]] = []
        for name in stacks[0]:
            found = [_flat(stack[name]).numpy() for stack in stacks]
            self.arrays.append((starts[name], np.concatenate(found) if len(found) > 1 else found[0]))

    @cached_property
    def harmless(self) -> bool:
        """Sum the squares of each array's values over all stacks at once."""
        flat = [values.reshape(-1) for _, values in self.arrays]
        with np.errstate(over="ignore", invalid="ignore"):
            return all(float(np.dot(values, values)) < HARMLESS for values in flat)

    def model(self, row: int, base: Vector) -> Vector:
        """Copy the client's arrays into a copy of ``base``."""
        model = base.copy()
        for start, values in self.arrays:
            model[start : start + values.shape[1]] = values[row]
        return model

    def weighted_sum(self, rows: Sequence[int], weights: Sequence[float], base: Vector) -> Vector:
        """Add up ``AT_ONCE`` values of all clients at a time, which stay in a core's cache."""
        total, factors = np.zeros(len(base)), np.array(weights)[:, None]
        step = max(AT_ONCE // max(len(rows), 1), 1)
        in_order = list(rows) == list(range(len(rows)))
        for start, values in self.arrays:
            for begin in range(0, values.shape[1], step):
                some = values[:, begin : begin + step]
                place = slice(start + begin, start + begin + some.shape[1])
                moves = (some[: len(rows)] if in_order else some[rows]).astype(np.float64)
                moves -= base[place]
                moves *= factors
                total[place] = added_in_order(moves)
        return total


class ModelsOnGPU(Models):
    """Models on the GPU where they were trained: only their sum goes to the host; parameters as in ``models_of``."""

    def __init__(self, stacks: Sequence[Parameters], starts: Mapping[str, int]) -> None:
        self.arrays: list[tuple[int, Tensor]] = []
        for name in stacks[0]:
            found = [_flat(stack[name]) for stack in stacks]
            self.arrays.append((starts[name], torch.cat(found) if len(found) > 1 else found[0]))
        self._sent: tuple[Vector, Tensor] | None = None

    @cached_property
    def harmless(self) -> bool:
        """Sum the squares of each array's values over all stacks at once."""
        squares = [values.square().sum() for _, values in self.arrays]
        return bool((torch.stack(squares) < HARMLESS).all())

    def model(self, row: int, base: Vector) -> Vector:
        """Copy the client's arrays to the host, into a copy of ``base``."""
        model = base.copy()
        for start, values in self.arrays:
            model[start : start + values.shape[1]] = as_array(values[row])
        return model

    def weighted_sum(self, rows: Sequence[int], weights: Sequence[float], base: Vector) -> Vector:
        """Add up ``AT_ONCE_ON_GPU`` values of all clients at a time, which bounds the GPU's memory."""
        total, device, sent = np.zeros(len(base)), self.arrays[0][1].device, self._on_gpu(base)
        places = torch.tensor(rows, device=device)
        factors = torch.tensor(weights, dtype=torch.float64, device=device).unsqueeze(1)
        step = max(AT_ONCE_ON_GPU // max(len(rows), 1), 1)
        for start, values in self.arrays:
            for begin in range(0, values.shape[1], step):
                some = values[:, begin : begin + step].index_select(0, places).double()
                place = slice(start + begin, start + begin + some.shape[1])
                some -= sent[place]
                total[place] = as_array(some.mul_(factors).sum(0))
        return total

    def _on_gpu(self, base: Vector) -> Tensor:
        """Return the model that was sent, on the GPU: it is moved there once for all sums."""
        if self._sent is None or self._sent[0] is not base:
            self._sent = base, torch.from_numpy(base).to(self.arrays[0][1].device)
        return self._sent[1]
