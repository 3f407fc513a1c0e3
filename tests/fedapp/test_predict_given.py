"""Predictions of what a run takes as data in Python, beside tables and files; and of labels of each position."""

import numpy as np
import pandas as pd
import pytest
import torch
from datasets import Dataset, DatasetDict, load_dataset
from PIL import Image
from torch.utils.data import DataLoader, TensorDataset

import fedapp
from fedapp.data import DataError

X = np.random.default_rng(0).normal(size=(60, 3)).astype(np.float32)
Y = (X[:, 0] > 0).astype(np.int64)


@pytest.fixture
def run(tmp_path):
    """Run one round over two clients."""
    keys = {
        "model": "logistic",
        "num_clients": 2,
        "num_server_rounds": 1,
        "partitioner": "iid",
        "quiet": True,
    }

    def made(**given):
        return fedapp.run(**keys | given, results_dir=tmp_path / "results")

    return made


def test_pairs_datasets_and_loaders_are_predicted_as_their_inputs(run):
    made = run(dataset=(X, Y))
    wanted = made.predict(X)
    rows = TensorDataset(torch.from_numpy(X), torch.from_numpy(Y))
    for given in ((X, Y), rows, DataLoader(rows, batch_size=7)):
        pd.testing.assert_frame_equal(made.predict(given), wanted)
    for given, reason in (
        (None, "has a row of type NoneType, which can't be an array of numbers"),
        ((X, Y, X, Y), "has test rows beside others; one set of rows is needed"),
        ((X, X, X), "is a tuple of 3; allowed are "),
        ([[1.0], [1.0, 2.0]], "has a row of type list, which can't be an array of numbers"),
    ):
        with pytest.raises(DataError) as error:
            made.predict(given)
        assert str(error.value).startswith(f"the inputs: what is given {reason}")


def test_columns_of_hugging_face_are_predicted_from_datasets_and_files(run, tmp_path):
    given = Dataset.from_dict({"b": X[:, 1], "a": X[:, 0], "label": Y})
    made = run(dataset=given)
    wanted = made.predict(X[:, [1, 0]])
    given.to_parquet(tmp_path / "new.parquet")
    for new in (given, tmp_path / "new.parquet", given.to_pandas()):
        pd.testing.assert_frame_equal(made.predict(new)[wanted.columns], wanted)
    pd.testing.assert_frame_equal(
        made.predict(given.select(range(40, 60)))[wanted.columns], wanted.iloc[40:].reset_index(drop=True)
    )
    with pytest.raises(DataError, match="is a DatasetDict with train; one of its splits is needed"):
        made.predict(DatasetDict({"train": given}))


def test_images_of_hugging_face_are_predicted_from_datasets_and_folders(run, tmp_path):
    pixels = np.random.default_rng(1).integers(0, 256, (20, 8, 8), dtype=np.uint8)
    given = Dataset.from_dict({"picture": [*map(Image.fromarray, pixels)], "label": [0, 1] * 10})
    made = run(dataset=given)
    wanted = made.predict(pixels[:, None])
    pd.testing.assert_frame_equal(made.predict(given), wanted)
    for number in range(3):
        Image.fromarray(pixels[number]).save(tmp_path / f"{number}.png")
    found = made.predict(tmp_path)
    assert found.pop("file").tolist() == ["0.png", "1.png", "2.png"]
    pd.testing.assert_frame_equal(found, wanted.iloc[:3])
    with pytest.raises(
        DataError, match="has the columns label; the input column is needed: one of images or"
    ):
        made.predict(given.select_columns("label"))


class Last(torch.nn.Linear):
    """Outputs (N, T, K) of sequences (N, T, F)."""

    def __init__(self):
        super().__init__(3, 4)


class First(torch.nn.Conv2d):
    """Outputs (N, K, H, W) of images (N, 2, H, W)."""

    def __init__(self):
        super().__init__(2, 3, 1)


@pytest.mark.parametrize(("model", "shape", "axis"), [(Last, (5, 3), -1), (First, (2, 4, 6), 1)])
def test_labels_of_positions_are_a_row_for_each_position(model, shape, axis, run):
    x = np.random.default_rng(2).normal(size=(20, *shape)).astype(np.float32)
    y = (x.sum(axis) > 0).astype(np.int64) + 1  # (N, T), or (N, H, W)
    made = run(dataset=(x, y), model=model)
    with torch.no_grad():
        shares = made.model()(torch.from_numpy(x[:4])).double().softmax(axis).movedim(axis, -1).numpy()
    found = made.predict(x[:4])
    at = np.argwhere(np.ones(y[:4].shape))
    places = ["position"] if y.ndim == 2 else ["position 0", "position 1"]
    assert found[["row", *places]].to_numpy().tolist() == at.tolist()
    assert found["class"].tolist() == [*map(str, shares.argmax(-1).ravel())]
    assert found["probability"].to_numpy() == pytest.approx(shares.max(-1).ravel())
    assert found["probability 1"].to_numpy() == pytest.approx(shares[..., 1].ravel())


def test_data_of_hugging_face_have_their_name_in_errors(run, tmp_path):
    (tmp_path / "wine.csv").write_text("a,b,label\n1,2,0\n2,1,1\n")
    loaded = load_dataset("csv", data_files=str(tmp_path / "wine.csv"), cache_dir=tmp_path / "cache")
    for given, name in ((loaded, "csv"), (Dataset.from_dict({"a": [1.0], "label": [0]}), "Dataset")):
        with pytest.raises(DataError, match=rf"^dataset = 'python:{name}': needs a column 'grade' and"):
            run(dataset=given, label_column="grade")


def one_logit(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """A loss of one logit for two classes, of the user's own."""
    logits = outputs.squeeze(1)
    return torch.nn.functional.binary_cross_entropy_with_logits(logits, targets.float(), reduction="none")


@pytest.mark.parametrize(
    ("targets", "loss"),
    [
        (Y, f"{__name__}:one_logit"),
        (np.column_stack([Y, X[:, 1] ** 2]).astype(np.float32), "custom.survival:cox"),
    ],
)
def test_outputs_that_are_not_as_many_as_the_targets_are_told_as_they_are(run, targets, loss):
    """One logit was told as class 0 with probability 1, and a score of survival ended in an IndexError."""
    made = run(dataset=(X, targets), model="custom.survival:risk", loss=loss, metrics="none")
    told = made.predict(X)
    assert list(told.columns) == ["output"]
    with torch.no_grad():
        expected = made.model()(torch.from_numpy(X)).squeeze(1).numpy()
    np.testing.assert_allclose(told["output"], expected, rtol=1e-6)
