"""Outputs in an object, such as the ``ModelOutput`` of transformers: a built-in loss gets its logits."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn


def take_logits(model: nn.Module, *, of_mappings: bool) -> nn.Module:
    """Have a model return the tensor of its outputs where it returns them in an object: see ``logits_of``."""
    if (
        type(model) is not nn.Sequential
    ):  # which returns what its last layer does, and is trained fast without hooks
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
