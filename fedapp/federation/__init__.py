"""Data, division and model, which server and clients each derive from the run config alone."""

from fedapp.federation.frozen import (
    FrozenMissingError,
    OtherModelError,
    agreeing,
    forget_offered,
    offer,
    offered,
)
from fedapp.federation.loaded import (
    CPU,
    TensorCache,
    absolute,
    cached_dataset,
    cached_partition,
    cached_tensors,
    columns_of,
    dataset_of,
    division_of,
    held_out_tensors,
    local_folders,
    model_of,
    natural_clients,
    partition_of,
    renew,
    source_of,
    to_tensors,
    training_tensors,
    tried_tensors,
    with_moments,
)
from fedapp.federation.records import (
    NUM_CLASSES,
    initial_arrays,
    moments_of,
    schema_fields,
    schema_of,
    to_arrays,
    to_state,
)

__all__ = [
    "CPU",
    "NUM_CLASSES",
    "FrozenMissingError",
    "OtherModelError",
    "TensorCache",
    "absolute",
    "agreeing",
    "columns_of",
    "dataset_of",
    "division_of",
    "forget",
    "held_out_tensors",
    "initial_arrays",
    "local_folders",
    "model_of",
    "moments_of",
    "natural_clients",
    "offer",
    "offered",
    "partition_of",
    "renew",
    "schema_fields",
    "schema_of",
    "source_of",
    "to_arrays",
    "to_state",
    "to_tensors",
    "training_tensors",
    "tried_tensors",
    "with_moments",
]


def forget() -> None:
    """Drop the data, divisions and models that this process has loaded."""
    renew()
    forget_offered()
    for cached in (cached_dataset, cached_partition, cached_tensors):
        cached.cache_clear()
