"""What a model is called with, and what it returns: several inputs of a row by name or by place, and logits.

Data, batches and messages have one tensor (B, D) of all inputs, one after the other (``fedapp.data.parts``). A hook
of the model takes it apart, wherever the model is called. Another hook takes the logits of outputs in an object, such
as the ``ModelOutput`` of transformers.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fedapp.names import Part

_DTYPES = {"float32": torch.float32, "int64": torch.int64, "bool": torch.bool}


@dataclass(frozen=True)
class Unpacking:
    """Takes the one tensor (B, D) that a model is called with apart; what is called with several stays as it is."""

    parts: tuple[Part, ...]

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Return the arguments of the model's forward pass."""
        width = sum(math.prod(part.shape) for part in self.parts)
        if kwargs or len(args) != 1 or not isinstance(args[0], Tensor) or args[0].shape[1:] != (width,):
            return None
        found = apart(self.parts, args[0])
        return ((), found) if isinstance(found, dict) else (found, {})


def unpack(model: nn.Module, parts: Sequence[Part]) -> nn.Module:
    """Have a model take rows of numbers as several inputs."""
    model.register_forward_pre_hook(Unpacking(tuple(parts)), with_kwargs=True)
    return model


def apart(parts: Sequence[Part], x: Tensor) -> dict[str, Tensor] | tuple[Tensor, ...]:
    """Return inputs (B, D) as a dict by name, or as a tuple where they have none."""
    pieces = torch.split(x, [math.prod(part.shape) for part in parts], dim=1)
    values = [
        piece.reshape(len(x), *part.shape).to(_DTYPES[part.dtype])
        for piece, part in zip(pieces, parts, strict=True)
    ]
    return (
        {part.name: value for part, value in zip(parts, values, strict=True)} if parts[0].name else (*values,)
    )


def inputs_of(model: nn.Module, x: Tensor) -> Any:
    """Return inputs as a model gets them: a tensor, or several in a dict or tuple."""
    for hook in model._forward_pre_hooks.values():
        if isinstance(hook, Unpacking):
            return apart(hook.parts, x)
    return x


def take_logits(model: nn.Module, *, of_mappings: bool) -> nn.Module:
    """Have a model return the tensor of its outputs where it returns them in an object: see ``logits_of``."""
    # A Sequential returns what its last layer does, and is trained fast without hooks.
    if type(model) is not nn.Sequential:
        model.register_forward_hook(_LogitsHook(of_mappings))
    return model


@dataclass(frozen=True)
class _LogitsHook:
    """A hook of a model's forward pass; an object, so that copies of the model have one hook each."""

    of_mappings: bool

    def __call__(self, module: nn.Module, args: Any, outputs: Any) -> Any:
        """Return what takes the place of a model's outputs."""
        return logits_of(outputs, of_mappings=self.of_mappings)


def logits_of(outputs: Any, *, of_mappings: bool = True) -> Any:
    """Return an object's attribute ``logits``, or the only tensor of a mapping with attributes; else the outputs.

    A plain tuple or dict stays as it is, and a mapping with attributes unless ``of_mappings``: a loss of the user's
    own may read all of it.
    """
    if isinstance(outputs, Tensor) or (isinstance(outputs, Mapping) and not of_mappings):
        return outputs
    if isinstance(logits := getattr(outputs, "logits", None), Tensor):
        return logits
    if isinstance(outputs, Mapping) and hasattr(outputs, "to_tuple"):
        tensors = [value for value in outputs.values() if isinstance(value, Tensor)]
        return tensors[0] if len(tensors) == 1 else outputs
    return outputs
