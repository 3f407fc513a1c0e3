"""Images mirrored and moved: pixel by pixel, alone and batched over clients, and from a stream of its own."""

import numpy as np
import pytest
import torch

from fedapp.training.augment import BORDER, Augmentation, augmented


def by_hand(image: np.ndarray, flip: bool, down: int, right: int) -> np.ndarray:
    """Pad, cut out, mirror: as one would write it."""
    padded = np.pad(image, ((0, 0), (BORDER, BORDER), (BORDER, BORDER)))
    height, width = image.shape[1:]
    part = padded[:, down : down + height, right : right + width]
    return part[:, :, ::-1] if flip else part


def test_every_image_is_changed_as_it_is_drawn():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(40, 3, 6, 5)).astype(np.float32)
    drawn = Augmentation.drawn("flip+crop", 1, 40, 0, 1, 2)
    assert drawn is not None
    found = augmented(torch.tensor(x), torch.tensor(drawn.flips[0]), torch.tensor(drawn.shifts[0]))
    for row, (flip, (down, right)) in enumerate(zip(drawn.flips[0], drawn.shifts[0], strict=True)):
        assert np.array_equal(found[row].numpy(), by_hand(x[row], flip, down, right))


def test_batched_over_clients():
    x = torch.randn(3, 10, 1, 8, 8)
    drawn = [Augmentation.drawn("flip+crop", 1, 10, 0, client, 0) for client in range(3)]
    flips = torch.tensor(np.stack([one.flips[0] for one in drawn if one]))
    shifts = torch.tensor(np.stack([one.shifts[0] for one in drawn if one]))
    together = torch.func.vmap(augmented)(x, flips, shifts)
    for client in range(3):
        assert torch.equal(together[client], augmented(x[client], flips[client], shifts[client]))


@pytest.mark.parametrize("name", ["flip", "crop", "flip+crop"])
def test_what_is_drawn(name):
    drawn = Augmentation.drawn(name, 50, 40, 3, 1, 2)
    assert drawn is not None
    assert (drawn.flips.shape, drawn.shifts.shape) == ((50, 40), (50, 40, 2))
    assert 0.4 < drawn.flips.mean() < 0.6 if "flip" in name else not drawn.flips.any()
    values = set(np.unique(drawn.shifts).tolist())
    assert values == (set(range(2 * BORDER + 1)) if "crop" in name else {BORDER})
    again, other = (Augmentation.drawn(name, 50, 40, 3, 1, task) for task in (2, 3))
    assert again is not None
    assert other is not None
    assert np.array_equal(again.flips, drawn.flips)
    assert np.array_equal(again.shifts, drawn.shifts)
    assert not (np.array_equal(other.flips, drawn.flips) and np.array_equal(other.shifts, drawn.shifts))


def test_padding_leaves_images_as_they_are():
    drawn = Augmentation.drawn("flip+crop", 2, 3, 0, 0, 0)
    assert drawn is not None
    flips, shifts = drawn.padded(4, 5)
    assert np.array_equal(flips[:2, :3], drawn.flips)
    assert np.array_equal(shifts[:2, :3], drawn.shifts)
    x = torch.randn(5, 1, 4, 4)
    assert torch.equal(augmented(x, torch.tensor(flips[3]), torch.tensor(shifts[3])), x)
