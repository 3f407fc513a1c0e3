"""Datasets prepared once, as plain `.npy` files that every process maps into memory.

A cache folder holds x.npy, y.npy, groups.npy (where there are groups) and meta.json. It is written under a
temporary name beside its final one and renamed, so that a reader sees all of it or nothing, and of two
processes that prepare the same dataset at once the slower one throws its own copy away.
"""

import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fedapp.data.dataset import PUBLISHED, Dataset, RawData
from fedapp.data.errors import DataError, one_line
from fedapp.data.places import default_cache_dir

FORMAT_VERSION = 4
"""Raise when the layout of a cache folder, or what a reader makes of a source, changes."""

_ATTEMPTS = 3


def cached_dataset(
    name: str, key: Mapping[str, Any], read: Callable[[], RawData], cache_dir: Path | None = None
) -> Dataset:
    """Open a dataset from the cache, after preparing it there if it is missing or damaged.

    Parameters
    ----------
    name : str
        Name of the dataset.
    key : mapping
        All that the prepared arrays depend on (source files with size and time, seed, …), as JSON values.
    read : callable
        Returns the raw data; only called where there is no usable cache folder.
    cache_dir : Path, optional
        Default: `default_cache_dir`.

    Raises
    ------
    DataError
        If `read` raises it, or if the cache folder can't be written.
    """
    root = cache_dir or default_cache_dir()
    text = json.dumps({"format": FORMAT_VERSION, "name": name, **key}, sort_keys=True)
    folder = root / f"{_file_name(name)}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    for _ in range(_ATTEMPTS):  # another process may replace a damaged folder between our two steps
        dataset = _open(name, folder)
        if dataset is not None:
            return dataset
        raw = read()
        try:
            root.mkdir(parents=True, exist_ok=True)
            _write(raw, folder)
        except OSError as error:
            raise DataError(
                f"FEDAPP_CACHE = {str(root)!r}: the dataset can't be prepared there ({one_line(error)}); "
                "a writable folder with enough space is needed"
            ) from error
    raise DataError(f"FEDAPP_CACHE = {str(root)!r}: {folder.name} can't be read back; remove that folder")


def _file_name(name: str) -> str:
    """Return the name of a dataset, which may be a path, as it may stand in a folder's name."""
    return re.sub(r"[^\w.-]+", "-", name)[-60:].lstrip(".-")


def _open(name: str, folder: Path) -> Dataset | None:
    """Return the prepared dataset, or None where it is missing or damaged."""
    try:
        meta = json.loads((folder / "meta.json").read_text("utf-8"))
        x, y = (np.load(folder / f"{part}.npy", mmap_mode="r") for part in ("x", "y"))
        groups = np.load(folder / "groups.npy", mmap_mode="r") if meta["has_groups"] else None
        whole = (
            list(x.shape) == meta["shape"] and len(y) == len(x) and (groups is None or len(groups) == len(x))
        )
        facts = {key: meta[key] for key in ("num_train", "num_classes", "kind", "scale", "targets")}
        facts |= {key: tuple(meta[key]) for key in ("classes", "columns")}
    except (OSError, ValueError, KeyError, TypeError, EOFError):
        return None
    published = PUBLISHED.get(name)
    mean, std = (published.mean, published.std) if published else ((), ())
    return Dataset(name=name, x=x, y=y, groups=groups, mean=mean, std=std, **facts) if whole else None


def _write(raw: RawData, folder: Path) -> None:
    """Write the arrays beside `folder` and rename; leave a usable folder of another process alone."""
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        fresh = temporary / "fresh"
        fresh.mkdir()
        _write_arrays(raw, fresh)
        if folder.exists() and _open("", folder) is None:
            os.rename(folder, temporary / "damaged")
        os.rename(fresh, folder)
    except OSError:
        if _open("", folder) is None:
            raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _write_arrays(raw: RawData, folder: Path) -> None:
    shape = (sum(len(block) for block in raw.blocks), *raw.blocks[0].shape[1:])
    dtype = np.uint8 if raw.blocks[0].dtype == np.uint8 else np.float32
    x = np.lib.format.open_memmap(folder / "x.npy", mode="w+", dtype=dtype, shape=shape)
    start = 0
    for block in raw.blocks:
        x[start : start + len(block)] = block
        start += len(block)
    x.flush()
    is_numbers = raw.y.dtype.kind == "f"
    np.save(folder / "y.npy", np.asarray(raw.y, np.float32 if is_numbers else np.int64))
    if raw.groups is not None:
        np.save(folder / "groups.npy", np.asarray(raw.groups, np.int64))
    meta = {
        "shape": shape,
        "has_groups": raw.groups is not None,
        "num_train": raw.num_train,
        "num_classes": raw.num_classes,
        "kind": raw.kind,
        "scale": raw.scale,
        "classes": raw.classes,
        "columns": raw.columns,
        "targets": "numbers" if is_numbers else "classes",
    }
    (folder / "meta.json").write_text(json.dumps(meta), "utf-8")
