"""How many tasks are trained at once: what fits the memory, and for padded ones doesn't waste too much."""

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np

from fedapp.training.task import LocalTask

# Working memory of a chunk in bytes: on a CPU what stays in its caches, on a GPU what keeps it busy.
CPU_CHUNK = 8 << 20
GPU_CHUNK = 4 << 30

# Padded examples per real one that a vmapped chunk may have.
MOST_PADDING = 1.5


def cut(tasks: Sequence[LocalTask], positions: Sequence[int], *, padded: bool) -> Iterator[list[int]]:
    """Cut sorted tasks into chunks that fit the memory, of like sizes; padded ones so that they waste little."""
    budget = CPU_CHUNK if tasks[0].x.device.type == "cpu" else GPU_CHUNK
    # Parameters, and two intermediate values of a batch beside its inputs; activations of convolutions are larger.
    model_bytes = sum(value.nbytes for value in tasks[0].start.values())
    row_bytes = 4 * int(np.prod(tasks[0].x.shape[1:])) * (16 if padded else 1)
    if not padded:
        largest = model_bytes + row_bytes * max(task.batches.indices.shape[1] for task in tasks)
        count = -(-len(tasks) // max(budget // largest, 1))
        ends = [len(tasks) * number // count for number in range(count + 1)]
        yield from (list(positions[start:end]) for start, end in pairwise(ends))
        return
    chunk: list[int] = []
    used, real, steps, width = 0, 0, 0, 0
    for task, position in zip(tasks, positions, strict=True):
        batches = task.batches
        size = model_bytes * 4 + row_bytes * batches.indices.shape[1]
        new_steps, new_width = max(steps, len(batches)), max(width, batches.indices.shape[1])
        amount = real + int(batches.sizes.sum())
        waste = new_steps * new_width * (len(chunk) + 1) > MOST_PADDING * amount
        if chunk and (used + size > budget or waste):
            yield chunk
            chunk, used, real, steps, width = [], 0, 0, 0, 0
            new_steps, new_width, amount = len(batches), batches.indices.shape[1], int(batches.sizes.sum())
        chunk.append(position)
        used, real, steps, width = used + size, amount, new_steps, new_width
    yield chunk
