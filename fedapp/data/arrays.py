"""Arrays x_train, y_train and, optionally, x_test, y_test and natural ids, from wherever they come, as a dataset."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedapp.data.dataset import Array, IntArray, Kind, RawData, Split, Targets
from fedapp.data.parts import check_whole, joined
from fedapp.data.targets import Problem, number_of_classes, read_targets
from fedapp.sorting import natural_key

NAMES = ("x_train", "y_train", "x_test", "y_test", "group_train", "group_test", "writer_train", "writer_test")


def array_splits(arrays: Mapping[str, Any], targets: Targets | None, problem: Problem) -> list[Split]:
    """Check the training split and, where there is one, the test split.

    Inputs come back as uint8 or float32, axes as they are; labels as `read_targets` says, names as their ranks.

    Parameters
    ----------
    arrays : mapping of str to array
        x_train, y_train; x_test, y_test (both or neither); group_train, group_test or writer_train, writer_test
        (ids of natural clients, optional). Of several inputs x_train.NAME, or x_train.0, x_train.1, …
    targets : {"classes", "numbers"}, optional
    problem : callable
        Makes the error to raise from what is wrong.

    Raises
    ------
    DataError
        If the arrays don't fit together.
    """
    arrays, several = joined(arrays, problem)
    parts = _parts_of(arrays, problem)
    inputs = [_as_inputs(f"x_{part}", arrays[f"x_{part}"], problem) for part in parts]
    labels = {f"y_{part}": arrays[f"y_{part}"] for part in parts}
    for part, x in zip(parts, inputs, strict=True):
        _check_length(f"y_{part}", labels[f"y_{part}"], f"x_{part}", len(x), problem)
    classes: tuple[str, ...] = ()
    if targets != "numbers" and all(y.dtype.kind == "U" for y in labels.values()):
        labels, classes = _ranked(labels, problem)
    found_targets = read_targets(labels, targets, problem)
    groups = [_groups(arrays, part, len(x), problem) for part, x in zip(parts, inputs, strict=True)]
    _check_alike(inputs, groups, problem)
    ids, names = _numbered(groups)
    columns = zip(inputs, found_targets, ids, strict=True)
    return [Split(*each, classes, several, names) for each in columns]


def _parts_of(arrays: Mapping[str, Any], problem: Problem) -> list[str]:
    """Return the parts that there are, train and maybe test; DataError if one lacks its inputs or targets."""
    for key in ("x_train", "y_train"):
        if key not in arrays:
            found = ", ".join(sorted(arrays)) or "none"
            raise problem(f"has no array {key}; x_train and y_train are needed (found: {found})")
    if ("x_test" in arrays) != ("y_test" in arrays):
        missing = "y_test" if "x_test" in arrays else "x_test"
        raise problem(f"has no array {missing}; x_test and y_test are allowed only together")
    return ["train", "test"] if "x_test" in arrays else ["train"]


def _check_alike(inputs: list[Array], groups: list[Array | None], problem: Problem) -> None:
    """Refuse test rows of another shape or type than the training rows, and natural ids of one of them alone."""
    first, last = inputs[0], inputs[-1]
    if first.shape[1:] != last.shape[1:] or first.dtype != last.dtype:
        described = [f"rows of shape {x.shape[1:]} and type {x.dtype}" for x in (first, last)]
        raise problem(f"x_train has {described[0]}, x_test {described[1]}; they must match")
    if len({ids is None for ids in groups}) > 1:
        raise problem("natural ids are given for only one of train and test; give both or neither")


def array_data(splits: list[Split], problem: Problem) -> RawData:
    """Return data of one's own: uint8 inputs are scaled by 1/255, others are kept, as float32.

    (N, D) inputs are vectors; (N, C, H, W) are images, and so is (N, H, W, C) where the last axis, but not the
    second, has size 1 or 3. (N, H, W) of uint8 are images, of other types series of steps and features, (N, T, F).
    Labels are 0 … num_classes - 1, the largest one found, or have names.

    Raises
    ------
    DataError
        If inputs have another shape, or labels are no classes.
    """
    shape, parts = splits[0].x.shape, splits[0].parts
    if len(shape) not in (2, 3, 4):
        raise problem(
            f"x_train has shape {shape}; allowed: (N, D), (N, T, F), (N, H, W), (N, C, H, W), (N, H, W, C)"
        )
    y, groups, num_train = join_rows(splits)
    kind: Kind = "parts" if parts else "vector" if len(shape) == 2 else "image"
    if len(shape) == 3 and splits[0].x.dtype != np.uint8:
        kind = "series"
    remarks: list[str] = []
    if len(shape) == 4 and shape[3] < min(shape[1:3]) and not _channels_are_last(shape):
        remarks.append(
            "x_train has rows of shape {}, taken for {} channels of {}x{}; channels may be last where they are 1 or "
            "3".format(shape[1:], *shape[1:])
        )
    blocks = [channels_first(split.x) if kind == "image" else split.x for split in splits]
    scale = 1 / 255 if blocks[0].dtype == np.uint8 else 1.0
    classes = splits[0].classes
    count = len(classes) or number_of_classes(y, problem)
    names = splits[0].group_names
    return RawData(
        blocks, y, groups, num_train, count, kind, scale, classes, (), parts, tuple(remarks), names
    )


def join_rows(splits: list[Split]) -> tuple[Array, IntArray | None, int]:
    """Return labels (N,) or (N, M), natural ids (N,) or None, and the number of training rows of the splits."""
    y = np.concatenate([split.y for split in splits])
    y = y if y.dtype.kind == "f" else y.astype(np.int64)
    ids = [split.groups for split in splits if split.groups is not None]
    groups = np.concatenate(ids).astype(np.int64) if len(ids) == len(splits) else None
    return y, groups, len(splits[0].y)


def channels_first(x: Array) -> Array:
    """View images (N, H, W), (N, H, W, C) or (N, C, H, W) as (N, C, H, W)."""
    if x.ndim == 3:
        return x[:, np.newaxis]
    return x.transpose(0, 3, 1, 2) if _channels_are_last(x.shape) else x


def _channels_are_last(shape: tuple[int, ...]) -> bool:
    return shape[3] in (1, 3) and shape[1] not in (1, 3)


def _as_inputs(key: str, x: Array, problem: Problem) -> Array:
    if x.ndim < 2 or x.size == 0:
        raise problem(f"{key} has shape {x.shape}; at least one row and one value per row are needed")
    if x.dtype == np.uint8:
        return x
    if x.dtype.kind not in "biuf":
        raise problem(f"{key} has type {x.dtype}; uint8, another integer type or floats are allowed")
    check_whole(key, x, problem)
    with np.errstate(over="ignore"):
        x = x.astype(np.float32)
    if not np.isfinite(x).all():
        raise problem(f"{key} has values that are not finite in float32; all must be finite")
    return x


def check_unmasked(key: str, value: Any, problem: Problem) -> None:
    """Refuse masked entries of NumPy's masked arrays: their values, which are still there, aren't meant."""
    if masked := int(np.ma.getmaskarray(value).sum()) if isinstance(value, np.ma.MaskedArray) else 0:
        raise problem(f"{key} has {masked} masked entries; none are allowed, as all must be finite")


def _ranked(labels: Mapping[str, Array], problem: Problem) -> tuple[dict[str, Array], tuple[str, ...]]:
    """Return the ranks of names among those of all parts, (N,) each, and the names, sorted."""
    for name, values in labels.items():
        if values.ndim != 1:
            raise problem(f"{name} has shape {values.shape}; one name per row, shape (N,), is needed")
        if empty := int((values == "").sum()):
            raise problem(f"{name} has {empty} empty names; all must be filled")
    classes, ranks = ranked(list(labels.values()))
    return dict(zip(labels, ranks, strict=True)), classes


def ranked(parts: Sequence[Array]) -> tuple[tuple[str, ...], list[Array]]:
    """Return the texts of all parts, each once, sorted as people do; and each part as ranks among them."""
    texts, places = np.unique(np.concatenate(parts), return_inverse=True)
    names: list[str] = texts.tolist()
    order = sorted(range(len(names)), key=lambda place: natural_key(names[place]))
    ranks = np.empty(len(names), np.int64)
    ranks[order] = np.arange(len(names))
    found = ranks[places]
    return tuple(names[place] for place in order), np.split(
        found, np.cumsum([len(part) for part in parts])[:-1]
    )


def _groups(arrays: Mapping[str, Any], part: str, num_rows: int, problem: Problem) -> Array | None:
    key = next((key for key in (f"group_{part}", f"writer_{part}") if key in arrays), None)
    if key is None:
        return None
    ids: Array = arrays[key]
    if ids.dtype.kind not in "iuU":
        raise problem(f"{key} has type {ids.dtype}; integers or names are needed")
    if ids.ndim != 1:
        raise problem(f"{key} has shape {ids.shape}; one value per row, shape (N,), is needed")
    _check_length(key, ids, f"x_{part}", num_rows, problem)
    return ids


def _numbered(groups: list[Array | None]) -> tuple[list[Array | None], tuple[str, ...]]:
    """Replace names by their rank, and return the names; numbers stay, without names."""
    ids = [part for part in groups if part is not None]
    if not ids or all(part.dtype.kind in "iu" for part in ids):
        return groups, ()
    names, ranks = ranked([part.astype(str) for part in ids])
    return [*ranks], names


def _check_length(key: str, values: Array, inputs: str, num_rows: int, problem: Problem) -> None:
    if values.ndim == 0 or len(values) != num_rows:
        found = "no rows" if values.ndim == 0 else str(len(values))
        raise problem(f"{inputs} has {num_rows} rows, {key} has {found}; they must match")
