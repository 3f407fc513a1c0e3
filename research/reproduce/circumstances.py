"""When, with what and where something was computed: kept with the results, and printed from there."""

import os
import platform
from collections.abc import Mapping
from datetime import date
from functools import cache
from importlib.metadata import version
from pathlib import Path

from fedapp.server.run_directory import PACKAGES


def circumstances() -> dict[str, object]:
    """Return today's ``date``, the ``versions`` by package, and the ``machine``."""
    return {"date": date.today().isoformat(), "versions": versions(), "machine": machine()}


def versions() -> dict[str, str]:
    """Return the versions of Python and of what computes the results, as config.toml has them."""
    return {"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}}


def versions_text(of: Mapping[str, str]) -> str:
    """Write versions in one line."""
    return ", ".join(f"{name.replace('python', 'Python')} {number}" for name, number in of.items())


@cache
def machine() -> str:
    """Return the processor, its cores and the GPU, in words."""
    import torch

    gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "no GPU"
    return f"{_processor()}, {os.cpu_count()} cores, {gpu}"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.machine()


def _version(package: str) -> str:
    try:
        return version(package)
    except ModuleNotFoundError:
        return "not installed"
