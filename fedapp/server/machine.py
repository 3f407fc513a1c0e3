"""The machine that computes: kept with what comes of it."""

import os
import platform
from pathlib import Path

import torch


def machine() -> str:
    """Return the processor, its cores and the GPU, in words.

    A GPU that this process hasn't used, but maybe its clients' have, isn't named: to ask it for its name takes a part
    of its memory.
    """
    return f"{_processor()}, {os.cpu_count()} cores, {_gpu()}"


def _gpu() -> str:
    if not torch.cuda.is_available():
        return "no GPU"
    used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return torch.cuda.get_device_name(0) if used else "a GPU"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.machine()
