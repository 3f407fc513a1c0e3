"""What a killed run is resumed from: a folder of plain arrays and JSON, complete or not there at all.

``checkpoint/NNNNNNNN/`` holds ``state.json``, one ``.npy`` per array and ``checksums.json``. It is written under
another name, flushed to the disk and renamed; only then the one before is removed. So a kill at any moment leaves the
old one or the new one, and the folder takes twice a checkpoint's size while one is written.
"""

import json
import os
import shutil
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

STATE, CHECKSUMS = "state.json", "checksums.json"

# Bytes that are read at a time: a matrix that is larger than the memory is never all in it.
BLOCK = 1 << 24


@dataclass(frozen=True)
class Checkpoint:
    """A strategy's state (``strategies.core.strategy.FederatedStrategy.state``), and what those that watch the run
    add."""

    strategy: dict[str, Any]
    observers: dict[str, Any]


def write_checkpoint(folder: Path, checkpoint: Checkpoint) -> None:
    """Write a checkpoint in place of the one in ``folder``; on an OSError that one stays."""
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
        If it isn't as it was written.
    """
    numbers = _complete(folder)
    if not numbers:
        return None
    path = folder / f"{max(numbers):08d}"
    checksums = json.loads((path / CHECKSUMS).read_bytes())
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
