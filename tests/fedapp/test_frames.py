"""Data of types that no file holds, handed over in Python."""

from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas as pd
import pytest
import torch

from fedapp.api.values import as_values
from fedapp.config import ConfigError
from fedapp.data import load_dataset
from fedapp.data.dataset import DataColumns, Dataset

AGES = [25.0, 38.0, 52.0, 71.0]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDAPP_CACHE", str(tmp_path / "cache"))


def loaded(frame: pd.DataFrame, **columns: Any) -> Dataset:
    path = as_values({"dataset": frame})["data-path"]
    return load_dataset("files", str(Path(str(path))), columns=DataColumns(**columns))


def refused(given: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        as_values({"dataset": given})
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_intervals_are_categories():
    groups = pd.cut(AGES, [0, 40, 60, 90])
    assert loaded(pd.DataFrame({"x": AGES, "label": groups})).classes == ("(0, 40]", "(40, 60]", "(60, 90]")
    whole = pd.Series(pd.arrays.IntervalArray.from_tuples([(0, 1), (1, 2), (0, 1), (1, 2)]))
    for column in (groups, whole):
        data = loaded(pd.DataFrame({"x": AGES, "group": column, "label": [0, 1, 0, 1]}), encode=True)
        indicators = pd.get_dummies(pd.Series(column).astype(str))
        assert data.columns == ("x", *(f"group={name}" for name in indicators.columns))
        np.testing.assert_array_equal(data.x[:, 1:], indicators.to_numpy())


@pytest.mark.parametrize(
    "column",
    [
        np.array(AGES, np.longdouble),
        pd.arrays.SparseArray(AGES),
        pd.Categorical(AGES),
        pd.array(AGES, dtype="Float32"),
        np.array(AGES, np.float16),
    ],
)
def test_numbers_of_any_type_are_numbers(column):
    assert loaded(pd.DataFrame({"x": column, "label": [0, 1, 0, 1]})).x[:, 0].tolist() == AGES


def test_columns_that_no_file_holds_are_one_line():
    frame = pd.DataFrame({"x": AGES, "label": [0, 1, 0, 1]})
    assert refused(frame.assign(z=np.array(AGES) + 1j)) == (
        "dataset: column 'z' holds complex numbers; real ones are needed, such as its real and its imaginary part in "
        "columns of their own"
    )
    assert refused(frame.assign(z=[1, "a", 2, "b"])).startswith(
        "dataset: the table has a column that no file holds (Conversion failed for column z with type object; "
    )


class Stream(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
    """Rows one after the other."""

    def __iter__(self) -> Any:
        yield from [(torch.zeros(2), 0)] * 4


def test_rows_one_after_the_other_are_one_line():
    begin = (
        "dataset: is an IterableDataset, whose rows have no numbers by which they are divided over clients; "
    )
    end = "a Dataset with __getitem__ and __len__, or (x, y) of all its rows, is needed"
    for given in (Stream(), torch.utils.data.DataLoader(Stream())):
        assert refused(given) == begin + end
    rows = datasets.Dataset.from_dict({"x": AGES, "label": [0, 1, 0, 1]}).to_iterable_dataset()
    assert refused(rows) == begin + "Dataset.from_list(list(…)) has all its rows"


def test_several_columns_may_be_a_list():
    given = {
        "drop_column": ("patient", "admitted"),
        "input_column": ["age", "crp"],
        "missing_values": ["?", "-9"],
    }
    assert as_values(given) == {
        "drop-column": "patient,admitted",
        "input-column": "age,crp",
        "missing-values": "?,-9",
    }
