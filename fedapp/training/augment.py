"""Images changed at random as a local step reads them: mirrored, or moved within a border of zeros.

What is drawn for a task comes from a stream of its own, before the task begins, so that it is the same in every
engine and whatever the batches are padded to.
"""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fedapp.training.batches import SENT, Draws

BORDER = 4
"""Pixels that an image is padded with on each side before a part of its own size is cut out."""


@dataclass(frozen=True, eq=False)
class Augmentation:
    """How the image of every example of a task's steps is mirrored and shifted.

    Attributes
    ----------
    flips : bool array (S, B)
        Which examples are mirrored.
    shifts : int64 array (S, B, 2)
        Row and column at which the image is cut out of its padded one, from 0 to 2 * BORDER; BORDER: not shifted.
    """

    flips: np.ndarray
    shifts: np.ndarray

    @classmethod
    def drawn(
        cls, name: str, steps: int, width: int, seed: int, client: int, task: int, draws: Draws = SENT
    ) -> "Augmentation":
        """Draw for ``steps`` steps of ``width`` examples each, from the random stream of the name.

        ``name`` is the value of `augment`: flip, which mirrors an image with probability 1/2, crop or flip+crop.
        """
        rng = draws.augmentation(seed, client, task)
        flips = rng.random((steps, width)) < 0.5
        shifts = rng.integers(0, 2 * BORDER + 1, (steps, width, 2))
        if "flip" not in name:
            flips = np.zeros_like(flips)
        if "crop" not in name:
            shifts = np.full_like(shifts, BORDER)
        return cls(flips, shifts)

    def padded(self, steps: int, width: int) -> tuple[np.ndarray, np.ndarray]:
        """Return flips (steps, width) and shifts (steps, width, 2) for a task that is trained as one of a batch."""
        flips = np.zeros((steps, width), dtype=bool)
        shifts = np.full((steps, width, 2), BORDER, dtype=np.int64)
        flips[: self.flips.shape[0], : self.flips.shape[1]] = self.flips
        shifts[: self.shifts.shape[0], : self.shifts.shape[1]] = self.shifts
        return flips, shifts


def augmented(x: Tensor, flips: Tensor, shifts: Tensor) -> Tensor:
    """Return images (B, C, H, W), mirrored as ``flips`` (B,) and cut out as ``shifts`` (B, 2) say; for vmap too."""
    height, width = x.shape[-2:]
    down = shifts[:, 0, None] + torch.arange(height, device=x.device)
    right = shifts[:, 1, None] + torch.arange(width, device=x.device)
    right = torch.where(flips[:, None], right.flip(1), right)
    rows = torch.arange(len(x), device=x.device)[:, None, None]
    padded = F.pad(x, (BORDER, BORDER, BORDER, BORDER)).movedim(1, -1)
    return padded[rows, down[:, :, None], right[:, None, :]].movedim(-1, 1)
