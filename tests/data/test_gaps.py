"""Tables with empty cells and texts, and a folder with a table for each client."""

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import fedapp
from fedapp.config import ConfigError
from fedapp.data import DataError, load_dataset
from fedapp.data.dataset import DataColumns, Dataset
from fedapp.data.moments import Sums
from fedapp.data.schema import Schema
from fedapp.data.standardize import sums_of

FRAME = pd.DataFrame(
    {
        "age": [1.0, None, 3.0, 8.0],
        "colour": ["red", "blue", None, "red"],
        "smokes": [True, False, None, True],
        "label": ["a", "b", "a", "b"],
    }
)


def loaded(path: Path, frame: pd.DataFrame = FRAME, **columns: Any) -> Dataset:
    frame.to_csv(path, index=False) if path.suffix == ".csv" else frame.to_parquet(path, index=False)
    return load_dataset("files", str(path), columns=DataColumns(**columns))


@pytest.fixture(params=["gaps.csv", "gaps.parquet"])
def path(request, tmp_path):
    return tmp_path / str(request.param)


def test_texts_become_columns_as_pandas_makes_them(path):
    filled = FRAME.drop(columns="smokes").dropna()
    data = loaded(path, filled, encode=True)
    assert data.columns == ("age", "colour=red")
    both = loaded(path, FRAME[["age", "colour", "label"]], encode=True, missing="mean")
    assert both.columns == ("age", "colour=blue", "colour=red")
    np.testing.assert_array_equal(both.x[:, 1:], pd.get_dummies(FRAME["colour"]).to_numpy())
    with pytest.raises(DataError, match="encode = true makes columns of 0 and 1 of texts"):
        loaded(path, filled)


def test_an_empty_cell_is_no_text_that_says_none(path):
    frame = pd.DataFrame({"c": ["None", None, "a"], "label": [0, 1, 0]})
    data = loaded(path, frame, encode=True, missing="mean")
    assert data.columns == ("c=a", "c=None")
    assert data.x.tolist() == [[0, 1], [0, 0], [1, 0]]


def test_rows_with_an_empty_cell_are_dropped(path):
    data = loaded(path, encode=True, missing="drop")
    assert data.x[:, 0].tolist() == [1, 8]
    assert data.y.tolist() == [0, 1]
    with pytest.raises(DataError, match=r"has 1 empty cells; all must be filled \(missing = 'drop'"):
        loaded(path, encode=True)
    with pytest.raises(DataError, match="has an empty cell in every row"):
        loaded(path, pd.DataFrame({"x": [None, 1.0], "z": [1.0, None], "label": [0, 1]}), missing="drop")


@pytest.mark.parametrize("labels", [[0, None, 1, 1], ["a", None, "b", "b"], [0.5, None, 1.5, 2]])
def test_rows_without_a_label_or_a_natural_id_are_left_out_and_counted(path, labels):
    sites = ["Bern", "Bern", None, "Basel"]
    frame = pd.DataFrame({"x": [None, 2.0, 3.0, 4.0], "site": sites, "label": labels})
    data = loaded(path, frame, missing="mean", group="site")
    assert (data.x[1, 0], np.isnan(data.x[0, 0]), len(data.x)) == (4, True, 2)
    assert data.y.ravel().tolist() == ([0, 1] if labels[0] in (0, "a") else [0.5, 2])
    assert [data.group_names[each] for each in data.groups] == ["Bern", "Basel"]
    assert "2 of 4 rows have an empty cell (label: 1, site: 1) and are left out" in data.remarks
    never = r"column 'label' has 1 empty cells; all must be filled \(missing = 'drop' or 'mean' leaves out "
    with pytest.raises(DataError, match=never):
        loaded(path, frame.dropna(subset="x"), group="site")


def test_the_mean_is_that_of_training_rows_alone(tmp_path):
    data = loaded(tmp_path / "a.csv", FRAME[["age", "label"]], missing="mean")
    moments = sums_of(data, np.array([0, 1, 2])).moments()  # row 3 is for testing
    assert moments.mean == (2.0,)
    assert moments.std == (1.0,)
    ready = Dataset(**{**vars(data), "moments": moments}).inputs(np.arange(4), "standardize")
    assert ready.tolist() == [[-1], [0], [1], [6]]


def test_sums_with_gaps_are_merged_as_if_pooled():
    x = np.random.default_rng(0).normal(5, 2, (40, 3))
    x[::3, 0] = np.nan
    x[:10, 1] = np.nan  # all of the first client's
    merged = Sums.merged([Sums.of([x[:10]]), Sums.of([x[10:25], x[25:]])]).moments()
    np.testing.assert_allclose(merged.mean, np.nanmean(x, axis=0), rtol=1e-13)
    np.testing.assert_allclose(merged.std, np.nanstd(x, axis=0), rtol=1e-12)


def test_a_client_may_lack_a_text_but_not_have_another(tmp_path):
    model = Schema.of(loaded(tmp_path / "all.csv", FRAME, encode=True, missing="mean"))
    few = FRAME.iloc[[0, 3]]
    own = model.fit(loaded(tmp_path / "few.csv", few, encode=True))
    assert own.columns == model.columns == ("age", "colour=blue", "colour=red", "smokes")
    assert own.x.tolist() == [[1, 0, 1, 1], [8, 0, 1, 1]]
    other = loaded(tmp_path / "other.csv", few.assign(colour="green"), encode=True)
    with pytest.raises(DataError, match="this client's"):
        model.fit(other)
    with pytest.raises(DataError, match="this client's data are vector"):
        model.fit(loaded(tmp_path / "less.csv", few.drop(columns="age"), encode=True))


@pytest.fixture
def hospitals(tmp_path):
    rng = np.random.default_rng(1)
    folder = tmp_path / "hospitals"
    folder.mkdir()
    for name, rows in (("b.csv", 30), ("a.parquet", 20), ("c.csv", 25)):
        x = rng.normal(size=rows)
        frame = pd.DataFrame({"x": x, "site": rng.choice(["n", "s"], rows), "label": (x > 0).astype(int)})
        frame.loc[::5, "x"] = np.nan
        frame.to_csv(folder / name, index=False) if name[2:] == "csv" else frame.to_parquet(folder / name)
    return folder


def test_each_table_of_a_folder_is_a_client(hospitals, caplog):
    (hospitals / "._a.csv").write_bytes(b"\0\5\x16\7")  # as macOS writes beside a.csv
    keys: dict[str, Any] = {
        "dataset": "files",
        "data_path": hospitals,
        "model": "logistic",
        "missing": "mean",
        "encode": True,
        "normalize": "standardize",
        "num_server_rounds": 1,
        "num_clients": 3,
        "results_dir": hospitals.parent / "results",
        "quiet": True,
        "figures": False,
    }
    run = fedapp.run(**keys, partitioner="natural", test_on="own")
    clients = np.diff(np.load(run.path / "partition.npz")["client_offsets"])
    assert clients.tolist() == [16, 24, 20]  # four fifths of 20 in a, 30 in b, 25 in c
    with caplog.at_level(logging.WARNING):
        fedapp.run(**keys)
    assert "the 3 tables of data-path are divided anew" in caplog.text


def test_tables_of_a_folder_have_the_same_columns(hospitals):
    pd.DataFrame({"x": [1.0], "label": [0]}).to_csv(hospitals / "d.csv", index=False)
    with pytest.raises(
        DataError, match=r"has other columns than a\.parquet, such as 'site'; all need the same"
    ):
        load_dataset("files", str(hospitals), columns=DataColumns(encode=True, missing="mean"))


def test_the_mean_needs_standardized_inputs():
    with pytest.raises(
        ConfigError, match=r"missing = 'mean' with .*: the mean of all clients' training rows is known with"
    ):
        fedapp.run(dataset=FRAME, missing="mean")


def test_a_frame_with_gaps_and_texts_is_trained_on(tmp_path):
    frame = pd.concat([FRAME] * 20, ignore_index=True)
    run = fedapp.run(
        dataset=frame,
        missing="mean",
        encode=True,
        normalize="standardize",
        model="logistic",
        num_server_rounds=2,
        num_clients=2,
        results_dir=tmp_path,
        quiet=True,
        figures=False,
    )
    assert np.isfinite(run.summary["loss"])
    assert run.summary["unread-keys"] == []
