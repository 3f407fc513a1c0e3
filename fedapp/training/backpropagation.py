"""Forward and back through the layers of a dense network, many clients at once.

Parameters have a leading axis of A clients, activations are (A, features, examples): with few classes, products and
softmax are twice as fast that way round.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from fedapp.training.layers import Layer
from fedapp.training.vectors import Parameters


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
