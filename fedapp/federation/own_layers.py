"""The record in which clients keep their own arrays: in their state, and in a simulation's checkpoint."""

import numpy as np
from flwr.app import Array, ArrayRecord

TASK, BEFORE = "task", "before:"  # name of the task's number, and prefix of arrays before the task


def as_kept(task: int, arrays: ArrayRecord, before: ArrayRecord) -> ArrayRecord:
    """Return the record of a task: its number, the arrays after the task, and the arrays before it."""
    return ArrayRecord(
        {
            TASK: Array(np.array([task], np.int64)),
            **dict(arrays.items()),
            **{f"{BEFORE}{name}": array for name, array in before.items()},
        }
    )
