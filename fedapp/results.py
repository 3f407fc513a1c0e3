"""The run directory: what a run leaves behind, written as it goes.

``metrics.jsonl`` grows line by line; every other file is replaced atomically, so that a run that is killed at any
point leaves a readable directory.
"""

import itertools
import json
import math
import os
import platform
from collections.abc import Callable, Mapping
from importlib.metadata import version
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import tomli_w
from torch import Tensor

from fedapp.config import ConfigError, RunConfig
from fedapp.data import Partition

PACKAGES = ("fedapp", "flwr", "torch", "numpy", "ray")


class RunDirectory:
    """A run's folder, ``RESULTS-DIR/RUN-NAME``.

    Parameters
    ----------
    config : RunConfig
        Names the folder; with no ``run-name`` it is ``STRATEGY-DATASET-MODEL-NNN``, the first that is free.

    Raises
    ------
    ConfigError
        If the run's name is taken, or the folder can't be made.
    """

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.path = _make_folder(config)

    def write_config(self, num_clients: int) -> None:
        """Write config.toml: every key, the number of clients, and the versions of what computed the run."""
        versions = {"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}}
        content = {**self.config.flat(), "num-clients": num_clients, "versions": versions}
        self._replace("config.toml", tomli_w.dumps(content).encode())

    def write_partition(self, partition: Partition) -> None:
        """Write partition.npz: row numbers into the dataset."""
        names = ("client_indices", "client_offsets", "test_indices", "test_offsets")
        self._write_arrays("partition.npz", {name: getattr(partition, name) for name in names})

    def write_graph(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Write graph.npz: messages, misalignment, adjacency, eigenvalues, and the clients they belong to."""
        self._write_arrays("graph.npz", arrays)

    def write_model(self, state: Mapping[str, Tensor]) -> None:
        """Write model.safetensors by state-dict name."""
        self._replace("model.safetensors", safetensors.torch.save(dict(state)))

    def append_metrics(self, record: Mapping[str, Any]) -> None:
        """Add one evaluation to metrics.jsonl and flush it; numbers that aren't finite become null."""
        line = json.dumps({key: _finite(value) for key, value in record.items()}, allow_nan=False)
        with (self.path / "metrics.jsonl").open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write summary.json."""
        content = {key: _finite(value) for key, value in summary.items()}
        self._replace("summary.json", (json.dumps(content, indent=2, allow_nan=False) + "\n").encode())

    def _write_arrays(self, name: str, arrays: Mapping[str, np.ndarray]) -> None:
        buffer = BytesIO()
        np.savez_compressed(buffer, **arrays)  # type: ignore[arg-type]
        self._replace(name, buffer.getvalue())

    def _replace(self, name: str, content: bytes) -> None:
        temporary = self.path / f".{name}.tmp"
        temporary.write_bytes(content)
        os.replace(temporary, self.path / name)


def _make_folder(config: RunConfig) -> Path:
    results = Path(config.results_dir).expanduser().absolute()
    try:
        results.mkdir(parents=True, exist_ok=True)
        if not config.run_name:
            stem = f"{config.strategy}-{config.dataset}-{config.model}"
            return _first_free(lambda number: results / f"{stem}-{number:03d}")
    except OSError as error:
        raise ConfigError(
            f"results-dir = {config.results_dir!r}: must be a folder that can be written to ({error})"
        ) from None
    path = results / config.run_name
    try:
        path.mkdir()
    except FileExistsError:
        raise ConfigError(
            f"run-name = {config.run_name!r}: {path} is there already, and its results are kept; "
            "choose another name"
        ) from None
    except OSError as error:
        raise ConfigError(f"run-name = {config.run_name!r}: can't be made a folder ({error})") from None
    return path


def _first_free(path_of: Callable[[int], Path]) -> Path:
    for number in itertools.count(1):
        try:
            path_of(number).mkdir()
        except FileExistsError:
            continue
        return path_of(number)
    raise AssertionError


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _version(package: str) -> str:
    try:
        return version(package)
    except ModuleNotFoundError:
        return "not installed"
