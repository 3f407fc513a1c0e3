"""What is in a model's state: what is trained, what isn't, and what has two names.

Not all of it travels between server and clients: what never changes is the same on each side, in the model that each
side builds (``fedapp.training.travelling``).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class StateNames:
    """The names of a model's state dict.

    Attributes
    ----------
    trained : tuple of str
        Parameters that take a gradient.
    fixed : tuple of str
        Frozen parameters, and buffers such as the running statistics of batch normalisation.
    twins : mapping of str to str
        Names of tensors that are there under another name, too (tied weights), and that name.
    """

    trained: tuple[str, ...]
    fixed: tuple[str, ...]
    twins: Mapping[str, str]

    def own(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return a state with each tensor under one name."""
        return {name: value for name, value in state.items() if name not in self.twins}

    def whole(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return a state under all its names, as ``nn.Module.load_state_dict`` takes it: the reverse of ``own``."""
        return {**state, **{twin: state[name].clone() for twin, name in self.twins.items()}}


@lru_cache(maxsize=8)
def names_of(model: nn.Module) -> StateNames:
    """Return the names of a model's state."""
    parameters = dict(model.named_parameters())
    buffers = dict(model.named_buffers())
    first = {id(value): name for name, value in (*parameters.items(), *buffers.items())}
    state = model.state_dict(keep_vars=True)
    twins = {name: first[id(value)] for name, value in state.items() if first.get(id(value), name) != name}
    trained = tuple(name for name, value in parameters.items() if value.requires_grad)
    known = {*trained, *twins}
    return StateNames(trained, tuple(name for name in state if name not in known), twins)


def copied_state(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of a model's tensors, each under one name."""
    state = {name: value.detach().clone() for name, value in model.state_dict().items()}
    return names_of(model).own(state)


def is_statistic(name: str) -> bool:
    """Return True for a buffer named as PyTorch's running statistics are: ``running_…``, ``num_batches_tracked``."""
    last = name.rpartition(".")[2]
    return last.startswith("running_") or last == "num_batches_tracked"


def same_values(one: Tensor | None, other: Tensor) -> bool:
    """Return True if two tensors hold the same values; NaN equals a NaN of the same bits."""
    if one is None or one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(one, other) or torch.equal(as_bytes(one), as_bytes(other))


def is_in_numpy(dtype: torch.dtype) -> bool:
    """Return True if NumPy has a type, so that arrays of it travel: it has neither bfloat16 nor floats of a byte."""
    return not dtype.is_floating_point or dtype in (torch.float16, torch.float32, torch.float64)


def as_array(value: Tensor) -> np.ndarray:
    """Return a tensor's values on the host, in float32 where NumPy has no type for them.

    Values from a GPU are in pinned memory, which PyTorch keeps for the next ones: a copy to fresh pageable memory
    takes many times as long.
    """
    value = value.detach() if is_in_numpy(value.dtype) else value.detach().float()
    if value.is_cuda:
        value = torch.empty(value.shape, dtype=value.dtype, pin_memory=True).copy_(value)
    return value.numpy(force=True)


def as_bytes(value: Tensor) -> Tensor:
    """Return a tensor's bytes, in C order, of any dtype."""
    return value.detach().contiguous().flatten().view(torch.uint8)


def completed(model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a model's whole state, on the device of ``state``; what ``state`` doesn't have is the model's own."""
    names = names_of(model)
    state = names.own(state)
    whole = names.own(model.state_dict())
    device = next((value.device for value in state.values()), None)
    return {**{name: value if name in state else value.to(device) for name, value in whole.items()}, **state}


def for_one_call(model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return a state with copies of all buffers, for a forward pass of ``torch.func.functional_call``.

    What it changes in them stays in neither, also of those that the state dict doesn't have (``persistent=False``).
    """
    buffers = {name: state.get(name, value).clone() for name, value in model.named_buffers()}
    unset = {
        f"{prefix}.{key}".lstrip("."): None
        for prefix, layer in model.named_modules()
        for key, value in layer._buffers.items()
        if value is None
    }
    return {**state, **buffers, **unset}
