"""Datasets, and their division over clients.

`load_dataset` opens a dataset as memory-mapped arrays, `make_partition` says which client has which rows.
Importing this package is quick; heavy libraries that read or divide data are imported at their first use.
"""

from fedapp.data.dataset import Dataset, Normalize
from fedapp.data.errors import DataError
from fedapp.data.loading import DATASETS, load_dataset
from fedapp.data.partition import PARTITIONERS, Division, Partition, make_partition

__all__ = [
    "DATASETS",
    "PARTITIONERS",
    "DataError",
    "Dataset",
    "Division",
    "Normalize",
    "Partition",
    "load_dataset",
    "make_partition",
]
