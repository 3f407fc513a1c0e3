"""What is odd about data that can be trained on all the same."""

import numpy as np

from fedapp.data.dataset import Dataset
from fedapp.data.partition import Partition

_NAMED = 8  # classes that a remark lists


def remarks(dataset: Dataset, partition: Partition) -> list[str]:
    """Return a line for each thing that is probably not meant: classes without rows, one class, one test row."""
    trained, tested = (
        np.unique(dataset.y[rows]) for rows in (partition.client_indices, partition.test_indices)
    )
    found = []
    if len(trained) == 1:
        found.append(f"all training rows are of one class, {_named(dataset, trained)}: any model is right")
    absent = np.setdiff1d(np.arange(dataset.num_classes), np.union1d(trained, tested))
    if len(absent):
        found.append(f"of {dataset.num_classes} classes no row has {_named(dataset, absent)}")
    if len(unseen := np.setdiff1d(tested, trained)):
        found.append(f"test rows have {_named(dataset, unseen)}, which no training row has")
    if len(partition.test_indices) == 1:
        found.append("there is a single test row: accuracy is 0 or 1")
    return found


def _named(dataset: Dataset, labels: np.ndarray) -> str:
    names = [dataset.classes[label] if dataset.classes else str(label) for label in labels[:_NAMED].tolist()]
    return ", ".join(names) + (f", … ({len(labels)})" if len(labels) > _NAMED else "")
