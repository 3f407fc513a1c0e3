"""What server and clients share: each works it out for itself, from the run config alone, and so they agree."""

from fedapp.federation.loaded import (
    CPU,
    absolute,
    cached_dataset,
    cached_model,
    cached_partition,
    dataset_of,
    division_of,
    model_of,
    partition_of,
)
from fedapp.federation.records import NUM_CLASSES, schema_fields, schema_of, to_arrays, to_state
from fedapp.federation.tensors import TensorCache, cached_tensors, to_tensors, training_tensors

__all__ = [
    "CPU",
    "NUM_CLASSES",
    "TensorCache",
    "absolute",
    "dataset_of",
    "division_of",
    "forget",
    "model_of",
    "partition_of",
    "schema_fields",
    "schema_of",
    "to_arrays",
    "to_state",
    "to_tensors",
    "training_tensors",
]


def forget() -> None:
    """Drop the data, divisions and models that this process has loaded."""
    for cached in (cached_dataset, cached_partition, cached_model, cached_tensors):
        cached.cache_clear()
