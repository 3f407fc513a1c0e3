"""Remarks on data that can be trained on but are probably not what the user meant."""

import unicodedata

import numpy as np

from fedapp.data.dataset import Dataset, Normalize
from fedapp.data.partition import Partition, names_of_unseen_clients
from fedapp.names import IGNORED

_NAMED = 8  # most classes that a remark lists


_ROWS = 10_000  # most rows by which the size of inputs is estimated
_LARGE = 100.0  # root mean square of a feature from which inputs are called large


def remarks(dataset: Dataset, partition: Partition, normalize: Normalize = False) -> list[str]:
    """Return a line for each thing that is probably not meant.

    Names that differ in case or blanks alone, rows of no client, classes without rows, one class or one target alone,
    one test row, numbers that are scaled as bytes of images are, inputs that are so large that no usual step size
    suits them.
    """
    found = (
        _of_classes(dataset, partition) if dataset.targets == "classes" else _of_numbers(dataset, partition)
    )
    found += _of_names(dataset)
    if len(partition.unused_indices):
        found.append(_of_unused(dataset, partition))
    if len(partition.test_indices) == 1:
        what = "accuracy is 0 or 1" if dataset.targets == "classes" else "its loss says little"
        found.append(f"there is a single test row: {what}")
    if dataset.kind == "vector" and dataset.x.dtype == np.uint8 and dataset.scale != 1.0:
        found.append(
            "inputs of type uint8 are scaled to [0, 1], as the bytes of images are; another integer type keeps them"
        )
    tokens = dataset.targets == "classes" and dataset.y.shape == dataset.x.shape
    if not normalize and dataset.scale == 1.0 and dataset.kind not in ("text", "parts") and not tokens:
        found += _of_size(dataset, partition)
    return found


def tested_on(dataset: Dataset, partition: Partition, partitioner: str, test_on: str) -> str:
    """Return a line with the natural ids of the clients that don't train and that runs are tested on; "" without."""
    names = names_of_unseen_clients(dataset, partition, partitioner, test_on)
    listed = ", ".join(names[:_NAMED]) + (f", … ({len(names)})" if len(names) > _NAMED else "")
    return f"tested on clients that don't train: {listed}" if names else ""


def _of_names(dataset: Dataset) -> list[str]:
    """Return a line where names of classes, natural ids or a column's texts differ in case or blanks alone."""
    named = {"classes": dataset.classes, "natural ids": dataset.group_names}
    named |= {f"texts of column {column!r}": texts for column, texts in dataset.encoded}
    return [
        f"{what} that differ in case or blanks alone count as different ones: {listed}"
        for what, names in named.items()
        if (listed := _alike(names))
    ]


def _alike(names: tuple[str, ...]) -> str:
    """Return names of more than a letter that differ in case, blanks or Unicode's form alone; "" for none."""
    found: dict[str, list[str]] = {}
    for name in names:
        if len(name.strip()) > 1:
            plain = " ".join(unicodedata.normalize("NFKC", name).casefold().split())
            found.setdefault(plain, []).append(name)
    alike = [" and ".join(map(repr, each)) for each in found.values() if len(each) > 1]
    return ", ".join(alike[:_NAMED]) + (f", … ({len(alike)})" if len(alike) > _NAMED else "")


def _of_unused(dataset: Dataset, partition: Partition) -> str:
    """Count the rows that are in no client, and the classes that no client trains on because of that."""
    unused_rows = len(partition.unused_indices)
    line = (
        f"{unused_rows:,} {'rows are' if unused_rows > 1 else 'row is'} in no client and "
        f"{'go' if unused_rows > 1 else 'goes'} unused{_without_client(dataset, partition)}; clients train on "
        f"{len(partition.client_indices):,} rows"
    )
    if not dataset.has_classes:
        return line
    unused, trained = (dataset.strata[rows] for rows in (partition.unused_indices, partition.client_indices))
    lost = np.setdiff1d(unused, trained)
    if not len(lost):
        return line
    if dataset.targets == "classes":
        return f"{line}, none of which has class {_named(dataset, lost)}"
    return f"{line}, none of which is in {len(lost)} of the {dataset.num_strata} tenths of the targets"


def _without_client(dataset: Dataset, partition: Partition) -> str:
    """Name the natural ids that have no client, if the unused rows are theirs alone."""
    if dataset.groups is None:
        return ""
    groups = np.asarray(dataset.groups)
    ids, taken = (np.unique(groups[rows]) for rows in (partition.unused_indices, partition.client_indices))
    if np.isin(ids, taken).any():
        return ""
    names = [
        dataset.group_names[each] if dataset.group_names else str(each) for each in ids[:_NAMED].tolist()
    ]
    return f", all rows of {', '.join(names)}" + (f", … ({len(ids)})" if len(ids) > _NAMED else "")


def _of_numbers(dataset: Dataset, partition: Partition) -> list[str]:
    trained = dataset.y[partition.client_indices]
    trained = trained.reshape(len(trained), -1)
    labels = np.unique(trained)
    if dataset.num_outputs == 1 and len(labels) > 2 and np.array_equal(labels, np.arange(len(labels))):
        return [f"the labels 0 to {len(labels) - 1} are taken as numbers, as the loss takes no classes"]
    constant = np.flatnonzero(trained.min(axis=0) == trained.max(axis=0)).tolist()
    if not constant:
        return []
    which = "" if trained.shape[1] == 1 else f" in column {', '.join(map(str, constant[:_NAMED]))} of targets"
    return [f"all training rows have the same target{which}: there is nothing to learn"]


def _of_size(dataset: Dataset, partition: Partition) -> list[str]:
    """Return a line where a feature's root mean square is large."""
    rows = partition.client_indices[:: max(1, len(partition.client_indices) // _ROWS)]
    x = np.asarray(dataset.x[rows], np.float64)
    axes = (0, 1) if dataset.kind == "series" else (0, *range(2, x.ndim))
    size = np.sqrt(np.square(x).mean(axis=axes))
    if (largest := float(size.max())) <= _LARGE:
        return []
    name = (
        f"column {dataset.columns[int(size.argmax())]!r}"
        if dataset.columns
        else f"feature {int(size.argmax())}"
    )
    return [
        f"inputs are as large as {largest:.3g} ({name}, root mean square): usual step sizes are too long for them; "
        "normalize = 'standardize' brings them to mean 0 and deviation 1"
    ]


def _of_classes(dataset: Dataset, partition: Partition) -> list[str]:
    trained, tested, unused = (
        np.setdiff1d(dataset.y[rows], [IGNORED])
        for rows in (partition.client_indices, partition.test_indices, partition.unused_indices)
    )
    found = []
    if len(trained) == 1:
        found.append(f"all training rows are of one class, {_named(dataset, trained)}: any model is right")
    if len(tested) == 1 < min(len(trained), len(partition.test_indices)):
        found.append(
            f"all test rows are of one class, {_named(dataset, tested)}: accuracy says little, and there is no auroc"
        )
    if dataset.has_classes:  # a vocabulary has tokens that no text of a few has
        absent = np.setdiff1d(np.arange(dataset.num_classes), np.concatenate([trained, tested, unused]))
        if len(absent):
            found.append(f"of {dataset.num_classes} classes no row has {_named(dataset, absent)}")
    if len(unseen := np.setdiff1d(tested, np.union1d(trained, unused))):
        found.append(f"test rows have {_named(dataset, unseen)}, which no training row has")
    return found


def _named(dataset: Dataset, labels: np.ndarray) -> str:
    names = [dataset.classes[label] if dataset.classes else str(label) for label in labels[:_NAMED].tolist()]
    return ", ".join(names) + (f", … ({len(labels)})" if len(labels) > _NAMED else "")
