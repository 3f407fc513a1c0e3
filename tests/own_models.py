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
        self.register_buffer("mask", torch.full((input_shape[0],) * 2, -torch.inf).triu(1))

    def forward(self, x: Tensor) -> Tensor:
        """(B, T) → (B, T, K)."""
        hidden = self.tokens(x.long()) + self.places.weight
        logits: Tensor = self.output(self.block(hidden, src_mask=self.mask))
        return logits


def per_token(outputs: Tensor, targets: Tensor) -> Tensor:
    """A loss of each token, 0 where the target is PyTorch's ignore_index."""
    return F.cross_entropy(outputs.transpose(1, 2), targets, reduction="none")


def heights() -> tuple[np.ndarray, np.ndarray]:
    """Pictures (N, 1, 8, 8), and for each pixel the mean of its row, (N, 1, 8, 8)."""
    x = np.random.default_rng(0).normal(size=(120, 1, 8, 8)).astype(np.float32)
    return x, np.broadcast_to(x.mean(3, keepdims=True), x.shape).copy()


def wide_convolution() -> nn.Module:
    """A dense regression."""
    return nn.Conv2d(1, 1, (1, 15), padding=(0, 7))


def normalised() -> nn.Module:
    """A net of digits whose second layer is batch normalisation."""
    return nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64), nn.Linear(64, 10))


def baskets() -> tuple[dict[str, np.ndarray], np.ndarray]:
    """What is bought, up to 6 kinds (padded with 0, and a mask), and a price; is it dear, and of the first ten?"""
    rng = np.random.default_rng(0)
    ids, there = rng.integers(1, 20, (300, 6)), np.arange(6) < rng.integers(1, 7, (300, 1))
    price = rng.normal(size=(300, 2)).astype(np.float32)
    few = (np.where(there, ids < 10, 0).sum(1) * 2 > there.sum(1)).astype(np.int64)
    return {"ids": np.where(there, ids, 0), "there": there, "price": price}, 2 * (price[:, 0] > 0) + few


class TwoInputs(nn.Module):
    """Takes its inputs by name: whole numbers, flags and numbers as they are."""

    def __init__(self, input_shape: dict[str, tuple[int, ...]], num_classes: int) -> None:
        super().__init__()
        self.kinds = nn.Embedding(20, 16)
        self.output = nn.Linear(16 + input_shape["price"][0], num_classes)

    def forward(self, *, ids: Tensor, there: Tensor, price: Tensor) -> Tensor:
        """(B, 6) int64 and bool, (B, 2) float32 → (B, K)."""
        weights = there.unsqueeze(2) / there.sum(1)[:, None, None]
        logits: Tensor = self.output(torch.cat([(self.kinds(ids) * weights).sum(1), price], 1))
        return logits


class ByPlace(TwoInputs):
    """The same, by place."""

    def __init__(self, input_shape: tuple[tuple[int, ...], ...], num_classes: int) -> None:
        super().__init__({"price": input_shape[2]}, num_classes)

    def forward(self, ids: Tensor, there: Tensor, price: Tensor) -> Tensor:  # type: ignore[override]
        """As above."""
        return super().forward(ids=ids, there=there, price=price)


def baskets_by_place() -> tuple[tuple[np.ndarray, ...], np.ndarray]:
    """The same in a tuple."""
    inputs, y = baskets()
    return tuple(inputs.values()), y


class TwoHeads(TwoInputs):
    """Returns several outputs."""

    def __init__(self, input_shape: dict[str, tuple[int, ...]], num_classes: int) -> None:
        super().__init__(input_shape, num_classes)
        self.guess = nn.Linear(num_classes, 2)

    def forward(self, *, ids: Tensor, there: Tensor, price: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        """(B, K) and (B, 2), by name."""
        logits = super().forward(ids=ids, there=there, price=price)
        return {"logits": logits, "guess": self.guess(logits)}


def of_heads(outputs: dict[str, Tensor], targets: Tensor, inputs: dict[str, Tensor]) -> Tensor:
    """A loss of several outputs that looks at the inputs, too: the price is to be found again."""
    again = (outputs["guess"] - inputs["price"]).square().mean(1)
    return F.cross_entropy(outputs["logits"], targets, reduction="none") + 0.1 * again


def hits(outputs: dict[str, Tensor], targets: Tensor) -> float:
    """A metric of several outputs."""
    return float((outputs["logits"].argmax(1) == targets).double().mean())


class Sentences(torch.utils.data.Dataset[tuple[list[int], int]]):
    """Ragged rows: 1 to 6 kinds, and whether most are of the first ten."""

    def __len__(self) -> int:
        return 300

    def __getitem__(self, row: int) -> tuple[list[int], int]:
        inputs, y = baskets()
        return inputs["ids"][row][inputs["there"][row]].tolist(), int(y[row] % 2)


def padded(rows: list[tuple[list[int], int]]) -> tuple[dict[str, Tensor], Tensor]:
    """Pad with 0, and say what is there."""
    ids = nn.utils.rnn.pad_sequence([torch.tensor(row) for row, _ in rows], batch_first=True)
    return {"ids": ids, "there": ids > 0}, torch.tensor([y for _, y in rows])


def masked(rows: list[tuple[list[int], int]]) -> tuple[dict[str, Tensor], Tensor]:
    """Pad, and hide kinds at random, as collators of masked language models do."""
    inputs, y = padded(rows)
    return {**inputs, "there": inputs["there"] & (torch.rand(inputs["ids"].shape) > 0.15)}, y
