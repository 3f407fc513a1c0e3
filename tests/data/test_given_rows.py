"""Rows of a torch Dataset: images of PIL get one form, and rows that don't fit are one right line."""

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from fedapp.api.values import as_values
from fedapp.config import ConfigError
from fedapp.data import DataError, load_dataset
from fedapp.data.dataset import DataColumns
from fedapp.own import register


class Rows(Dataset):
    """Rows as they are given."""

    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, row):
        return self.rows[row]


def pictures(number: int = 6) -> Rows:
    """Images of two heights, half of them grey, of one brightness each: 10 times the row."""
    made = [
        Image.new("RGB" if row % 2 else "L", (8, 8 + row % 2), (10 * row,) * 3 if row % 2 else 10 * row)
        for row in range(number)
    ]
    return Rows([(image, row % 2) for row, image in enumerate(made)])


def read(given, **columns):
    """Return the dataset of a function that returns what is given, and that of what is given itself."""
    name = register(lambda: given)
    keys = {key.replace("_", "-"): value for key, value in columns.items()}
    values = as_values({"dataset": given, **keys})
    assert not {"image-size", "image-mode"} & values.keys()
    return (
        load_dataset(name, columns=DataColumns(**columns)),
        load_dataset(str(values["dataset"]), str(values["data-path"])),
    )


@pytest.mark.parametrize("as_pair", [False, True])
def test_images_of_pil_get_the_size_and_the_mode_that_are_asked_for(as_pair):
    given = (pictures(), pictures(2)) if as_pair else pictures()
    for data in read(given, image_size="4x6", image_mode="colour"):
        assert (data.kind, data.input_shape, data.x.dtype) == ("image", (3, 4, 6), np.uint8)
        assert data.x[:6].reshape(6, -1).min(1).tolist() == [0, 10, 20, 30, 40, 50]
        assert data.x[:6].reshape(6, -1).max(1).tolist() == [0, 10, 20, 30, 40, 50]
        assert data.y[:6].tolist() == [0, 1] * 3
    for data in read(given, image_size="4", image_mode="grey"):
        assert data.input_shape == (1, 4, 4)


def refusal(given, **columns) -> tuple[str, str]:
    """Return what is said of data that a function returns, and of data that are given themselves."""
    with pytest.raises(DataError) as returned:
        load_dataset(register(lambda: given), columns=DataColumns(**columns))
    with pytest.raises((DataError, ConfigError)) as handed:
        as_values({"dataset": given, **columns})
    assert "\n" not in f"{returned.value}{handed.value}"
    return str(returned.value).partition("what the function returned ")[2], str(handed.value).partition(
        "what is given "
    )[2]


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (
            [(torch.zeros(3 + row % 2), 0) for row in range(4)],
            "has inputs of shape (4,), the first one's is (3,); they must match, and the collate_fn of a DataLoader "
            "can make them alike",
        ),
        (
            [(torch.zeros(3), torch.zeros(1 + row)) for row in range(4)],
            "has targets of shape (2,), the first one's is (1,); they must match, and the collate_fn of a DataLoader "
            "can make them alike",
        ),
        (
            pictures().rows[::2] + pictures().rows[1::2],
            "has inputs of shape (3, 9, 8), the first one's is (1, 8, 8); they must match, and image-size and "
            "image-mode can make them alike",
        ),
    ],
)
def test_rows_of_several_shapes_are_one_line(rows, said):
    assert refusal(Rows(rows)) == (said, said)


def test_a_collate_function_that_fails_is_one_line():
    ragged = Rows([(torch.zeros(3 + row % 2), 0) for row in range(4)])
    said = (
        "is a DataLoader whose collate_fn raises RuntimeError for its rows; it must make one batch of all rows, for "
        "example by padding"
    )
    assert refusal(DataLoader(ragged)) == (said, said)


def test_a_form_of_images_is_refused_where_it_would_do_nothing():
    none = "has rows without an image of PIL, and image-size and image-mode are for such images"
    assert refusal(Rows([(torch.zeros(3), 0)] * 4), image_size="4") == (none, none)
    loader = "is a DataLoader, whose rows image-size and image-mode don't change; a Dataset is needed"
    assert refusal(DataLoader(pictures()), image_mode="grey") == (loader, loader)
    with pytest.raises(DataError, match=r"image-size = '4': python:lambda_.* returned no images"):
        load_dataset(
            register(lambda: (np.zeros((4, 2)), np.zeros(4, int))), columns=DataColumns(image_size="4")
        )
    with pytest.raises(
        ConfigError, match="image-size and image-mode: arrays have no images of PIL, whose form"
    ):
        as_values({"dataset": (np.zeros((4, 2)), np.zeros(4, int)), "image_size": "4"})
    with pytest.raises(ConfigError, match="image-size = '4xx'"):
        as_values({"dataset": pictures(), "image_size": "4xx"})
