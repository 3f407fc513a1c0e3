"""Datasets, and their division over clients.

`load_dataset` opens a dataset as memory-mapped arrays, `make_partition` says which client has which rows.
Importing this package is quick; heavy libraries that read or divide data are imported at their first use.
"""

from typing import TYPE_CHECKING, Any

from fedapp.data.dataset import Dataset, Normalize
from fedapp.data.errors import DataError
from fedapp.data.loading import DATASETS, load_dataset
from fedapp.data.partition import PARTITIONERS, Division, Partition, make_partition

if TYPE_CHECKING:
    from fedapp.data.skew_partitioner import LabelQuantitySkewPartitioner

__all__ = [
    "DATASETS",
    "PARTITIONERS",
    "DataError",
    "Dataset",
    "Division",
    "LabelQuantitySkewPartitioner",
    "Normalize",
    "Partition",
    "load_dataset",
    "make_partition",
]


def __getattr__(name: str) -> Any:
    if name == "LabelQuantitySkewPartitioner":  # its base class takes seconds to import
        from fedapp.data.skew_partitioner import LabelQuantitySkewPartitioner

        return LabelQuantitySkewPartitioner
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
