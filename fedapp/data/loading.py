"""Datasets by name: find the source, read it once, open it from the cache ever after.

The cache holds plain `.npy` files that every process maps into memory. A folder of it holds x.npy, y.npy, groups.npy
(where there are groups) and meta.json. It is written under a temporary name beside its final one and renamed, so that
a reader sees all of it or nothing, and of two processes that prepare the same dataset at once the slower one removes
its own copy.
"""

import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from stat import S_ISDIR, S_ISREG
from typing import Any

import numpy as np

from fedapp.cache import default_cache_dir
from fedapp.data.dataset import PUBLISHED, DataColumns, Dataset, RawData, Targets
from fedapp.data.errors import PREFIX, DataError, expanded, one_line, path_error
from fedapp.data.synthetic import ALLOWED, CLIENTS, is_unlike, unlike_data
from fedapp.data.targets import as_numbers
from fedapp.names import Part

DATASETS = (
    "digits",
    "synthetic",
    "synthetic-iid",
    "mnist",
    "cifar10",
    "cifar100",
    "femnist",
    "femnist-digits",
    "shakespeare",
    "npz",
    "files",
)
"""Values of the run-config key `dataset`, beside hf:… and module:function."""

GENERATED = ("synthetic", "synthetic-iid")

FORMS = f"{ALLOWED}, hf:NAME or hf:PATH of Hugging Face data, or module:function of your own"
"""What else `dataset` may be."""

ANY_COLUMNS = DataColumns()
"""The columns of a run whose config names none."""

FUNCTION = r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*"
"""What module:function looks like."""

# Raise the number when a reader of a user's own files changes what it makes of a file: it is in the cache keys of
# such files alone, which are then read again.
_OWN_READERS = {"readers": 9}

_SYNTHETIC_CLIENTS = 20  # Dhasade et al., §3.1
_RAW_FOLDERS = {"mnist": "MNIST/raw", "cifar10": "cifar-10-batches-py", "cifar100": "cifar-100-python"}


def is_generated(name: str) -> bool:
    """Tell whether a value of `dataset` names data that are made from the seed, for as many clients as there are."""
    return name in GENERATED if name in DATASETS else is_unlike(name)


def is_function(name: str) -> bool:
    """Tell whether a value of `dataset` is module:function."""
    return not name.startswith(PREFIX) and re.fullmatch(FUNCTION, name) is not None


def reads_files(name: str) -> bool:
    """Tell whether data are the user's own files or Hugging Face's: not known ones, generated or a function's."""
    return name in ("npz", "files") or name.startswith(PREFIX)


def folder_of(name: str) -> Path | None:
    """Return the folder that hf:PATH names, None for a name on the hub: a path begins with /, ~ or a dot."""
    place = name.removeprefix(PREFIX)
    return expanded(place) if place.startswith(("/", "~", ".")) else None


@dataclass(frozen=True)
class _Source:
    """`key`: what the prepared arrays depend on; `read`: how to make them."""

    key: dict[str, Any]
    read: Callable[[], RawData]


def load_dataset(
    name: str,
    data_path: str = "",
    *,
    num_clients: int = 0,
    seed: int = 0,
    cache_dir: Path | None = None,
    targets: Targets | None = None,
    columns: DataColumns = ANY_COLUMNS,
) -> Dataset:
    """Open a dataset, after preparing it in the cache on the first use.

    Parameters
    ----------
    name : str
        One of `DATASETS`; synthetic:A,B; hf:NAME, hf:NAME:CONFIG or hf:PATH; or module:function.
    data_path : str
        Where the data is; "" downloads from the Hugging Face hub, except for digits (in scikit-learn),
        synthetic (generated), and npz and files (need a path).

        - mnist, cifar10, cifar100, femnist, femnist-digits: an npz file with uint8 images (see
          `fedapp.data.npz`), or a folder with NAME.npz (femnist.npz for both femnists), or that above
          torchvision's raw files: MNIST/raw, cifar-10-batches-py, cifar-100-python; of femnist LEAF's JSON (see
          `fedapp.data.readers.leaf_files`).
        - shakespeare: a file or folder (see `fedapp.data.shakespeare.find_files`).
        - synthetic: the authors' folder with train.json and test.json.
        - synthetic:A,B and synthetic-iid: no path is allowed, they are generated (see `fedapp.data.synthetic`).
        - npz: a file (see `fedapp.data.npz`).
        - files: a file or folder in a common format (see `fedapp.data.own_files`).
        - hf:NAME: a local copy of it, read in its place (see `fedapp.data.hugging_face`).
        - module:function: given to the function (see `fedapp.data.given.function`).
    num_clients : int
        Natural clients of a generated synthetic problem, 0 for as many as in its paper (20, of synthetic:A,B 30);
        given to a function that takes it.
    seed : int
        Seed of a generated synthetic problem; given to a function that takes it.
    cache_dir : Path, optional
        Default: $FEDAPP_CACHE, else fedapp in the user's cache folder.
    targets : {"classes", "numbers"}, optional
        What rows' targets must be; None: whole numbers in one column, and names, are classes, all else is numbers.
    columns : DataColumns
        Of tables, Hugging Face data, and the group of a folder of images; other datasets have none.

    Raises
    ------
    DataError
        If the data isn't there, isn't what it should be, can't be downloaded, or the cache can't be written.
    """
    source = _find_source(name, data_path, num_clients, seed, columns, targets)
    key = source.key | ({"targets": targets} if targets else {})
    read = partial(_as_numbers, source, name) if targets == "numbers" else source.read
    return cached_dataset(name, key, read, cache_dir)


def state_of(
    name: str, data_path: str, *, num_clients: int, seed: int, targets: Targets | None, columns: DataColumns
) -> str:
    """Return a digest of what a dataset is made of, such as its files' sizes and times, which aren't read for it.

    The arguments are those of `load_dataset`.

    Raises
    ------
    DataError
        If the data isn't there.
    """
    key = _find_source(name, data_path, num_clients, seed, columns, targets).key
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]


def _find_source(
    name: str, data_path: str, num_clients: int, seed: int, columns: DataColumns, targets: Targets | None
) -> _Source:
    if name.startswith(PREFIX):
        return _hugging_face(name, data_path, columns, targets)
    if name == "digits":
        return _digits(data_path)
    if is_unlike(name):
        return _unlike(name, data_path, num_clients, seed)
    if name not in DATASETS:
        return _function(name, data_path, num_clients, seed, columns, targets)
    if name == "synthetic" and not data_path:
        return _generated(num_clients, seed)
    if not data_path:
        return _hub(name)
    path = expanded(data_path)
    if not path.exists():
        raise path_error(data_path, f"no such file or folder; '{name}' is to be read from there")
    if name == "shakespeare":
        return _shakespeare(path)
    if name == "synthetic":
        return _synthetic_files(path)
    if name in ("npz", "files"):
        return _own_files(name, path, columns, targets)
    return _arrays(name, path)


def _as_numbers(source: _Source, name: str) -> RawData:
    return as_numbers(source.read(), name)


def _digits(data_path: str) -> _Source:
    from fedapp.data.readers import digits_data

    if data_path:
        raise path_error(data_path, "'digits' comes with scikit-learn; only an empty data-path is allowed")
    return _Source({"scikit-learn": version("scikit-learn")}, digits_data)


def _generated(num_clients: int, seed: int) -> _Source:
    from fedapp.data.readers import synthetic_data

    key = {"num_clients": num_clients or _SYNTHETIC_CLIENTS, "seed": seed}
    return _Source(key, partial(synthetic_data, **key))


def _unlike(name: str, data_path: str, num_clients: int, seed: int) -> _Source:
    if data_path:
        raise path_error(data_path, f"{name!r} is generated; only an empty data-path is allowed")
    key = {"num_clients": num_clients or CLIENTS, "seed": seed}
    return _Source(key, partial(unlike_data, name, **key))


def _hub(name: str) -> _Source:
    from fedapp.data.hub import HUB_SOURCES, hub_data
    from fedapp.data.own_files import FORMATS

    if name == "npz":
        raise path_error("", "'npz' needs the path of an npz file with x_train and y_train")
    if name == "files":
        raise path_error("", f"'files' needs a path: {FORMATS}")
    source = HUB_SOURCES[name]
    return _Source({"hub": asdict(source)}, partial(hub_data, name, source))


def _shakespeare(path: Path) -> _Source:
    from fedapp.data.shakespeare import find_files, shakespeare_data

    files = find_files(path)
    return _Source(_files_key(files.train + files.test), partial(shakespeare_data, files))


def _synthetic_files(path: Path) -> _Source:
    from fedapp.data.readers import synthetic_files_data

    files = [path / "train.json", path / "test.json"]
    if not all(file.is_file() for file in files):
        raise path_error(path, "a folder with train.json and test.json is needed for 'synthetic'")
    return _Source(_files_key(files), partial(synthetic_files_data, path))


def _arrays(name: str, path: Path) -> _Source:
    from fedapp.data.readers import leaf_files, leaf_images_data, named_npz_data, torchvision_data

    is_femnist = name.startswith("femnist")
    if path.is_file() and not (is_femnist and path.suffix.lower() == ".json"):
        return _Source(_files_key([path]), partial(named_npz_data, name, path))
    file = path / f"{name.removesuffix('-digits')}.npz"
    if file.is_file():
        return _Source(_files_key([file]), partial(named_npz_data, name, file))
    if is_femnist and (files := leaf_files(path)).train:
        return _Source(_files_key([*files.train, *files.test]), partial(leaf_images_data, name, files))
    raw = _RAW_FOLDERS.get(name)
    if raw and (path / raw).is_dir():
        return _Source(_files_key(sorted((path / raw).iterdir())), partial(torchvision_data, name, path))
    other = f"torchvision's {raw}" if raw else "LEAF's *train*.json"
    allowed = f"{file.name} or {other}"
    raise path_error(path, f"holds no '{name}'; allowed: a folder with {allowed}, or an npz file")


def _own_files(name: str, path: Path, columns: DataColumns, targets: Targets | None) -> _Source:
    from fedapp.data.npz import npz_data
    from fedapp.data.own_files import files_of, own_data

    if name == "npz":
        return _Source(_files_key([path]), partial(npz_data, path, targets))
    key = _files_key(files_of(path)) | _columns_key(columns) | _OWN_READERS
    return _Source(key, partial(own_data, path, columns, targets))


def _hugging_face(name: str, data_path: str, columns: DataColumns, targets: Targets | None) -> _Source:
    from fedapp.data.hugging_face import load_hugging_face

    folder = expanded(data_path) if data_path else folder_of(name)
    if name == PREFIX and folder is None:
        raise DataError(f"dataset = {name!r}: must be {FORMS}")
    if folder is not None and not folder.is_dir():
        where = f"data-path = {data_path!r}" if data_path else f"dataset = {name!r}"
        raise DataError(f"{where}: no such folder; Hugging Face data are to be read from there")
    place = name.removeprefix(PREFIX).partition(":")[0]
    # `datasets` would read the folder in place of the dataset of this name on the hub.
    if folder is None and Path(place).is_dir():
        raise DataError(
            f"dataset = {name!r}: there is a folder {place!r} here; {PREFIX}./{place} names it, and the hub's of "
            "this name can be had in another working directory"
        )
    key = {} if folder is None else _files_key(sorted(file for file in folder.rglob("*") if file.is_file()))
    read = partial(load_hugging_face, name, folder, columns, targets)
    return _Source(key | _columns_key(columns) | _OWN_READERS, read)


def _function(
    name: str, data_path: str, num_clients: int, seed: int, columns: DataColumns, targets: Targets | None
) -> _Source:
    from fedapp.data.given.function import arguments_of, digest_of, function_data, load_function

    if not is_function(name):
        raise DataError(f"dataset = {name!r}: unknown; allowed: {', '.join(DATASETS)}, {FORMS}")
    path = str(expanded(data_path).absolute()) if data_path else ""
    if path and not Path(path).exists():
        raise path_error(data_path, f"no such file or folder; {name} is to be given it")
    function = load_function(name)
    arguments = arguments_of(function, name, num_clients, seed, path)
    files = [path for path in (Path(path), *sorted(Path(path).rglob("*"))) if path.exists()] if path else []
    key = _files_key(files) | _columns_key(columns) | arguments | _OWN_READERS
    key |= {"source": digest_of(function, name)}
    return _Source(key, partial(function_data, function, name, arguments, columns, targets))


def _columns_key(columns: DataColumns) -> dict[str, Any]:
    return {} if columns == ANY_COLUMNS else {"columns": asdict(columns)}


def _files_key(files: list[Path]) -> dict[str, Any]:
    stats = []
    for file in files:
        try:
            stats.append((file.resolve(), file.stat()))
        except (OSError, RuntimeError) as error:  # such as a link to nothing, or in a circle
            raise path_error(file, f"can't be read ({type(error).__name__})") from None
    for path, stat in stats:
        if not (S_ISREG(stat.st_mode) or S_ISDIR(stat.st_mode)):  # a pipe would be read for ever
            raise path_error(path, "is no file or folder")
    return {"files": [[str(path), stat.st_size, stat.st_mtime_ns] for path, stat in stats]}


FORMAT_VERSION = 8
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
        facts = {key: meta[key] for key in ("num_train", "num_classes", "kind", "scale", "targets", "digest")}
        facts |= {key: tuple(meta[key]) for key in ("classes", "columns", "remarks")}
        facts["parts"] = tuple(map(Part.read, meta["parts"]))
        facts["group_names"] = tuple(meta["group_names"])
        facts["made_by"] = meta["made_by"]
        facts["encoded"] = tuple((name, tuple(texts)) for name, texts in meta["encoded"])
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
    arrays = {"x": x, "y": np.ascontiguousarray(raw.y, np.float32 if is_numbers else np.int64)}
    if raw.groups is not None:
        arrays["groups"] = np.ascontiguousarray(raw.groups, np.int64)
    meta = {
        "shape": shape,
        "has_groups": raw.groups is not None,
        "num_train": raw.num_train,
        "num_classes": raw.num_classes,
        "kind": raw.kind,
        "scale": raw.scale,
        "classes": raw.classes,
        "columns": raw.columns,
        "parts": list(map(str, raw.parts)),
        "remarks": raw.remarks,
        "targets": "numbers" if is_numbers else "classes",
    }
    digest = hashlib.sha256(json.dumps(meta).encode())
    for name, array in arrays.items():
        digest.update(array.data)
        if name != "x":  # x was written through its memory map
            np.save(folder / f"{name}.npy", array)
    meta["digest"] = digest.hexdigest()[:16]
    # Not in the digest: what a run computes doesn't depend on these names.
    meta |= {"group_names": raw.group_names, "encoded": raw.encoded, "made_by": raw.made_by}
    (folder / "meta.json").write_text(json.dumps(meta), "utf-8")
