"""How many floating-point operations a model's training takes, counted on some rows."""

from collections.abc import Iterator
from contextlib import contextmanager
from warnings import catch_warnings, filterwarnings

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

# A pass back through the model takes about twice what one forward takes.
PASSES = 3


@contextmanager
def _without_a_warning() -> Iterator[None]:
    """Leave out what PyTorch says of graphics cards when oneDNN is switched off."""
    with catch_warnings():
        filterwarnings("ignore", message="TF32 acceleration")
        yield


def flop_of(model: nn.Module, x: Tensor) -> float:
    """Return the operations by which a model learns from one example, three times those of its prediction.

    What PyTorch counts is counted: products of matrices, convolutions and attention, a multiplication and an addition
    each; what is done value by value, such as an activation, isn't. 0: nothing that is counted.

    Parameters
    ----------
    x : Tensor
        Inputs (n, ...) of some rows.
    """
    from torch.utils.flop_counter import FlopCounterMode  # imports Triton, which takes a tenth of a second

    was = model.training
    model.eval()
    try:
        # Neither oneDNN's whole recurrent layers nor the short cut of transformers, which nothing is counted of; nor
        # attention in one piece, of which some versions of PyTorch count nothing on a CPU.
        with (
            _without_a_warning(),
            torch.backends.mkldnn.flags(enabled=False),
            sdpa_kernel(SDPBackend.MATH),
            torch.enable_grad(),
            FlopCounterMode(display=False) as counter,
        ):
            model(x)
    finally:
        model.train(was)
    return float(PASSES * counter.get_total_flops() / len(x))
