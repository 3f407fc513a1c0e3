"""A stranger's module: models of several kinds, and data for them; it knows nothing of the app."""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

TOKENS, LENGTH = 12, 10


def texts() -> tuple[np.ndarray, np.ndarray]:
    """Rows that count on by 1, 2 or 3, of 4 to 10 tokens, padded with 0; the target of each token is the next."""
    rng = np.random.default_rng(0)
    start, step = rng.integers(0, TOKENS, (240, 1)), rng.integers(1, 4, (240, 1))
    tokens = (start + step * np.arange(LENGTH + 1)) % TOKENS
    there = np.arange(LENGTH) < rng.integers(4, LENGTH + 1, (240, 1))
    return np.where(there, tokens[:, :-1], 0), np.where(there, tokens[:, 1:], -100)


class NextToken(nn.Module):
    """A transformer with a causal mask of −∞."""

    mask: Tensor

    def __init__(self, input_shape: tuple[int, ...], num_classes: int, width: int = 32) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(num_classes, width), nn.Embedding(input_shape[0], width)
        self.block = nn.TransformerEncoderLayer(width, 2, 2 * width, dropout=0.0, batch_first=True)
        self.output = nn.Linear(width, num_classes)
        self.register_buffer("mask", torch.full((input_shape[0],) * 2, -torch.inf).triu(1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T) → (B, T, K)."""
        hidden = self.tokens(x.long()) + self.places.weight
        logits: Tensor = self.output(self.block(hidden, src_mask=self.mask))
        return logits


def per_token(outputs: Tensor, targets: Tensor) -> Tensor:
    """A loss of each token, 0 where the target is PyTorch's ignore_index."""
    return F.cross_entropy(outputs.transpose(1, 2), targets, reduction="none")


def pictures() -> tuple[np.ndarray, np.ndarray]:
    """Pictures (N, 1, 16, 16) of a bright and a dark square on noise; which each pixel is in, 0 for none."""
    rng = np.random.default_rng(0)
    x, y = rng.integers(96, 160, (120, 1, 16, 16)), np.zeros((120, 16, 16), np.int64)
    for row in range(len(x)):
        for label, light in ((1, 255), (2, 0)):
            top, left = rng.integers(0, 10, 2)
            x[row, 0, top : top + 6, left : left + 6] = light
            y[row, top : top + 6, left : left + 6] = label
    return x.astype(np.uint8), y


class UNet(nn.Module):
    """One level down, and up again beside what was there."""

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


def heights() -> tuple[np.ndarray, np.ndarray]:
    """Pictures (N, 1, 8, 8), and for each pixel the mean of its row, (N, 1, 8, 8)."""
    x = np.random.default_rng(0).normal(size=(120, 1, 8, 8)).astype(np.float32)
    return x, np.broadcast_to(x.mean(3, keepdims=True), x.shape).copy()


def wide_convolution() -> nn.Module:
    """A dense regression."""
    return nn.Conv2d(1, 1, (1, 15), padding=(0, 7))
