"""The run directory: what a run leaves behind, written as it goes, and what a killed run is resumed from.

``metrics.jsonl`` grows line by line; every other file is replaced atomically, so that a run that is killed at any
point leaves a readable directory.

``checkpoint/NNNNNNNN/`` holds ``state.json``, one ``.npy`` per array and ``checksums.json``. It is written under
another name, flushed to the disk and renamed; only then the one before is removed. So a kill at any moment leaves the
old one or the new one, and the folder takes twice a checkpoint's size while one is written.
"""

import json
import logging
import math
import os
import platform
import shutil
import weakref
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from io import BytesIO
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import safetensors.torch
import tomli_w
from torch import Tensor

from fedapp.config import ConfigError, RunConfig, read_run
from fedapp.config.strategy_keys import strategy_class
from fedapp.data import Partition
from fedapp.data.facts.preparation import PREPARATION, Preparation
from fedapp.data.moments import Moments
from fedapp.report.files import read_summary, replacing, write_summary
from fedapp.server.run_folder import lock, make_folder
from strategies import AsyncSpectral, FedBuff
from strategies.methods.shared.buffer_schedule import HORIZON

STATE, CHECKSUMS = "state.json", "checksums.json"

# The model that the run leaves; beside the best one, the one of the last evaluation.
MODEL, LAST_MODEL = "model.safetensors", "model-last.safetensors"

# Bytes that are read at a time: a matrix that is larger than the memory is never all in it.
BLOCK = 1 << 24


@dataclass(frozen=True)
class Checkpoint:
    """The states of a strategy (``strategies.core.strategy.FederatedStrategy.state``) and of the run's observers."""

    strategy: dict[str, Any]
    observers: dict[str, Any]


def write_checkpoint(folder: Path, checkpoint: Checkpoint) -> None:
    """Replace the checkpoint in ``folder``; the old one stays if an OSError is raised."""
    temporary = folder / ".new"
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        arrays = {key: value for key, value in checkpoint.strategy.items() if isinstance(value, np.ndarray)}
        rest = {key: value for key, value in checkpoint.strategy.items() if key not in arrays}
        for key, array in arrays.items():
            with (temporary / f"{key}.npy").open("wb") as file:
                np.save(file, array, allow_pickle=False)
                os.fsync(file.fileno())
        _write_json(temporary / STATE, {"strategy": rest, "observers": checkpoint.observers})
        _write_json(temporary / CHECKSUMS, {path.name: _checksum(path) for path in temporary.iterdir()})
        _flush(temporary)
        newest = max(_complete(folder), default=0) + 1
        os.replace(temporary, folder / f"{newest:08d}")
        _flush(folder)
    except OSError:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    for number in _complete(folder):
        if number < newest:
            shutil.rmtree(folder / f"{number:08d}", ignore_errors=True)


def read_checkpoint(folder: Path) -> Checkpoint | None:
    """Read the newest checkpoint, its arrays memory-mapped; None if there is none.

    Raises
    ------
    OSError, ValueError
        If the checkpoint can't be read, or has changed since it was written.
    """
    numbers = _complete(folder)
    if not numbers:
        return None
    path = folder / f"{max(numbers):08d}"
    checksums = json.loads((path / CHECKSUMS).read_bytes())
    there = {each.name for each in path.iterdir()} - {CHECKSUMS}
    if unlike := {STATE, *there} ^ checksums.keys():
        raise ValueError(f"{CHECKSUMS} names other files than are there: {', '.join(sorted(unlike))}")
    for name, checksum in checksums.items():
        if _checksum(path / name) != checksum:
            raise ValueError(f"{name} isn't what was written")
    content = json.loads((path / STATE).read_bytes())
    arrays = {
        name.removesuffix(".npy"): _read_array(path / name) for name in checksums if name.endswith(".npy")
    }
    return Checkpoint(content["strategy"] | arrays, content["observers"])


def _complete(folder: Path) -> list[int]:
    """Return the numbers of the checkpoints in a folder: one, or two after a kill between rename and removal."""
    return [int(path.name) for path in folder.glob("[0-9]*")]


def _read_array(path: Path) -> np.ndarray:
    array: np.ndarray = np.load(path, mmap_mode="r", allow_pickle=False)
    return array


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    with path.open("w", encoding="utf-8") as file:
        json.dump(content, file)
        file.flush()
        os.fsync(file.fileno())


def _checksum(path: Path) -> int:
    checksum = 0
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            checksum = zlib.crc32(block, checksum)
    return checksum


def _flush(folder: Path) -> None:
    """Make the names in a folder last."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


log = logging.getLogger("flwr.fedapp")

PARTITION = "partition.npz"

PACKAGES = ("fedapp", "flwr", "torch", "numpy", "ray")


# Bytes of arrays from which on they aren't compressed, at 20 MB a second: the row numbers of a million clients.
LARGE = 64 << 20


class RunDirectory:
    """A run's folder, ``RESULTS-DIR/RUN-NAME``.

    Parameters
    ----------
    config : RunConfig
        Names the folder; with no ``run-name`` it is ``STRATEGY-DATASET-MODEL-NNN``, the first that is free. With
        ``resume``, the folder is that of the earlier run.

    Attributes
    ----------
    checkpoint : Checkpoint, optional
        What to resume from.

    Raises
    ------
    ConfigError
        If the run's name is taken, the folder can't be made, or there is nothing to resume in it.
    StillGoingOnError
        If another process makes the run that is to be resumed.
    """

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.path = Path(config.resume) if config.resume else make_folder(config)
        # Held until the process ends, however it does: no run is resumed while it is still going on.
        self._unlock = weakref.finalize(self, os.close, lock(self.path))
        self.checkpoint: Checkpoint | None = self._read_checkpoint() if config.resume else None

    def close(self) -> None:
        """Let others resume the run."""
        self._unlock()

    def write_config(self, num_clients: int) -> None:
        """Write config.toml: every key, the number of clients, and the versions of what computed the run."""
        versions = {"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}}
        content = {**self.config.flat(), "resume": "", "num-clients": num_clients, "versions": versions}
        self._replace("config.toml", tomli_w.dumps(content).encode())

    def write_preparation(self, preparation: Preparation) -> None:
        """Write preparation.json: how the model's inputs are prepared, and what its outputs are."""
        self._replace(PREPARATION, preparation.to_json().encode())

    def read_moments(self) -> Moments:
        """Return the mean and deviation in preparation.json.

        Raises
        ------
        ConfigError
            If there is no such file, or it has another form.
        """
        path = self.path / PREPARATION
        try:
            content = json.loads(path.read_bytes())
            return Moments(*(tuple(map(float, content[key])) for key in ("mean", "deviation")))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"resume = {self.config.resume!r}: {path} can't be read ({error})") from None

    def write_partition(
        self,
        partition: Partition,
        labels: np.ndarray,
        num_classes: int,
        client_names: Sequence[str] = (),
        class_names: Sequence[str] = (),
        test_client_names: Sequence[str] = (),
    ) -> None:
        """Write partition.npz: row numbers into the dataset, and how many examples of each class a client has.

        Names of clients (C,), of classes (K,) and of unseen clients (T,) are in it where there are any.
        """
        names = {
            "client_names": client_names,
            "class_names": class_names,
            "test_client_names": test_client_names,
        }
        named = {key: np.array(each, str) for key, each in names.items() if each}
        self._write_arrays(PARTITION, {**_division(partition, labels, num_classes), **named})

    def has_partition(self, partition: Partition, labels: np.ndarray, num_classes: int) -> bool:
        """Tell whether partition.npz holds the same rows and classes, or doesn't exist.

        Raises
        ------
        ConfigError
            If partition.npz can't be read.
        """
        path = self.path / PARTITION
        if not path.is_file():
            return True
        try:
            with np.load(path) as written:
                found = _division(partition, labels, num_classes)
                return all(np.array_equal(written[name], array) for name, array in found.items())
        except (OSError, ValueError, KeyError, BadZipFile) as error:
            raise ConfigError(f"resume = {self.config.resume!r}: {path} can't be read ({error})") from None

    def write_graph(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Write graph.npz: directions (``messages``), misalignment, adjacency, eigenvalues, and clients' indices."""
        self._write_arrays("graph.npz", arrays)

    def write_model(self, state: Mapping[str, Tensor], name: str = MODEL) -> None:
        """Write a model, model.safetensors by default, by state-dict name."""
        self._replace(name, safetensors.torch.save(dict(state)))

    def append_metrics(self, record: Mapping[str, Any]) -> None:
        """Add one evaluation to metrics.jsonl and flush it; numbers that aren't finite become null."""
        line = json.dumps({key: _finite(value) for key, value in record.items()}, allow_nan=False)
        path = self.path / "metrics.jsonl"
        path.touch()
        size = path.stat().st_size
        try:
            with path.open("a", encoding="utf-8") as file:
                file.write(line + "\n")
        except OSError:
            os.truncate(path, size)  # no torn line on a full disk
            raise

    def metrics_size(self) -> int:
        """Return the bytes of metrics.jsonl, now on the disk to stay."""
        with (self.path / "metrics.jsonl").open("ab") as file:
            os.fsync(file.fileno())
            return file.tell()

    def cut_metrics(self, size: int) -> None:
        """Cut metrics.jsonl to ``size`` bytes: a resumed run writes the later lines anew.

        Raises
        ------
        ConfigError
            If metrics.jsonl has fewer bytes.
        """
        path = self.path / "metrics.jsonl"
        path.touch()
        if path.stat().st_size < size:
            raise ConfigError(f"resume = {str(self.path)!r}: {path} has lost lines since the checkpoint")
        os.truncate(path, size)

    def write_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Write checkpoint/; where that fails, the last one stays, a warning is logged and the run goes on."""
        try:
            write_checkpoint(self.path / "checkpoint", checkpoint)
        except OSError as error:
            number = checkpoint.strategy["aggregations"]
            log.warning("no checkpoint of aggregation %d, the last one stays: %s", number, error)

    def _read_checkpoint(self) -> Checkpoint | None:
        earlier = RunConfig.recorded(read_run(str(self.path))[0])
        finished = self._check_goes_on(earlier)
        try:
            checkpoint = read_checkpoint(self.path / "checkpoint")
        except (OSError, ValueError, KeyError) as error:
            raise self._refused(f"its checkpoint can't be read ({error})") from None
        if checkpoint is None and earlier.checkpoint_every == 0:
            raise self._refused("that run was made with checkpoint-every = 0")
        if checkpoint is None and finished:  # the disk was full
            raise self._refused(
                "that run is finished, and has no checkpoint to go on from; a new run: "
                f"-c {self.path / 'config.toml'}, with what is another"
            )
        if checkpoint is None:
            log.warning("%s has no checkpoint yet: the run starts over", self.path)
        elif self.config.num_server_rounds != earlier.num_server_rounds and _weighs_by_length(earlier):
            log.warning(
                "num-server-rounds = %d (was %d): time-based weights of %s are those of all aggregations, from here "
                "on of more; a new run of that number differs from this one",
                self.config.num_server_rounds,
                earlier.num_server_rounds,
                earlier.strategy,
            )
        return checkpoint

    def _check_goes_on(self, earlier: RunConfig) -> bool:
        """Return whether the run is finished; refuse to go on with it under the conditions that ended it."""

        def differ(*keys: str) -> bool:
            return any(getattr(earlier, key) != getattr(self.config, key) for key in keys)

        summary = read_summary(self.path)
        finished, reason = summary.get("status") == "finished", summary.get("reason")
        if finished and reason and not differ("stop_at", "patience"):
            raise self._refused(
                f"that run is finished, {reason}; it goes on if stop-at or patience is another"
            )
        if finished and not reason and not differ("num_server_rounds", "time_budget"):
            raise self._refused(
                "that run is finished; it goes on if num-server-rounds or time-budget is raised, "
                f"from {earlier.num_server_rounds} and {earlier.time_budget:g}"
            )
        return finished

    def _refused(self, reason: str) -> ConfigError:
        return ConfigError(f"resume = {str(self.path)!r}: {reason}")

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write summary.json."""
        write_summary(self.path, {key: _finite(value) for key, value in summary.items()})

    def _write_arrays(self, name: str, arrays: Mapping[str, np.ndarray]) -> None:
        buffer, large = BytesIO(), sum(array.nbytes for array in arrays.values()) > LARGE
        write = np.savez if large else np.savez_compressed
        write(buffer, **({key: _narrow(array) for key, array in arrays.items()} if large else arrays))  # type: ignore[arg-type]
        self._replace(name, buffer.getvalue())

    def _replace(self, name: str, content: bytes) -> None:
        with replacing(self.path / name) as new:
            new.write_bytes(content)


def _division(partition: Partition, labels: np.ndarray, num_classes: int) -> dict[str, np.ndarray]:
    """Return the arrays of partition.npz."""
    names = ("client_indices", "client_offsets", "test_indices", "test_offsets")
    owners = np.repeat(np.arange(len(partition.sizes)), partition.sizes)
    counts = np.zeros((len(partition.sizes), num_classes), np.int64)
    np.add.at(counts, (owners, np.asarray(labels)[partition.client_indices].astype(np.int64)), 1)
    return {**{name: getattr(partition, name) for name in names}, "class_counts": counts}


def _narrow(array: np.ndarray) -> np.ndarray:
    """Return whole numbers in four bytes each, if they are such."""
    fits = array.dtype == np.int64 and (not array.size or np.abs(array).max() < 1 << 31)
    return array.astype(np.int32) if fits else array


def _weighs_by_length(config: RunConfig) -> bool:
    """Tell whether a run's weights are played through beforehand, for as many aggregations as it may have."""
    strategy = strategy_class(config.strategy)
    return (
        getattr(strategy, "contribution_periods", None)
        in (FedBuff.contribution_periods, AsyncSpectral.contribution_periods)
        and config.clock != "wall"
        and config.aggregation_weights == "time-based"
        and not config.concurrency
        and config.num_server_rounds < HORIZON
    )


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _version(package: str) -> str:
    try:
        return version(package)
    except ModuleNotFoundError:
        return "not installed"
