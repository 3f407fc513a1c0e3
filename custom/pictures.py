"""Segmentation, a class for each pixel: `dataset=custom.pictures:load model=custom.pictures:UNet`."""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from strategies.streams import generator


def load() -> tuple[np.ndarray, np.ndarray]:
    """Return pictures, uint8 (240, 16, 16), and each pixel's class, int64 (240, 16, 16).

    A bright square (1) and a dark one (2) are on noise (0). What is on the border isn't known: -100 doesn't count.
    """
    rng = generator(0, "segmented-pictures")
    x, y = rng.integers(96, 160, (240, 16, 16)), np.zeros((240, 16, 16), np.int64)
    for row in range(len(x)):
        for label, light in ((1, 255), (2, 0)):
            top, left = rng.integers(0, 10, 2)
            x[row, top : top + 6, left : left + 6] = light
            y[row, top : top + 6, left : left + 6] = label
    y[:, [0, -1]] = y[:, :, [0, -1]] = -100
    return x.astype(np.uint8), y


class UNet(nn.Module):
    """One level down, and up again beside what was there (Ronneberger et al. 2015), for images of even sides."""

    def __init__(self, input_shape: tuple[int, ...], num_classes: int = 8, width: int = 8) -> None:
        super().__init__()
        self.down = nn.Conv2d(input_shape[0], width, 3, padding=1)
        self.below = nn.Conv2d(width, 2 * width, 3, padding=1)
        self.up = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.output = nn.Conv2d(2 * width, num_classes, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) → (B, K, H, W)."""
        first = torch.relu(self.down(x))
        below = torch.relu(self.below(F.max_pool2d(first, 2)))
        logits: Tensor = self.output(torch.cat([first, torch.relu(self.up(below))], 1))
        return logits
