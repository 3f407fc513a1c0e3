"""npz files of the user's own: what they may hold, and what is said of those that hold something else."""

import pickle
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fedapp.data import load_dataset
from fedapp.data.standardize import same_size, sums_of
from tests.data.sources import message, save


@pytest.mark.parametrize(
    ("shape", "expected", "kind"),
    [
        ((4, 5), (5,), "vector"),
        ((4, 6, 7), (1, 6, 7), "image"),
        ((4, 6, 7, 3), (3, 6, 7), "image"),
        ((4, 6, 7, 1), (1, 6, 7), "image"),
        ((4, 3, 6, 7), (3, 6, 7), "image"),
        ((4, 1, 6, 3), (1, 6, 3), "image"),
        ((4, 8, 6, 7), (8, 6, 7), "image"),
    ],
)
@pytest.mark.parametrize("dtype", [np.uint8, np.float64, np.int16, np.float16])
def test_npz_shapes_and_types(tmp_path, shape, expected, kind, dtype):
    if len(shape) == 3 and dtype is not np.uint8:
        expected, kind = shape[1:], "series"
    x = (np.arange(np.prod(shape)) % 200).reshape(shape).astype(dtype)
    arrays = {"x_train": x[:3], "y_train": np.array([0, 4, 1]), "x_test": x[3:], "y_test": np.array([2])}
    data = load_dataset("npz", save(tmp_path / "own.npz", arrays))
    assert data.input_shape == expected
    assert (data.kind, data.num_train, data.num_classes, len(data.x)) == (kind, 3, 5, 4)
    assert data.x.dtype == (np.uint8 if dtype is np.uint8 else np.float32)
    assert data.scale == (1 / 255 if dtype is np.uint8 else 1.0)
    assert data.x.sum() == x.sum(dtype=np.float64)
    if expected == (3, 6, 7) and shape[-1] == 3:
        assert np.array_equal(data.x[0, 2], x[0, :, :, 2])


@pytest.mark.parametrize(("shape", "says"), [((6, 7, 4), True), ((6, 7, 2), True), ((8, 6, 6), False)])
def test_channels_that_may_be_meant_otherwise_are_told(tmp_path, shape, says):
    arrays = {"x_train": np.ones((3, *shape)), "y_train": np.array([0, 4, 1])}
    path = save(tmp_path / "own.npz", arrays)
    for _ in range(2):  # the second time from the cache
        data = load_dataset("npz", path)
        assert data.input_shape == shape
        assert (f"taken for {shape[0]} channels of {shape[1]}x{shape[2]}" in "".join(data.remarks)) is says


@pytest.mark.parametrize(
    ("dtype", "kind", "shape"), [(np.float64, "series", (10, 2)), (np.uint8, "image", (1, 10, 2))]
)
def test_series_are_passed_as_they_are(tmp_path, dtype, kind, shape):
    arrays = {"x_train": np.ones((3, 10, 2), dtype), "y_train": np.array([0, 4, 1])}
    data = load_dataset("npz", save(tmp_path / "own.npz", arrays))
    assert (data.kind, data.input_shape, data.remarks) == (kind, shape, ())


def test_a_series_has_a_mean_of_each_feature(tmp_path):
    """Two series of two steps: the first feature is 1, 3, 5, 7, the second 10 throughout."""
    x = np.array([[[1, 10], [3, 10]], [[5, 10], [7, 10]]])
    data = load_dataset("npz", save(tmp_path / "own.npz", {"x_train": x, "y_train": np.arange(2)}))
    sums = sums_of(data, np.arange(2))
    assert same_size(sums, data)
    assert (sums.count.tolist(), sums.total.tolist()) == ([4, 4], [16, 40])
    moments = sums.moments()
    assert (moments.mean, moments.std) == ((4, 10), (np.sqrt(5), 1))
    found = replace(data, moments=moments).inputs(np.arange(2), "standardize")
    assert found == pytest.approx((x - [4, 10]) / [np.sqrt(5), 1], abs=1e-6)


def test_labels_that_are_names(tmp_path):
    arrays = {"x_train": X, "y_train": np.array(["b", "a", "b"]), "x_test": X, "y_test": np.array(["c"] * 3)}
    path = save(tmp_path / "own.npz", arrays)
    data = load_dataset("npz", path)
    assert (data.y.tolist(), data.classes, data.num_classes) == ([1, 0, 1, 2, 2, 2], ("a", "b", "c"), 3)
    assert "y_train has type <U1; numbers are needed" in message("npz", path, targets="numbers")
    assert "y_train has names; the numbers of the classes of mnist are needed" in message("mnist", path)


@pytest.mark.parametrize("key", ["group", "writer"])
def test_npz_groups(tmp_path, images, key):
    groups = {f"{key}_train": np.arange(30) // 3, f"{key}_test": np.arange(10, dtype=np.int16)}
    data = load_dataset("npz", save(tmp_path / "own.npz", images | groups))
    assert data.groups.tolist() == [*(np.arange(30) // 3), *range(10)]


X, Y = np.zeros((3, 2)), np.arange(3)


BAD_FILES: list[tuple[dict[str, Any], str]] = [
    ({"y_train": Y}, "has no array x_train; x_train and y_train are needed (found: y_train)"),
    ({"x_train": X}, "has no array y_train; x_train and y_train are needed (found: x_train)"),
    ({"x_train": X, "y_train": np.arange(4)}, "x_train has 3 rows, y_train has 4; they must match"),
    (
        {"x_train": X, "y_train": Y, "x_test": X},
        "has no array y_test; x_test and y_test are allowed only together",
    ),
    (
        {"x_train": X, "y_train": Y, "y_test": Y},
        "has no array x_test; x_test and y_test are allowed only together",
    ),
    (
        {"x_train": X, "y_train": Y, "x_test": np.zeros((3, 4)), "y_test": Y},
        "x_train has rows of shape (2,) and type float32, x_test rows of shape (4,) and type float32; "
        "they must match",
    ),
    (
        {"x_train": X, "y_train": Y, "x_test": X.astype(np.uint8), "y_test": Y},
        "x_train has rows of shape (2,) and type float32, x_test rows of shape (2,) and type uint8; "
        "they must match",
    ),
    (
        {"x_train": X[:0], "y_train": Y[:0]},
        "x_train has shape (0, 2); at least one row and one value per row are needed",
    ),
    (
        {"x_train": Y, "y_train": Y},
        "x_train has shape (3,); at least one row and one value per row are needed",
    ),
    (
        {"x_train": np.zeros((3, 1, 1, 1, 1)), "y_train": Y},
        "x_train has shape (3, 1, 1, 1, 1); allowed: (N, D), (N, T, F), (N, H, W), (N, C, H, W), (N, H, W, C)",
    ),
    (
        {"x_train": X.astype(complex), "y_train": Y},
        "x_train has type complex128; uint8, another integer type or floats are allowed",
    ),
    (
        {"x_train": np.full((3, 2), 2**24 + 1), "y_train": Y},
        "x_train has whole numbers beyond 16777216, which float32, the type of inputs, doesn't tell apart; smaller "
        "ones, or floats, are needed",
    ),
    (
        {"x_train": X, "y_train": np.array([["a"], ["b"], ["c"]])},
        "y_train has shape (3, 1); one name per row, shape (N,), is needed",
    ),
    (
        {"x_train": X, "y_train": Y, "group_train": Y[:, None]},
        "group_train has shape (3, 1); one value per row, shape (N,), is needed",
    ),
    (
        {"x_train": X, "y_train": np.array(["a", "b", ""])},
        "y_train has 1 empty names; all must be filled",
    ),
    (
        {"x_train": X, "y_train": Y, "x_test": X, "y_test": np.array(["a", "b", "c"])},
        "y_test has type <U1; numbers, or names for classes alone, are needed",
    ),
    (
        {"x_train": X + np.nan, "y_train": Y},
        "x_train has values that are not finite in float32; all must be finite",
    ),
    (
        {"x_train": X + 1e300, "y_train": Y},
        "x_train has values that are not finite in float32; all must be finite",
    ),
    (
        {"x_train": X, "y_train": Y * np.nan},
        "y_train has values that are not finite in float32; all must be finite",
    ),
    (
        {"x_train": X, "y_train": np.zeros((3, 0))},
        "y_train has shape (3, 0); (N,), or (N, ...) for several of a row, is needed",
    ),
    ({"x_train": X, "y_train": Y - 1}, "y_train has a label below 0; whole numbers from 0 are needed"),
    (
        {"x_train": X, "y_train": Y, "group_train": Y[:2]},
        "x_train has 3 rows, group_train has 2; they must match",
    ),
    (
        {"x_train": X, "y_train": Y, "group_train": X},
        "group_train has type float64; integers or names are needed",
    ),
    (
        {"x_train": X, "y_train": Y, "x_test": X, "y_test": Y, "group_train": Y},
        "natural ids are given for only one of train and test; give both or neither",
    ),
    (
        {"x_train": np.array([None] * 3), "y_train": Y},
        "can't be read as an npz file (ValueError: Object arrays cannot be loaded when allow_pickle=False)",
    ),
]


@pytest.mark.parametrize(("arrays", "problem"), BAD_FILES, ids=[problem[:40] for _, problem in BAD_FILES])
def test_npz_errors(tmp_path, arrays, problem):
    path = save(tmp_path / "x.npz", arrays)
    assert message("npz", path) == f"data-path = {path!r}: {problem}"


def test_files_that_are_no_npz(tmp_path, images):
    assert message("npz") == "data-path = '': 'npz' needs the path of an npz file with x_train and y_train"
    assert "no such file or folder; 'npz' is to be read from there" in message(
        "npz", str(tmp_path / "none.npz")
    )
    assert "no such file; an npz file with x_train and y_train is needed" in message("npz", str(tmp_path))
    path = tmp_path / "x.npz"
    path.write_bytes(pickle.dumps([1]))
    assert "is not an npz file (a zip of arrays, as numpy.savez writes it), or is damaged" in message(
        "npz", str(path)
    )
    np.savez_compressed(path, **images)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    assert "is not an npz file" in message("npz", str(path))
    middle = len(whole) // 4
    path.write_bytes(whole[:middle] + bytes(200) + whole[middle + 200 :])
    assert "can't be read as an npz file (" in message("npz", str(path))
