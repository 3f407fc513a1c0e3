"""How many tasks are trained at once: what fits the memory, and for padded ones doesn't waste too much."""

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
import torch

from fedapp.training.task import LocalTask

# Working memory of a chunk: on a CPU the bytes that stay in its caches, on a GPU a part of its memory, as an estimate
# that the real use is up to twice as much as.
CPU_CHUNK = 8 << 20
PART_OF_GPU = 1 / 8

# Padded examples per real one that a vmapped chunk may have.
MOST_PADDING = 1.5


def cut_padded(tasks: Sequence[LocalTask], positions: Sequence[int]) -> Iterator[list[int]]:
    """Cut sorted tasks into chunks that fit the memory, of sizes so alike that padding them wastes little."""
    model_bytes, row_bytes = _bytes(tasks[0])
    row_bytes *= 16  # activations of convolutions are larger
    chunk: list[int] = []
    used, real, steps, width = 0, 0, 0, 0
    for task, position in zip(tasks, positions, strict=True):
        batches = task.batches
        size = model_bytes * 4 + row_bytes * batches.indices.shape[1]
        new_steps, new_width = max(steps, len(batches)), max(width, batches.indices.shape[1])
        amount = real + int(batches.sizes.sum())
        waste = new_steps * new_width * (len(chunk) + 1) > MOST_PADDING * amount
        if chunk and (used + size > _budget(task) or waste):
            yield chunk
            chunk, used, real, steps, width = [], 0, 0, 0, 0
            new_steps, new_width, amount = len(batches), batches.indices.shape[1], int(batches.sizes.sum())
        chunk.append(position)
        used, real, steps, width = used + size, amount, new_steps, new_width
    yield chunk


def cut_evenly(like: LocalTask, widest: int, positions: Sequence[int]) -> Iterator[list[int]]:
    """Cut tasks that are alike, with ``widest`` examples a batch, into chunks of equal size that fit the memory."""
    count = -(-len(positions) // max(_budget(like) // stack_bytes(like, widest), 1))
    ends = [len(positions) * number // count for number in range(count + 1)]
    yield from (list(positions[start:end]) for start, end in pairwise(ends))


def stack_bytes(like: LocalTask, widest: int) -> int:
    """Return the bytes that a task takes in a stack, with ``widest`` examples a batch."""
    model_bytes, row_bytes = _bytes(like)
    return model_bytes + row_bytes * widest


def _budget(task: LocalTask) -> int:
    if task.x.device.type == "cpu":
        return CPU_CHUNK
    return int(PART_OF_GPU * torch.cuda.get_device_properties(task.x.device).total_memory)


def _bytes(task: LocalTask) -> tuple[int, int]:
    """Return the bytes of the parameters, and of two intermediate values of an example beside its inputs."""
    return sum(value.nbytes for value in task.start.values()), 4 * int(np.prod(task.x.shape[1:]))
