"""A user's own data: the same digits as a table and as images, and every way that they can be wrong."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from PIL import Image
from pyarrow import csv, parquet

from fedapp.data import DataError, load_dataset
from fedapp.data.dataset import DataColumns
from fedapp.data.facts.look import look_at_images
from tests.data.sources import message

WRITE = {"csv": csv.write_csv, "parquet": parquet.write_table}
FORMATS = pytest.mark.parametrize("suffix", sorted(WRITE))


def write(folder: Path, suffix: str, columns: dict[str, Any]) -> str:
    path = folder / f"own.{suffix}"
    WRITE[suffix](pa.table(columns), path)
    return str(path)


def save_image(path: Path, pixels: np.ndarray, mode: str | None = None) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    image = Image.fromarray(pixels)
    (image.convert(mode) if mode else image).save(path)


def refused(path: str | Path) -> str:
    with pytest.raises(DataError) as caught:
        load_dataset("files", str(path))
    assert "\n" not in str(caught.value)
    return str(caught.value)


# Tables ------------------------------------------------------------------------------------------------------


@FORMATS
def test_a_table_with_numbers_as_labels(suffix, tmp_path):
    data = load_dataset("files", write(tmp_path, suffix, {"b": [0.5, 2.5], "label": [2, 0], "a": [-1, 3]}))
    assert data.x.tolist() == [[0.5, -1], [2.5, 3]]  # columns in the table's order, the label left out
    assert data.x.dtype == np.float32
    assert data.y.tolist() == [2, 0]
    assert (data.num_train, data.num_classes, data.kind, data.scale) == (2, 3, "vector", 1.0)
    assert (data.classes, data.columns, data.groups) == ((), ("b", "a"), None)


@FORMATS
def test_flags_of_a_table_are_0_and_1(suffix, tmp_path):
    data = load_dataset("files", write(tmp_path, suffix, {"x": [True, False], "a": [2, 3], "label": [0, 1]}))
    assert (data.x.tolist(), data.scale) == ([[1, 2], [0, 3]], 1.0)


def test_a_file_that_is_empty(tmp_path):
    path = tmp_path / "own.csv"
    path.write_bytes(b"")
    assert message("files", str(path)) == f"data-path = {str(path)!r}: is empty"


@FORMATS
def test_a_table_with_names_as_labels(suffix, tmp_path):
    data = load_dataset("files", write(tmp_path, suffix, {"x": [1, 2, 3], "label": ["dog", "ant", "dog"]}))
    assert data.classes == ("ant", "dog")
    assert data.y.tolist() == [1, 0, 1]
    assert data.num_classes == 2


@FORMATS
@pytest.mark.parametrize("name", ["__index_level_0__", "", "Unnamed: 0"])
def test_row_numbers_of_pandas_are_no_input(suffix, name, tmp_path):
    path = write(tmp_path, suffix, {name: [7, 8], "a": [0.5, 2.5], "label": [1, 0]})
    data = load_dataset("files", path)
    assert (data.columns, data.x.tolist()) == (("a",), [[0.5], [2.5]])
    again = load_dataset("files", path)  # from the cache
    assert data.remarks == again.remarks
    assert f"column {name or 'without a name'} is taken for row numbers" in "".join(data.remarks)
    if name:
        named = load_dataset("files", path, columns=DataColumns(f"{name},a"))
        assert named.x.tolist() == [[7, 0.5], [8, 2.5]]


def test_what_pandas_writes_has_no_row_numbers(tmp_path):
    frame = pd.DataFrame({"a": [0.5, 2.5, 1.0], "label": [1, 0, 1]})[1:]
    frame.to_csv(tmp_path / "own.csv")
    frame.to_parquet(tmp_path / "own.parquet")
    for suffix in ("csv", "parquet"):
        assert load_dataset("files", str(tmp_path / f"own.{suffix}")).x.tolist() == [[2.5], [1.0]]


def test_a_table_of_dictionary_encoded_names(tmp_path):
    column = pa.array(["dog", "ant"]).dictionary_encode()
    assert load_dataset("files", write(tmp_path, "parquet", {"x": [1, 2], "label": column})).classes == (
        "ant",
        "dog",
    )


@FORMATS
def test_a_blank_is_a_class_and_no_natural_id(tmp_path, suffix):
    path = write(tmp_path, suffix, {"x": [1, 2], "label": ["a", " "], "who": ["Ada", " "]})
    assert load_dataset("files", path, columns=DataColumns(inputs="x")).classes == (" ", "a")
    with pytest.raises(DataError, match="column 'who' has 1 empty cells; all must be filled"):
        load_dataset("files", path, columns=DataColumns(group="who"))


@FORMATS
@pytest.mark.parametrize(
    ("columns", "text"),
    [
        ({"x": [1, 2]}, "needs a column 'label' and others, each name once (found: x)"),
        ({"label": [1, 2]}, "needs a column 'label' and others, each name once (found: label)"),
        ({"x": [1.0, None], "label": [0, 1]}, "column 'x' has 1 empty cells; all must be filled"),
        ({"x": [1, 2], "label": [0, None]}, "column 'label' has 1 empty cells; all must be filled"),
        ({"x": [1, 2, 3], "label": ["a", "", "  "]}, "column 'label' has 1 empty cells; all must be filled"),
        ({"x": ["7", "Smith"], "label": [0, 1]}, "column 'x' has type string; numbers are needed"),
        ({"x": [1e39, 0], "label": [0, 1]}, "column 'x' has values that are not finite in float32"),
        (
            {"x": [1, 2], "label": [0.5, float("inf")]},
            "column 'label' has values that are not finite in float32; all must be finite",
        ),
        (
            {"x": [1, 2], "label": [-1, 1]},
            "column 'label' has a label below 0; whole numbers from 0 are needed",
        ),
    ],
)
def test_a_table_that_is_wrong(suffix, columns, text, tmp_path):
    path = write(tmp_path, suffix, columns)
    assert refused(path).startswith(f"data-path = {path!r}: {text}")


def test_no_message_quotes_a_value(tmp_path):
    (tmp_path / "a.csv").write_text("x,label\n1,0\nSmith,born 1970,HIV\n")
    assert refused(tmp_path / "a.csv").endswith("can't be read as csv (Row #3: Expected 2 columns, got 3)")
    (tmp_path / "b.parquet").write_text("Smith")
    assert refused(tmp_path / "b.parquet").endswith("can't be read as parquet (ArrowInvalid)")
    (tmp_path / "c.csv").write_text("")
    assert refused(tmp_path / "c.csv").endswith("is empty")
    (tmp_path / "d.csv").write_text("x,label\n")
    assert refused(tmp_path / "d.csv").endswith("has no rows; at least one is needed")
    (tmp_path / "e.csv").write_text("x,x,label\n1,2,0\n")
    assert "each name once (found: x, x, label)" in refused(tmp_path / "e.csv")


def test_other_files(tmp_path):
    (tmp_path / "a.xlsx").write_text("")
    assert refused(tmp_path / "a.xlsx").endswith(
        "is in no known format; allowed: a .npz, .csv, .tsv or .parquet file, a folder of images by class, or one "
        "with a table for each client"
    )
    assert "no such file or folder; 'files' is to be read from there" in refused(tmp_path / "b.csv")
    assert refused("").startswith("data-path = '': 'files' needs a path: a .npz, ")
    np.savez(tmp_path / "c.npz", x_train=np.zeros((3, 4)), y_train=np.arange(3))
    assert load_dataset("files", str(tmp_path / "c.npz")).input_shape == (4,)


# Images ------------------------------------------------------------------------------------------------------


def test_grey_images_in_folders_named_by_number(tmp_path):
    pixels = np.arange(12, dtype=np.uint8).reshape(3, 4)
    save_image(tmp_path / "7" / "b.png", pixels)
    save_image(tmp_path / "7" / "a.PNG", pixels + 1)
    save_image(tmp_path / "10" / "c.png", pixels + 2)
    (tmp_path / "7" / "notes.txt").write_text("not an image")
    (tmp_path / ".hidden").mkdir()
    data = load_dataset("files", str(tmp_path))
    # In the order of the folders' numbers, then the files' names: 7/a, 7/b, 10/c.
    assert data.x.tolist() == [[(pixels + add).tolist()] for add in (1, 0, 2)]
    assert data.y.tolist() == [7, 7, 10]
    assert (data.num_train, data.num_classes, data.kind, data.scale) == (3, 11, "image", 1 / 255)
    assert (data.classes, data.x.dtype) == ((), np.uint8)


def test_colour_images_by_class_with_test_images(tmp_path):
    pixels = np.arange(36, dtype=np.uint8).reshape(3, 4, 3)
    save_image(tmp_path / "train" / "dog" / "1.png", pixels)
    save_image(tmp_path / "train" / "ant" / "1.png", pixels + 1, "RGBA")
    save_image(tmp_path / "test" / "dog" / "2.png", pixels + 2)
    data = load_dataset("files", str(tmp_path))
    assert data.classes == ("ant", "dog")
    assert data.y.tolist() == [0, 1, 1]
    assert data.num_train == 2
    assert data.x[2].tolist() == (pixels + 2).transpose(2, 0, 1).tolist()


def test_a_changed_folder_is_read_again(tmp_path):
    pixels = np.zeros((3, 4), np.uint8)
    save_image(tmp_path / "a" / "1.png", pixels)
    assert load_dataset("files", str(tmp_path)).classes == ("a",)
    save_image(tmp_path / "b" / "1.png", pixels)
    assert load_dataset("files", str(tmp_path)).classes == ("a", "b")
    assert load_dataset("files", str(tmp_path)).classes == ("a", "b")  # from the cache


def test_a_link_to_nothing_is_named(tmp_path):
    save_image(tmp_path / "a" / "1.png", np.zeros((3, 4), np.uint8))
    link = tmp_path / "a" / "2.png"
    link.symlink_to(tmp_path / "nothing.png")
    assert refused(tmp_path) == f"data-path = {str(link)!r}: can't be read (FileNotFoundError)"


def test_images_that_are_wrong(tmp_path):
    grey = np.zeros((3, 4), np.uint8)
    assert "has no folders, one for each class with its images" in refused(tmp_path)
    save_image(tmp_path / "a" / "1.png", grey)
    save_image(tmp_path / "b" / "1.png", np.zeros((4, 4), np.uint8))
    save_image(tmp_path / "b" / "2.png", np.zeros((3, 4, 3), np.uint8))
    Image.fromarray(np.zeros((3, 4), np.uint16)).save(tmp_path / "b" / "5.png")
    (tmp_path / "b" / "3.png").write_text("Smith")
    (tmp_path / "b" / "4.jpg").write_bytes((tmp_path / "a" / "1.png").read_bytes()[:40])
    assert refused(tmp_path) == (
        f"data-path = {str(tmp_path)!r}: 2 images can't be read: 'b/3.png', 'b/4.jpg'; "
        "1 images have more than 8 bits a pixel: 'b/5.png'; "
        "images have the sizes 3x4 (2), 4x4 (1), height x width; image-size scales them to one; "
        "2 images are grey and 1 in colour; image-mode = 'grey' or 'colour' makes them alike"
    )
    save_image(tmp_path / "train" / "a" / "1.png", grey)
    save_image(tmp_path / "test" / "c" / "1.png", grey)
    assert "has the class 'c', which train hasn't" in refused(tmp_path)


def test_a_class_without_images_and_files_that_are_left_out_are_said(tmp_path):
    grey = np.zeros((3, 4), np.uint8)
    for name in ("a/1.png", "a/more/2.png", "2.png"):
        save_image(tmp_path / name, grey)
    (tmp_path / "b").mkdir()
    (tmp_path / "a" / "1.heic").write_text("")
    for hidden in (".hidden", "._1.png", ".ipynb_checkpoints/1.png"):  # of macOS and Jupyter
        (tmp_path / "a" / hidden).parent.mkdir(exist_ok=True)
        (tmp_path / "a" / hidden).write_text("")
    assert look_at_images(tmp_path).damaged == []
    data = load_dataset("files", str(tmp_path))
    assert (data.classes, data.y.tolist()) == (("a", "b"), [0])
    assert data.remarks == (
        "the class folders 'b' have no images",
        "2 images lie elsewhere than in the folders of classes and are left out, such as '2.png'",
        "1 files in the folders of classes are no images that are read: .heic (1)",
    )
    (tmp_path / "a" / "1.png").unlink()
    assert refused(tmp_path).startswith(
        f"data-path = {str(tmp_path)!r}: has no images in the folders of its classes; allowed: .png, "
    )


PHOTO = np.arange(2 * 3 * 3, dtype=np.uint8).reshape(2, 3, 3) * 10


@pytest.mark.parametrize(
    ("orientation", "upright"),
    # What a viewer shows, by the definition of the tag: 6 is to be turned to the right, 8 to the left, 3 upside down.
    [
        (1, PHOTO),
        (6, np.rot90(PHOTO, -1)),
        (8, np.rot90(PHOTO, 1)),
        (3, np.rot90(PHOTO, 2)),
        (2, PHOTO[:, ::-1]),
    ],
)
def test_photos_are_turned_as_their_orientation_says(tmp_path, orientation, upright):
    exif = Image.Exif()
    exif[0x0112] = orientation
    for name in "ab":
        (tmp_path / "own" / name).mkdir(parents=True)
        Image.fromarray(PHOTO).save(tmp_path / "own" / name / "1.png", exif=exif)
    pixels = load_dataset("files", str(tmp_path / "own")).x[0]
    assert pixels.tolist() == upright.transpose(2, 0, 1).tolist()
    assert load_dataset(f"hf:{tmp_path / 'own'}").x[0].tolist() == pixels.tolist()


def test_images_are_scaled_and_converted_to_one_form(tmp_path):
    save_image(tmp_path / "a" / "1.png", np.full((2, 2), 100, np.uint8))
    save_image(tmp_path / "a" / "2.png", np.full((6, 4, 3), (200, 100, 0), np.uint8))
    checks = np.kron(np.array([[0, 200], [100, 40]]), np.ones((3, 2))).astype(np.uint8)
    save_image(tmp_path / "b" / "3.png", checks)
    data = load_dataset("files", str(tmp_path), columns=DataColumns(image_size="2", image_mode="colour"))
    assert (data.input_shape, data.x.dtype, data.num_train) == ((3, 2, 2), np.uint8, 3)
    assert data.x[0].tolist() == np.full((3, 2, 2), 100).tolist()
    assert data.x[1, :, 0, 0].tolist() == [200, 100, 0]
    grey = load_dataset("files", str(tmp_path), columns=DataColumns(image_size="6x4", image_mode="grey"))
    assert grey.input_shape == (1, 6, 4)
    # ITU-R 601-2: 0.299 R + 0.587 G + 0.114 B.
    assert grey.x[1].tolist() == np.full((1, 6, 4), round(0.299 * 200 + 0.587 * 100)).tolist()
    assert grey.x[2, 0].tolist() == checks.tolist()


def test_natural_ids_of_a_folder_of_images(tmp_path):
    for name, value in (("a/1", 1), ("a/2", 2), ("b/1", 3)):
        save_image(tmp_path / f"{name}.png", np.full((3, 4), value, np.uint8))
    columns = DataColumns(group="writer")

    def found(lines: str) -> str:
        (tmp_path / "metadata.csv").write_text(lines)
        with pytest.raises(DataError) as caught:
            load_dataset("files", str(tmp_path), columns=columns)
        return str(caught.value)

    with pytest.raises(
        DataError, match=r"has no metadata\.csv, for the column 'writer' that group-column names"
    ):
        load_dataset("files", str(tmp_path), columns=columns)
    assert found("file_name,who\na/1.png,x\n").endswith(
        "needs the columns 'file_name' and 'writer', has no 'writer' (found: file_name, who)"
    )
    assert found("file_name,writer\na/1.png,x\n").endswith("says nothing of 2 of 3 images; all are needed")
    (tmp_path / "metadata.csv").write_text("file_name,writer\nb/1.png,x\na/1.png,y\na/2.png,x\n")
    data = load_dataset("files", str(tmp_path), columns=columns)
    assert data.groups is not None
    assert (data.x[:, 0, 0, 0].tolist(), data.groups.tolist()) == ([1, 2, 3], [1, 0, 0])
    assert load_dataset("files", str(tmp_path)).groups is None
