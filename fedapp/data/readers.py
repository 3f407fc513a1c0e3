"""Readers of the datasets known by name: embedded, generated, and from files in their published formats."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedapp.data.arrays import channels_first, join_rows
from fedapp.data.dataset import PUBLISHED, Array, RawData, Split
from fedapp.data.errors import DataError, one_line, path_error
from fedapp.data.npz import read_npz
from strategies import streams


def digits_data() -> RawData:
    """Read scikit-learn's 1,797 handwritten digits: (N, 1, 8, 8) with values 0 … 16."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    x = digits.images.astype(np.uint8)[:, np.newaxis]
    return RawData([x], digits.target.astype(np.int64), None, len(x), 10, "image", 1 / 16)


def synthetic_data(num_clients: int, seed: int) -> RawData:
    """Generate the synthetic problem of Dhasade et al., §3.1: points in the plane, two classes, one unusual client.

    Per client and class 50 training points and 10 test points with standard deviation 0.25 in each
    coordinate, as in the authors' data (the text says variance 1/4). Class 0 is around (0, 0), class 1 around
    (1, 1), but (4, 4) for the last client.

    Parameters
    ----------
    num_clients : int
        Number of natural clients, the `groups`.
    seed : int
    """
    rng = streams.generator(seed, "synthetic-points")
    num_train, num_test = 50, 10
    centres = np.zeros((num_clients, 2, 1, 2))
    centres[:, 1] = 1.0
    centres[-1, 1] = 4.0
    points = centres + 0.25 * rng.standard_normal((num_clients, 2, num_train + num_test, 2))
    splits = []
    for part in (points[:, :, :num_train], points[:, :, num_train:]):
        client, label, _ = np.indices(part.shape[:3])
        splits.append(Split(part.reshape(-1, 2), label.ravel(), client.ravel()))
    return _points(splits)


def synthetic_files_data(folder: Path) -> RawData:
    """Read the synthetic problem as its authors store it: train.json and test.json in LEAF's layout.

    Raises
    ------
    DataError
        If a file is missing or isn't LEAF's layout with two coordinates per point and labels 0 and 1.
    """
    train = read_leaf(folder / "train.json")
    numbers = {user: number for number, user in enumerate(train)}
    splits = []
    for path, users in (
        (folder / "train.json", train),
        (folder / "test.json", read_leaf(folder / "test.json")),
    ):
        if unknown := sorted(set(users) - set(numbers)):
            raise path_error(path, f"has the user {unknown[0]!r}, who is not in train.json")
        try:
            x = np.concatenate([np.asarray(rows, np.float64) for rows, _ in users.values()])
            y = np.concatenate([np.asarray(labels, np.float64) for _, labels in users.values()])
        except ValueError as error:
            raise path_error(path, f"has points that aren't pairs of numbers ({one_line(error)})") from error
        groups = np.repeat([numbers[user] for user in users], [len(labels) for _, labels in users.values()])
        if x.shape != (len(y), 2) or not np.isfinite(x).all() or not np.isin(y, (0, 1)).all():
            raise path_error(
                path, f"has points of shape {x.shape}; finite (N, 2) with labels 0 and 1 are needed"
            )
        splits.append(Split(x, y.astype(np.int64), groups))
    return replace(_points(splits), group_names=tuple(numbers))


def named_npz_data(name: str, path: Path) -> RawData:
    """Read a named image dataset from an npz file with uint8 images."""
    splits = read_npz(path)
    if splits[0].classes:
        raise path_error(path, f"y_train has names; the numbers of the classes of {name} are needed")
    return image_data(name, splits, partial(path_error, path))


def torchvision_data(name: str, root: Path) -> RawData:
    """Read mnist, cifar10 or cifar100 from the raw files that torchvision downloads, below `root`.

    Raises
    ------
    DataError
        If torchvision doesn't find them there or finds them damaged.
    """
    from torchvision import datasets

    reader = {"mnist": datasets.MNIST, "cifar10": datasets.CIFAR10, "cifar100": datasets.CIFAR100}[name]
    splits = []
    for train in (True, False):
        try:
            found = reader(str(root), train=train, download=False)
        except (RuntimeError, OSError, ValueError, EOFError) as error:
            raise path_error(root, f"torchvision can't read {name} there ({one_line(error)})") from error
        splits.append(Split(np.asarray(found.data), np.asarray(found.targets)))
    return image_data(name, splits, partial(path_error, root))


def image_data(name: str, splits: list[Split], problem: Callable[[str], DataError]) -> RawData:
    """Check the splits of a named image dataset and put them together.

    Parameters
    ----------
    name : str
        Name in `PUBLISHED`; femnist-digits keeps only the rows of the ten digits.
    splits : list of Split
        uint8 images, channels first or last.
    problem : callable
        Makes the error to raise from the reason why these aren't the images of `name`.

    Raises
    ------
    DataError
        If shape, type or labels aren't those of the dataset.
    """
    facts = PUBLISHED[name]
    if name == "femnist-digits":
        splits = [_selected(split, split.y < facts.num_classes) for split in splits]
    blocks = [channels_first(split.x) if split.x.ndim in (3, 4) else split.x for split in splits]
    for block, split in zip(blocks, splits, strict=True):
        if block.shape[1:] != facts.shape or block.dtype != np.uint8:
            found = f"rows of shape {block.shape[1:]} and type {block.dtype}"
            raise problem(f"has {found}, but {name} has {facts.shape} and uint8")
        if len(split.y) == 0 and split is splits[0]:
            raise problem(f"has no training rows of {name}")
        if len(split.y) and not 0 <= split.y.min() <= split.y.max() < facts.num_classes:
            found = f"labels {split.y.min()} to {split.y.max()}"
            raise problem(f"has {found}, but {name} has 0 to {facts.num_classes - 1}")
    y, groups, num_train = join_rows(splits)
    names = splits[0].group_names
    return RawData(blocks, y, groups, num_train, facts.num_classes, "image", 1 / 255, group_names=names)


def _selected(split: Split, rows: Array) -> Split:
    return split._replace(
        x=split.x[rows], y=split.y[rows], groups=None if split.groups is None else split.groups[rows]
    )


def _points(splits: list[Split]) -> RawData:
    y, groups, num_train = join_rows(splits)
    blocks: list[Array] = [split.x for split in splits]
    return RawData(blocks, y, groups, num_train, 2, "vector", 1.0)


# LEAF's JSON: files of users, each with inputs x and labels y (Caldas et al. 2018, https://leaf.cmu.edu).


class LeafFiles(NamedTuple):
    """Files to read, of training and of test rows."""

    train: list[Path]
    test: list[Path]


def leaf_files(path: Path) -> LeafFiles:
    """Return the files to read for a file or a folder; no training file where a folder has none.

    In a folder these are `*train*.json` with `*test*.json`, or those in its folders train and test. With a single
    file the test file beside it (train → test in its name) is read too.
    """
    if path.is_dir():
        found = (
            sorted([*path.glob(f"*{part}*.json"), *path.glob(f"{part}/*.json")]) for part in ("train", "test")
        )
        return LeafFiles(*found)
    beside = path.with_name(path.name.replace("train", "test"))
    return LeafFiles([path], [beside] if beside != path and beside.is_file() else [])


def leaf_splits(
    files: LeafFiles, encoded: Callable[[list[Any], list[Any]], tuple[Array, Array]]
) -> list[Split]:
    """Return the rows of the training and, where there are any, of the test files; a user is a natural client.

    Parameters
    ----------
    files : LeafFiles
    encoded : callable
        Makes inputs (n, …) and labels (n,) of a user's x and y; TypeError or ValueError if it can't.

    Raises
    ------
    DataError
        If a file isn't LEAF's, or a user's rows can't be made.
    """
    numbers: dict[str, int] = {}
    splits = []
    for paths in files:
        parts = []
        for path in paths:
            for user, (rows, labels) in read_leaf(path).items():
                if not rows:
                    continue
                try:
                    x, y = encoded(rows, labels)
                except (TypeError, ValueError) as error:
                    raise path_error(path, f"user {user!r}: {one_line(error)}") from error
                parts.append((x, y, np.full(len(y), numbers.setdefault(user, len(numbers)))))
        if parts:
            x, y, groups = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
            splits.append(Split(x, y, groups))
    return [split._replace(group_names=tuple(numbers)) for split in splits]


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object, or raise `DataError`."""
    try:
        content = json.loads(path.read_text("utf-8"))
    except FileNotFoundError as error:
        raise path_error(path, "no such file") from error
    except (OSError, ValueError) as error:
        raise path_error(path, f"can't be read as JSON ({one_line(error)})") from error
    if not isinstance(content, dict):
        raise path_error(path, f"holds a JSON {type(content).__name__}; an object is needed")
    return content


def read_leaf(path: Path) -> dict[str, tuple[list[Any], list[Any]]]:
    """Read a LEAF file {"users": […], "user_data": {user: {"x": […], "y": […]}}} as {user: (x, y)}.

    Raises
    ------
    DataError
        If the file isn't such JSON, or a user's x and y differ in length.
    """
    content = read_json(path)
    try:
        users = {
            user: (content["user_data"][user]["x"], content["user_data"][user]["y"])
            for user in content["users"]
        }
        lengths = {user: (len(x), len(y)) for user, (x, y) in users.items()}
    except (KeyError, TypeError) as error:
        raise path_error(
            path, f"isn't LEAF's users and user_data with x and y ({one_line(error)})"
        ) from error
    for user, (rows, labels) in lengths.items():
        if rows != labels:
            raise path_error(path, f"user {user!r} has {rows} x and {labels} y; they must match")
    if sum(rows for rows, _ in lengths.values()) == 0:
        raise path_error(path, "has no samples; at least one is needed")
    return users


def leaf_images_data(name: str, files: LeafFiles) -> RawData:
    """Read femnist or femnist-digits from LEAF's JSON: rows of 784 numbers in [0, 1], a writer each user.

    Raises
    ------
    DataError
        If a file isn't LEAF's, or holds other images.
    """
    splits = leaf_splits(files, _leaf_images)
    return image_data(name, splits, partial(path_error, files.train[0]))


def _leaf_images(rows: list[Any], labels: list[Any]) -> tuple[Array, Array]:
    """Return images, uint8 (N, 28, 28), and labels (N,): LEAF's numbers are whole multiples of 1/255.

    Raises
    ------
    ValueError
        If rows aren't 784 numbers in [0, 1], or labels no whole numbers.
    """
    _, height, width = PUBLISHED["femnist"].shape
    x, y = np.asarray(rows, np.float64), np.asarray(labels, np.float64)
    if x.shape != (len(y), height * width) or not (0 <= x.min() <= x.max() <= 1):
        raise ValueError(f"images must be {height * width} numbers in [0, 1] each")
    if not np.array_equal(y, np.floor(y)):
        raise ValueError("labels must be whole numbers")
    return np.round(255 * x).astype(np.uint8).reshape(-1, height, width), y.astype(np.int64)
