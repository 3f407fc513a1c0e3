"""Which examples each local step of a task sees."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedapp.training.draws import SENT

# Rows of a batch: an index into the client's data, or everything; and the mask of a padded batch.
Batch = tuple[Tensor | slice, Tensor | None]


@dataclass(frozen=True)
class Batches:
    """Which examples each local step sees.

    Attributes
    ----------
    indices : np.ndarray
        Shape (S, B), int64: rows of the client's data; entries past ``sizes`` are padding (0).
    sizes : np.ndarray
        Shape (S,): real examples of each step.
    num_examples : int
        n_i: the rows are 0 to n_i − 1.
    whole : bool
        Every step sees all examples, in order.
    """

    indices: np.ndarray
    sizes: np.ndarray
    num_examples: int
    whole: bool = False

    def __len__(self) -> int:
        return len(self.sizes)

    def ragged(self, device: torch.device | str = "cpu") -> list[Batch]:
        """Batches for one client, each as long as it is."""
        if self.whole:
            return [(slice(None), None)] * len(self)
        indices = torch.from_numpy(self.indices).to(device)
        return [(indices[step, :size], None) for step, size in enumerate(self.sizes.tolist())]

    def padded(self, steps: int, width: int) -> tuple[np.ndarray, np.ndarray]:
        """Return indices and mask, each (steps, width), for training as one of a batch of clients."""
        indices = np.zeros((steps, width), dtype=np.int64)
        mask = np.zeros((steps, width), dtype=np.float32)
        indices[: len(self), : self.indices.shape[1]] = self.indices
        mask[: len(self), : self.indices.shape[1]] = np.arange(self.indices.shape[1]) < self.sizes[:, None]
        return indices, mask


def plan_batches(
    num_examples: int, *, batch_size: int, epochs: int, steps: int, rng: np.random.Generator
) -> Batches:
    """Draw the batches of one task.

    Parameters
    ----------
    num_examples : int
        n_i ≥ 1.
    batch_size : int
        B; 0, or more than n_i: all examples.
    epochs, steps : int
        One of the two is 0. Epochs pass over a fresh permutation each, the last batch of an epoch may be smaller;
        a step draws B different examples at random.
    rng : np.random.Generator
        The task's own random stream.
    """
    width = num_examples if batch_size == 0 else min(batch_size, num_examples)
    if batch_size == 0:
        count = epochs or steps
        everything = np.broadcast_to(np.arange(num_examples), (count, num_examples))
        return Batches(everything, np.full(count, num_examples), num_examples, whole=True)
    if steps:
        drawn = [rng.choice(num_examples, width, replace=False, shuffle=False) for _ in range(steps)]
        return Batches(np.stack(drawn), np.full(steps, width), num_examples)
    per_epoch = -(-num_examples // width)
    indices = np.zeros((epochs, per_epoch * width), dtype=np.int64)
    for epoch in range(epochs):
        indices[epoch, :num_examples] = rng.permutation(num_examples)
    sizes = np.full((epochs, per_epoch), width)
    sizes[:, -1] = num_examples - (per_epoch - 1) * width
    return Batches(indices.reshape(-1, width), sizes.ravel(), num_examples)


def task_rng(seed: int, client: int, task: int) -> np.random.Generator:
    """Return the random stream of a client's task: the same whichever engine or worker runs it."""
    return SENT.batches(seed, client, task)
