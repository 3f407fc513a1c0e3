"""Dense networks: which models are made of dense layers, and the forward and the backward pass through these.

The passes take many clients at once. Parameters have a leading axis of A clients, activations are (A, features,
examples): with few classes, products and softmax are twice as fast in this order of the axes.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache

import torch
from torch import Tensor, nn

from fedapp.training.rule import Parameters

# A layer's parameter names: weight (out, in) and bias (out,).
Layer = tuple[str, str]


@lru_cache(maxsize=8)
def dense_layers(model: nn.Module) -> list[Layer]:
    """Return the layers of a Sequential of Flatten, Linear and then (ReLU, Linear) pairs; of other models none.

    A subclass may have a forward pass of its own, a layer may be there twice, hooks and tied weights change what is
    computed: none of them are dense layers here.
    """
    children = list(model._modules.items()) if type(model) is nn.Sequential else []
    kinds = [type(layer) for _, layer in children]
    if kinds[:2] != [nn.Flatten, nn.Linear] or kinds[2:] != [nn.ReLU, nn.Linear] * (len(kinds) // 2 - 1):
        return []
    flatten = children[0][1]
    if flatten.start_dim != 1 or flatten.end_dim != -1 or any(map(is_changed, model.modules())):
        return []
    layers = [(f"{name}.weight", f"{name}.bias") for name, _ in children[1::2]]
    # Not where biases lack, where weights are tied, or where they follow from others.
    names = [name for name, value in model.named_parameters() if value.requires_grad]
    return layers if names == [name for layer in layers for name in layer] else []


def is_changed(layer: nn.Module) -> bool:
    """Tell whether a layer computes something else than its class: it has a hook, or a forward pass of its own."""
    hooks = (layer._forward_pre_hooks, layer._forward_hooks, layer._backward_pre_hooks, layer._backward_hooks)
    return any(hooks) or "forward" in vars(layer)


def forward(layers: Sequence[Layer], w: Parameters, outputs: Tensor) -> tuple[list[Tensor], Tensor]:
    """Return the inputs of the layers above the first, each (A, in, B), and the outputs of the last, (A, K, B).

    ``outputs`` are those of the first layer, whose memory is taken.
    """
    activations = []
    for weight, bias in layers[1:]:
        activations.append(outputs.relu_())
        outputs = torch.baddbmm(w[bias].unsqueeze(2), w[weight], activations[-1])
    return activations, outputs


def backward(
    layers: Sequence[Layer], w: Parameters, activations: Sequence[Tensor], error: Tensor
) -> Iterator[tuple[int, Tensor]]:
    """Yield each layer's number, from the last to 0, and the error δ at its output: its gradient is δ inputᵀ.

    ``activations`` are the inputs of the layers above the first, ``error`` is that of the outputs.
    """
    for depth in range(len(layers) - 1, -1, -1):
        yield depth, error
        if depth:
            below = w[layers[depth][0]].mT @ error
            error = torch.ops.aten.threshold_backward(below, activations[depth - 1], 0)
