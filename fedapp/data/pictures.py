"""Images as pixels: 8 bits each, channels first."""

from typing import Any, NamedTuple

import numpy as np

from fedapp.data.dataset import DataColumns
from fedapp.data.targets import Problem


class ImageForm(NamedTuple):
    """What images are made into: one size (height, width), None as they are; grey or in colour, None as they are."""

    size: tuple[int, int] | None = None
    grey: bool | None = None

    @classmethod
    def of(cls, columns: DataColumns) -> "ImageForm":
        """Return the form that the keys image-size and image-mode ask for."""
        numbers = [int(number) for number in columns.image_size.split("x") if number]
        size = (numbers[0], numbers[-1]) if numbers else None
        return cls(size, None if columns.image_mode == "auto" else columns.image_mode == "grey")


AS_IT_IS = ImageForm()


def picture_pixels(image: Any, form: ImageForm = AS_IT_IS) -> Any:
    """Return a PIL image as uint8: (1, H, W) if it is grey, else (3, H, W); None for more than 8 bits a pixel.

    An image is turned as its EXIF orientation says, as cameras don't turn the pixels themselves. Scaling is bilinear,
    over all pixels that become one, and doesn't keep the ratio of the sides.
    """
    from PIL import Image, ImageOps

    if image.mode[0] in "IF":  # 16 or 32 bits, which would be cut off at 255
        return None
    image = ImageOps.exif_transpose(image)
    grey = image.mode in ("1", "L") if form.grey is None else form.grey
    image = image.convert("L" if grey else "RGB")
    if form.size is not None and image.size != form.size[::-1]:
        image = image.resize(form.size[::-1], Image.Resampling.BILINEAR)
    pixels = np.asarray(image)
    return pixels[np.newaxis] if grey else pixels.transpose(2, 0, 1)


def is_picture(value: Any) -> bool:
    """Tell whether this is an image of PIL, without importing that."""
    return hasattr(value, "mode") and hasattr(value, "convert")


def pixels_of(image: Any, problem: Problem, form: ImageForm = AS_IT_IS) -> Any:
    """Return what `picture_pixels` does; the ``problem`` of an image of more than 8 bits a pixel is raised."""
    pixels = picture_pixels(image, form)
    if pixels is None:
        raise problem("has an image of more than 8 bits a pixel; 8 are needed")
    return pixels


class RowsOfImages:
    """Rows (input, target) of a dataset whose inputs are images of PIL, as pixels of one form."""

    def __init__(self, rows: Any, form: ImageForm, problem: Problem) -> None:
        self.rows, self.form, self.problem = rows, form, problem

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.rows)

    def __getitem__(self, row: int) -> Any:
        """Return a row with the pixels of its image."""
        item = self.rows[row]
        if not (isinstance(item, tuple | list) and len(item) == 2 and is_picture(item[0])):
            raise self.problem(
                "has rows without an image of PIL, and image-size and image-mode are for such images"
            )
        return pixels_of(item[0], self.problem, self.form), item[1]
