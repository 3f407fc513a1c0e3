"""Targets: classes or numbers, as the data are or as they are asked for; and strata, which partitioners take."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from pyarrow import csv

from fedapp.data import DataError, Dataset, Division, load_dataset, make_partition
from fedapp.data.dataset import DataColumns
from fedapp.data.remarks import remarks
from tests.data.sources import message, save

X = np.zeros((4, 2))


def table(path: Path, columns: dict[str, Any]) -> str:
    csv.write_csv(pa.table(columns), path)
    return str(path)


@pytest.mark.parametrize(
    ("labels", "asked", "targets", "values"),
    [
        ([0, 1, 2, 1], None, "classes", [0, 1, 2, 1]),
        ([True, False, True, True], None, "classes", [1, 0, 1, 1]),
        ([[0], [1], [2], [1]], None, "classes", [0, 1, 2, 1]),
        ([0, 1, 2, 1], "classes", "classes", [0, 1, 2, 1]),
        ([0, 1, 2, 1], "numbers", "numbers", [[0], [1], [2], [1]]),
        ([0, -1, 2, 1], "numbers", "numbers", [[0], [-1], [2], [1]]),
        ([0.5, 1, 2, 1], None, "numbers", [[0.5], [1], [2], [1]]),
        ([[0, 1]] * 4, "numbers", "numbers", [[0, 1]] * 4),
        ([[True, False]] * 4, None, "numbers", [[1, 0]] * 4),
        ([[0, 1]] * 4, None, "classes", [[0, 1]] * 4),
        ([[[0, 2], [-100, 1]]] * 4, "classes", "classes", [[[0, 2], [-100, 1]]] * 4),
        ([[[0.5, 2]]] * 4, None, "numbers", [[[0.5, 2]]] * 4),
    ],
)
def test_targets_of_an_npz(labels, asked, targets, values, tmp_path):
    path = save(tmp_path / "a.npz", {"x_train": X, "y_train": np.array(labels)})
    data = load_dataset("npz", path, targets=asked)
    assert (data.targets, data.y.tolist()) == (targets, values)
    assert data.y.dtype == (np.int64 if targets == "classes" else np.float32)
    assert (data.num_classes, data.num_outputs) == (
        (3, 3)
        if np.max(labels) > 1 and targets == "classes"
        else (2, 2)
        if targets == "classes"
        else (0, len(values[0]))
    )


def test_tokens_of_a_large_vocabulary_are_labels_and_row_numbers_are_none(tmp_path):
    tokens = np.arange(40).reshape(8, 5) * 1000
    data = load_dataset("npz", save(tmp_path / "a.npz", {"x_train": tokens, "y_train": tokens + 1}))
    assert (data.num_classes, data.num_outputs, data.y[7, 4]) == (39002, 39002, 39001)
    partition = make_partition(data, 2, Division(partitioner="iid", **KEYS))
    assert not any("of 39002 classes" in line for line in remarks(data, partition))
    path = save(tmp_path / "b.npz", {"x_train": X, "y_train": np.arange(4) * 1000})
    assert "has the label 3000, but 4 different ones" in message("npz", path)


def test_classes_refuse_numbers_and_names_are_no_numbers(tmp_path):
    path = save(tmp_path / "a.npz", {"x_train": X, "y_train": np.array([0, 1.5, 1, 0])})
    expected = (
        f"data-path = {path!r}: y_train has type float64 with values that aren't whole; whole numbers or names are "
        "needed for classes"
    )
    assert message("npz", path, targets="classes") == expected
    load_dataset("npz", path)  # what is in the cache as numbers is still refused as classes
    assert message("npz", path, targets="classes") == expected
    path = table(tmp_path / "a.csv", {"x": [1, 2], "label": ["b", "a"]})
    assert message("files", path, targets="numbers").endswith(
        "column 'label' has type string; numbers are needed"
    )
    assert message("shakespeare", str(play(tmp_path)), targets="numbers") == (
        "dataset = 'shakespeare': its targets are characters; the loss needs numbers"
    )


@pytest.mark.parametrize("labels", [[0.0, 2.0, 1.0, 0.0], np.array([0, 2, 1, 0], np.longdouble)])
def test_whole_numbers_of_any_type_are_classes_where_classes_are_needed(tmp_path, labels):
    npz = save(tmp_path / "a.npz", {"x_train": X, "y_train": np.array(labels)})
    csv = tmp_path / "a.csv"
    csv.write_text("x,label\n1,0.0\n2,2.0\n3,1.0\n4,0.0\n")
    for name, path in (("npz", npz), ("files", str(csv))):
        data = load_dataset(name, path, targets="classes")
        assert (data.y.tolist(), data.y.dtype, data.num_classes) == ([0, 2, 1, 0], np.int64, 3)
        assert load_dataset(name, path).targets == "numbers"  # a loss of one's own gets them as they are


def play(folder: Path) -> Path:
    path = folder / "plays.txt"
    path.write_text(f"=== PLAY: One ===\n\nA:\n{'x' * 100}\n", "utf-8")
    return path


def test_digits_as_numbers():
    numbers, classes = load_dataset("digits", targets="numbers"), load_dataset("digits", targets="classes")
    assert numbers.y[:, 0].tolist() == classes.y.tolist()
    assert (numbers.targets, numbers.num_classes, numbers.num_outputs) == ("numbers", 0, 1)


def test_columns_of_a_table(tmp_path):
    path = table(
        tmp_path / "a.csv", {"u": [1, 2], "cost": [0.5, 1.5], "sick": [1, 0], "v": [3, 4], "ward": ["b", "a"]}
    )
    data = load_dataset("files", path, columns=DataColumns("", "cost,sick", "ward"))
    assert data.y.tolist() == [[0.5, 1], [1.5, 0]]
    assert (data.columns, data.groups.tolist()) == (("u", "v"), [1, 0])  # type: ignore[union-attr]
    chosen = load_dataset("files", path, columns=DataColumns("v", "sick"))
    assert (chosen.columns, chosen.x.tolist(), chosen.y.tolist()) == (("v",), [[3], [4]], [1, 0])
    assert message("files", path, columns=DataColumns("", "lost")).endswith(
        "needs a column 'lost' and others, each name once (found: u, cost, sick, v, ward); label-column names it"
    )
    assert message("files", path, columns=DataColumns("", "sick", "who")).endswith("; group-column names it")
    assert message("files", path, columns=DataColumns("w", "sick")).endswith("; input-column names it")
    for columns, which in (
        (DataColumns("", "cost,cost"), "label-column = 'cost"),
        (DataColumns("u,v,u", "sick"), "input"),
    ):
        said = message("files", path, columns=columns)
        assert f"needs each column once; {which}" in said
        assert said.endswith("' names one twice")
    assert "column 'u' is to be two things" in message("files", path, columns=DataColumns("u", "u"))
    assert "column 'ward' has type string; numbers are needed" in message(
        "files", path, columns=DataColumns("", "sick")
    )


KEYS: dict[str, Any] = {
    "class_imbalance": 0.0,
    "data_imbalance": 0.0,
    "min_samples": 2,
    "dirichlet_alpha": 1.0,
    "test_on": "held-out",
    "test_fraction": 0.1,
    "seed": 0,
}
SKEWED = KEYS | {"class_imbalance": 50.0, "dirichlet_alpha": 0.02, "test_fraction": 0.2, "seed": 3}


# Strata ------------------------------------------------------------------------------------------------------


def with_targets(y: np.ndarray) -> Dataset:
    x = np.zeros((len(y), 1), np.float32)
    return Dataset("own", x, y.astype(np.float32), None, len(y), 0, "vector", 1.0, targets="numbers")


def test_strata_are_tenths():
    rng = np.random.default_rng(0)
    y = rng.normal(size=(1000, 2))
    data = with_targets(y)
    assert np.bincount(data.strata).tolist() == [100] * 10
    order = np.argsort(y[:, 0])
    assert (np.diff(data.strata[order]) >= 0).all()
    assert with_targets(np.full((5, 1), 3.0)).strata.tolist() == [0] * 5
    assert set(with_targets(np.array([[0.0], [1], [1], [0], [1]])).strata.tolist()) == {0, 1}


@given(
    hnp.arrays(np.float32, st.tuples(st.integers(1, 60), st.just(1)), elements=st.floats(-1e3, 1e3, width=32))
)
def test_equal_targets_are_in_one_stratum_and_larger_ones_in_none_before(y):
    strata = with_targets(y).strata
    assert sorted(set(strata.tolist())) == list(range(strata.max() + 1))
    assert strata.max() < 10
    for a, b in zip(
        np.argsort(y[:, 0], kind="stable")[:-1], np.argsort(y[:, 0], kind="stable")[1:], strict=True
    ):
        assert strata[a] <= strata[b]
        assert y[a, 0] < y[b, 0] or strata[a] == strata[b]


@pytest.mark.parametrize("partitioner", ["label-quantity-skew", "dirichlet", "shards", "iid"])
def test_numbers_are_divided_by_tenths(partitioner):
    y = np.random.default_rng(1).normal(size=(2000, 1))
    partition = make_partition(with_targets(y), 10, Division(partitioner=partitioner, **SKEWED))
    assert len(partition.client_indices) == 1600
    spread = np.mean([y[partition.client(i)].std() for i in range(10)])
    # A skewed client's targets lie together; an iid one's are spread like all.
    assert spread > 0.9 if partitioner == "iid" else spread < 0.75


def test_constant_targets_are_one_stratum_that_is_divided_evenly():
    partition = make_partition(
        with_targets(np.ones((50, 1))), 4, Division(partitioner="label-quantity-skew", **SKEWED)
    )
    assert partition.sizes.tolist() == [10] * 4


@pytest.mark.parametrize(
    ("y", "said"),
    [
        (np.full((60, 1), 0.5), ["all training rows have the same target: there is nothing to learn"]),
        (
            np.stack([np.full(60, 0.5), np.arange(60.0)], 1),
            ["all training rows have the same target in column 0 of targets: there is nothing to learn"],
        ),
        (np.arange(60.0)[:, None] / 7, []),
        (
            np.tile(np.arange(3.0), 20)[:, None],
            ["the labels 0 to 2 are taken as numbers, as the loss takes no classes"],
        ),
    ],
)
def test_odd_targets_are_remarked_on(y, said):
    data = with_targets(y)
    assert remarks(data, make_partition(data, 3, Division(partitioner="iid", **KEYS))) == said


def test_bytes_of_vectors_are_scaled_and_that_is_said(tmp_path):
    x, y = np.arange(80).reshape(40, 2), np.arange(40) % 2
    said = "inputs of type uint8 are scaled to [0, 1], as the bytes of images are; another integer type keeps them"
    for dtype, expected in ((np.uint8, [said]), (np.int16, [])):
        path = save(tmp_path / f"{dtype.__name__}.npz", {"x_train": x.astype(dtype), "y_train": y})
        data = load_dataset("npz", path)
        assert remarks(data, make_partition(data, 3, Division(partitioner="iid", **KEYS))) == expected


def test_a_division_by_groups_of_a_table(tmp_path):
    wards = ["a"] * 5 + ["b"] * 4 + ["c"] * 1
    path = table(tmp_path / "a.csv", {"x": range(10), "label": [0, 1] * 5, "ward": wards})
    data = load_dataset("files", path, columns=DataColumns(group="ward"))
    partition = make_partition(data, 2, Division(partitioner="natural", **KEYS))
    assert data.groups is not None
    for client in range(2):
        assert len({wards[row] for row in partition.client(client)}) == 1
    with pytest.raises(
        DataError, match="has 2 natural clients with at least min-samples = 2 rows; at most 2"
    ):
        make_partition(data, 3, Division(partitioner="natural", **KEYS))
