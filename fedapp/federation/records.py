"""What travels between server and clients: models as records, and what a model expects of data."""

from collections.abc import Collection, Mapping
from typing import Any

import torch
from flwr.app import ArrayRecord, MessageType
from torch import Tensor, nn

from fedapp.data import Dataset
from fedapp.data.moments import Moments
from fedapp.data.schema import Schema
from fedapp.names import Part
from fedapp.training.state import names_of
from strategies.flower.arrays import pack, unpack

# What the server adds to the run config in a message, so that a client with data of its own can check them;
# the names only where there are any.
DATA_KIND = "data-kind"
INPUT_SHAPE = "input-shape"
NUM_CLASSES = "num-classes"
DATA_TYPE = "data-type"
CLASS_NAMES = "class-names"
TARGET_TYPE = "target-type"
TARGET_SHAPE = "target-shape"
COLUMNS = "columns"
PARTS = "input-parts"

# Names of the arrays that training changes and that clients keep for themselves, where there are any.
OWN_ARRAYS = "own-arrays"

# Mean and deviation by which inputs are standardized, where they are and both are known.
MEAN = "input-mean"
DEVIATION = "input-deviation"

# The request for a device's sums of inputs, and what its reply has.
ASK_SUMS = f"{MessageType.QUERY}.sums"
SUMS, SQUARES, COUNT = "sums", "squares", "count"


def to_arrays(state: Mapping[str, Tensor]) -> ArrayRecord:
    """Turn tensors into a record by state-dict name."""
    return ArrayRecord({name: pack(value.detach().cpu().numpy()) for name, value in state.items()})


def initial_arrays(model: nn.Module, travelling: Collection[str] | None = None) -> ArrayRecord:
    """Return a model's arrays of the names ``travelling``, by default all arrays.

    Tied weights are there once, so that they stay tied when an update is added.
    """
    state = names_of(model).own(model.state_dict())
    return to_arrays({name: state[name] for name in (state if travelling is None else travelling)})


def to_state(arrays: ArrayRecord, device: torch.device) -> dict[str, Tensor]:
    """Copy a record into tensors on ``device``.

    A copy, not a view: torch's own memory is aligned alike in every process, and sums depend on alignment.
    """
    return {name: torch.tensor(unpack(array), device=device) for name, array in arrays.items()}


def schema_fields(dataset: Dataset) -> dict[str, Any]:
    """Return the fields of a message that tell clients what the model expects of their data."""
    schema = Schema.of(dataset)
    fields = {
        DATA_KIND: schema.kind,
        DATA_TYPE: schema.dtype,
        INPUT_SHAPE: list(schema.shape),
        NUM_CLASSES: schema.num_classes,
        CLASS_NAMES: list(schema.classes),
        COLUMNS: list(schema.columns),
        PARTS: list(map(str, schema.parts)),
        TARGET_TYPE: schema.targets,
        TARGET_SHAPE: list(schema.target_shape),
        MEAN: list(dataset.moments.mean) if dataset.moments else [],
        DEVIATION: list(dataset.moments.std) if dataset.moments else [],
    }
    return {key: value for key, value in fields.items() if value != []}


def schema_of(record: Mapping[str, Any]) -> Schema:
    """Read those fields back."""
    return Schema(
        record[DATA_KIND],
        record[DATA_TYPE],
        tuple(record[INPUT_SHAPE]),
        record[NUM_CLASSES],
        tuple(record.get(CLASS_NAMES, ())),
        tuple(record.get(COLUMNS, ())),
        record.get(TARGET_TYPE, "classes"),
        tuple(record.get(TARGET_SHAPE, ())),
        tuple(map(Part.read, record.get(PARTS, ()))),
    )


def moments_of(record: Mapping[str, Any]) -> Moments | None:
    """Read what inputs are standardized by; None if the message doesn't say."""
    if MEAN not in record:
        return None
    return Moments(tuple(record[MEAN]), tuple(record[DEVIATION]))
