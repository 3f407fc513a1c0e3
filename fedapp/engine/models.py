"""The models that stacks of tasks end with, and their sum: on the host, or on a GPU where they were trained."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedapp.training.rule import Parameters
from strategies.flower.arrays import Vector
from strategies.updates.aggregation import added_in_order

# A stack's models are harmless where the squares of their values, summed in float32, are below this.
HARMLESS = 1e30

# Values of models that are added up at once, in float64: half of a core's cache; an eighth of a GiB.
AT_ONCE, AT_ONCE_ON_GPU = 1 << 17, 1 << 24


class Models(ABC):
    """The models of some stacks, one after the other."""

    @property
    @abstractmethod
    def harmless(self) -> bool:
        """Whether no model can hold what doesn't count (``strategies.flower.arrays.check_values``)."""

    @abstractmethod
    def model(self, row: int, base: Vector) -> Vector:
        """Return a client's model (D,), from the one that it was sent (D,)."""

    @abstractmethod
    def weighted_sum(self, rows: Sequence[int], weights: Sequence[float], base: Vector) -> Vector:
        """Return Σ d_i Δ_i (D,) of some, in this order, in float64: 0 where nothing is trained."""


def models_of(stacks: Sequence[Parameters], starts: Mapping[str, int]) -> Models:
    """Return the models of stacks.

    Parameters
    ----------
    stacks : sequence of Parameters
        What of them is trained, each (G, ...).
    starts : mapping of str to int
        Where each array begins in a model (D,).
    """
    on_gpu = next(iter(stacks[0].values())).device.type != "cpu"
    return (ModelsOnGPU if on_gpu else ModelsOnHost)(stacks, starts)


def _flat(values: Tensor) -> Tensor:
    """Return an array of G clients, (G, ...), as (G, d): of one number each, too."""
    return values.unsqueeze(-1).flatten(1)


class ModelsOnHost(Models):
    """Their arrays (G, d), each with where it begins; parameters are those of ``models_of``."""

    def __init__(self, stacks: Sequence[Parameters], starts: Mapping[str, int]) -> None:
        # Pairs, not keys: an array of no values begins where the next one does.
        self.arrays: list[tuple[int, NDArray[np.float32]]] = []
        for name in stacks[0]:
            found = [_flat(stack[name]).numpy() for stack in stacks]
            self.arrays.append((starts[name], np.concatenate(found) if len(found) > 1 else found[0]))

    @cached_property
    def harmless(self) -> bool:
        """Look at all at once."""
        flat = [values.reshape(-1) for _, values in self.arrays]
        with np.errstate(over="ignore", invalid="ignore"):
            return all(float(np.dot(values, values)) < HARMLESS for values in flat)

    def model(self, row: int, base: Vector) -> Vector:
        """Put its arrays in their places."""
        model = base.copy()
        for start, values in self.arrays:
            model[start : start + values.shape[1]] = values[row]
        return model

    def weighted_sum(self, rows: Sequence[int], weights: Sequence[float], base: Vector) -> Vector:
        """Take so many values at once as stay in a core's cache, of all clients."""
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
    """The same where they were trained: what goes to the host is their sum."""

    def __init__(self, stacks: Sequence[Parameters], starts: Mapping[str, int]) -> None:
        self.arrays: list[tuple[int, Tensor]] = [
            (starts[name], torch.cat([_flat(stack[name]) for stack in stacks])) for name in stacks[0]
        ]

    @cached_property
    def harmless(self) -> bool:
        """Look at all at once."""
        squares = [values.square().sum() for _, values in self.arrays]
        return bool((torch.stack(squares) < HARMLESS).all())

    def model(self, row: int, base: Vector) -> Vector:
        """Bring its arrays to the host."""
        model = base.copy()
        for start, values in self.arrays:
            model[start : start + values.shape[1]] = values[row].cpu().numpy()
        return model

    def weighted_sum(self, rows: Sequence[int], weights: Sequence[float], base: Vector) -> Vector:
        """Take so many values at once as make a piece of the GPU's memory, of all clients."""
        total, device = np.zeros(len(base)), self.arrays[0][1].device
        places = torch.tensor(rows, device=device)
        factors = torch.tensor(weights, dtype=torch.float64, device=device).unsqueeze(1)
        step = max(AT_ONCE_ON_GPU // max(len(rows), 1), 1)
        for start, values in self.arrays:
            for begin in range(0, values.shape[1], step):
                some = values[:, begin : begin + step].index_select(0, places).double()
                place = slice(start + begin, start + begin + some.shape[1])
                some -= torch.from_numpy(base[place]).to(device)
                total[place] = some.mul_(factors).sum(0).cpu().numpy()
        return total
