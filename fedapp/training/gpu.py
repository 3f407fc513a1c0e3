"""A GPU whose results repeat, and PyTorch's switches for it: a process's, not a run's."""

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

# What cuBLAS may take for itself: by its own choice an LSTM's sums are another's in another run (NVIDIA, cuBLAS
# library, results reproducibility; PyTorch, torch.nn.LSTM).
WORKSPACE = "CUBLAS_WORKSPACE_CONFIG", ":4096:8"


class Precision(NamedTuple):
    """What float32 is rounded to before it is multiplied: "ieee" (nothing less), "tf32", or "none": as usual."""

    convolutions: str
    recurrent: str
    products: str

    @classmethod
    def now(cls) -> "Precision":
        """Return the precision of this process."""
        cudnn, matmul = _switches()
        return cls(cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision, matmul.fp32_precision)

    def take(self) -> None:
        """Set this precision, by PyTorch's newer names and by the older ones, which other code may read."""
        if self == self.now():
            return
        cudnn, matmul = _switches()
        # PyTorch 2.9 warns of the older names; without them, other code that reads them gets an error.
        warnings.filterwarnings("ignore", message="Please use the new API settings to control TF32")
        cudnn.allow_tf32 = self.convolutions == self.recurrent == "tf32"
        matmul.allow_tf32 = self.products == "tf32"
        cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision = self.convolutions, self.recurrent
        matmul.fp32_precision = self.products


def _switches() -> tuple[Any, Any]:
    return torch.backends.cudnn, torch.backends.cuda.matmul


def gpu(*, tf32: bool) -> torch.device:
    """Return the GPU, on which convolutions, LSTMs and products then come out the same in every run.

    Parameters
    ----------
    tf32 : bool
        Whether they may round float32 to TF32, a significand of 10 bits in place of 23. PyTorch by itself does so in
        convolutions and LSTMs.
    """
    os.environ.setdefault(*WORKSPACE)  # read when cuBLAS is first used
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False  # a stopwatch would choose between algorithms
    Precision(*["tf32" if tf32 else "ieee"] * 3).take()
    return torch.device("cuda")


@contextmanager
def gpu_as_it_was() -> Iterator[None]:
    """Give PyTorch's settings of a GPU back as they were found: how a GPU computes is for a run alone."""
    cudnn = torch.backends.cudnn
    deterministic, benchmark = cudnn.deterministic, cudnn.benchmark
    precision, workspace = Precision.now(), os.environ.get(WORKSPACE[0])
    try:
        yield
    finally:
        cudnn.deterministic, cudnn.benchmark = deterministic, benchmark
        precision.take()
        if workspace is None:
            os.environ.pop(WORKSPACE[0], None)
