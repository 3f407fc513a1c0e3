"""Local training in bfloat16 where that is faster: ``torch.autocast``, with weights in float32.

With ``bf16`` the forward pass of a local step, and so its backward pass, is in bfloat16 where PyTorch's autocast has
it: products of matrices and convolutions, with 8 bits of significand in place of 24. Weights, their steps, the
optimizer's state and the loss are float32, and so is every model that leaves the client (Micikevicius et al. 2018,
section 3.1, with bfloat16 in place of half precision: its exponents are those of float32, and no loss is scaled).
"""

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from fedapp.names import Precision

log = logging.getLogger("flwr.fedapp")


def passed(precision: Precision, device: torch.device, forward: Callable[[], Any]) -> Any:
    """Return what a forward pass makes in a precision, one tensor or several: in float32, as a loss gets them."""
    if precision == "fp32":
        return forward()
    with torch.autocast(device.type, torch.bfloat16):
        outputs = forward()
    return tree_map(
        lambda each: each.float() if isinstance(each, Tensor) and each.dtype == torch.bfloat16 else each,
        outputs,
    )


def is_fast(device: torch.device) -> bool:
    """Return True if PyTorch has kernels for bfloat16 that suit a device, and needn't emulate it."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def say_slow(precision: Precision, device: torch.device) -> None:
    """Say where a precision is slower than float32."""
    if precision == "bf16" and not is_fast(device):
        log.warning(
            "precision = 'bf16': this %s has no arithmetic of bfloat16; PyTorch emulates it, which rounds alike and "
            "takes longer than fp32",
            "GPU" if device.type == "cuda" else "processor",
        )
