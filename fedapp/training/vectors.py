"""A model's parameters by name, and stacks of them."""

from collections.abc import Sequence

import torch
from torch import Tensor

Parameters = dict[str, Tensor]


def stack_parameters(parameters: Sequence[Parameters]) -> Parameters:
    """Put the parameters of G clients into one stack, each (G, ...)."""
    return {name: torch.stack([one[name] for one in parameters]) for name in parameters[0]}
