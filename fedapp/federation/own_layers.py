"""What clients keep of their own arrays, as a record: in their state, and in a simulation's checkpoint."""

import numpy as np
from flwr.app import Array, ArrayRecord

TASK, BEFORE = "task", "before:"  # the names of what is kept beside the arrays themselves


def as_kept(task: int, arrays: ArrayRecord, before: ArrayRecord) -> ArrayRecord:
    """Return what is kept of a task: its number, the arrays after it, and those before it."""
    return ArrayRecord(
        {
            TASK: Array(np.array([task], np.int64)),
            **dict(arrays.items()),
            **{f"{BEFORE}{name}": array for name, array in before.items()},
        }
    )
