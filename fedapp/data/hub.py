"""Datasets from the Hugging Face hub, through `flwr_datasets.FederatedDataset`."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from fedapp.data.arrays import ranked
from fedapp.data.dataset import RawData, Split
from fedapp.data.errors import DataError, one_line
from fedapp.data.readers import image_data
from fedapp.data.shakespeare import encode_samples, samples_data

if TYPE_CHECKING:
    from datasets import Dataset as HFDataset

_BATCH = 1000


@dataclass(frozen=True)
class HubSource:
    """Where a dataset is on the hub and what its columns are called.

    Attributes
    ----------
    repository : str
        Name on the hub, or a local folder that `datasets.load_dataset` reads.
    x, y : str
        Columns of inputs (images or texts) and of labels (class numbers or characters).
    group : str or None
        Column of the natural client.
    splits : tuple of str
        The training split and, where there is one, the test split.
    """

    repository: str
    x: str
    y: str
    group: str | None = None
    splits: tuple[str, ...] = ("train", "test")


HUB_SOURCES: dict[str, HubSource] = {
    "mnist": HubSource("ylecun/mnist", "image", "label"),
    "cifar10": HubSource("uoft-cs/cifar10", "img", "label"),
    "cifar100": HubSource("uoft-cs/cifar100", "img", "fine_label"),
    "femnist": HubSource("flwrlabs/femnist", "image", "character", "writer_id", ("train",)),
    "femnist-digits": HubSource("flwrlabs/femnist", "image", "character", "writer_id", ("train",)),
    "shakespeare": HubSource("flwrlabs/shakespeare", "x", "y", "character_id", ("train",)),
}


def hub_data(name: str, source: HubSource) -> RawData:
    """Download a dataset, or find it in the Hugging Face cache, and read it.

    Parameters
    ----------
    name : str
        A key of `HUB_SOURCES`: says what the columns hold.
    source : HubSource

    Raises
    ------
    DataError
        If the download fails, or the columns don't hold what the dataset is known to hold.
    """
    from flwr_datasets import FederatedDataset

    try:
        federated = FederatedDataset(dataset=source.repository, partitioners={}, shuffle=False)
        found = [federated.load_split(split) for split in source.splits]
    except Exception as error:  # the hub's clients raise a dozen unrelated types
        raise DataError(
            f"dataset = {name!r}: {source.repository} can't be had from the Hugging Face hub "
            f"({one_line(error)}); give a local copy with data-path"
        ) from error

    def problem(reason: str) -> DataError:
        return DataError(f"dataset = {name!r}: {source.repository} on the Hugging Face hub {reason}")

    read = _text_split if name == "shakespeare" else _image_split
    columns = ", ".join(_columns(source))
    try:
        splits = [read(split, source) for split in found]
    except (KeyError, TypeError, ValueError) as error:
        raise problem(f"has other columns than {columns} ({one_line(error)})") from error
    splits, names = _number_groups(splits)
    raw = samples_data(splits) if read is _text_split else image_data(name, splits, problem)
    return replace(raw, group_names=names)


def _columns(source: HubSource) -> list[str]:
    return [column for column in (source.x, source.y, source.group) if column]


def _batches(split: "HFDataset", source: HubSource, style: str | None) -> Iterator[dict[str, Any]]:
    yield from split.select_columns(_columns(source)).with_format(style).iter(batch_size=_BATCH)


def _image_split(split: "HFDataset", source: HubSource) -> Split:
    x = y = groups = np.empty(0)
    start = 0
    for batch in _batches(split, source, "numpy"):
        if start == 0:  # one array from the start: a list of batches would need the memory twice
            x = np.empty((len(split), *batch[source.x].shape[1:]), batch[source.x].dtype)
            y = np.empty(len(split), np.int64)
            groups = np.empty(len(split), object)
        rows = slice(start, start + len(batch[source.y]))
        x[rows], y[rows] = batch[source.x], batch[source.y]
        if source.group:
            groups[rows] = batch[source.group]
        start = rows.stop
    return Split(x, y, groups if source.group else None)


def _text_split(split: "HFDataset", source: HubSource) -> Split:
    parts = [
        (*encode_samples(batch[source.x], batch[source.y]), np.array(batch[source.group or source.y], object))
        for batch in _batches(split, source, None)
    ]
    x, y, groups = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    return Split(x, y, groups if source.group else None)


def _number_groups(splits: list[Split]) -> tuple[list[Split], tuple[str, ...]]:
    """Replace natural ids of any type by their rank 0, 1, … over all splits, and return their names."""
    ids = [split.groups.astype(str) for split in splits if split.groups is not None]
    if not ids:
        return splits, ()
    names, numbers = ranked(ids)
    return [split._replace(groups=part) for split, part in zip(splits, numbers, strict=True)], names
