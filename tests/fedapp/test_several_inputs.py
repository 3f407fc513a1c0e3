"""Several inputs of a row, by name or by place; ragged rows; several outputs; losses that look at inputs."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import fedapp
from fedapp.data import DataError, load_dataset
from fedapp.data.schema import Schema
from fedapp.names import Part
from fedapp.training.parts import apart
from tests import own_models
from tests.runs import close, same_files

RUN: dict[str, Any] = {
    "dataset": own_models.baskets,
    "model": own_models.TwoInputs,
    "lr": 0.02,
    "num_clients": 3,
}
RUN["optimizer"] = "adam"
SEVERAL = {**RUN, "model": own_models.TwoHeads, "loss": own_models.of_heads, "metrics": own_models.hits}
PARTS = (Part("ids", "int64", (6,)), Part("there", "bool", (6,)), Part("price", "float32", (2,)))


@pytest.mark.parametrize(("config", "metric"), [(RUN, "accuracy"), (SEVERAL, "hits")])
def test_it_learns_and_engines_agree(config, metric, tmp_path):
    runs = [
        fedapp.run(**config, engine=engine, num_server_rounds=12, results_dir=tmp_path, run_name=engine)
        for engine in ("sequential", "vectorized")
    ]
    assert close(*(run.path for run in runs))
    assert runs[0].summary[metric] > 0.75
    inputs = own_models.baskets()[0]
    named = {name: torch.from_numpy(value[:5]) for name, value in inputs.items()}
    model = runs[0].model()  # takes inputs as a user has them, and as the app does
    packed = np.concatenate([value[:5].astype(np.float32) for value in inputs.values()], axis=1)
    torch.testing.assert_close(model(**named), model(torch.tensor(packed)))


def test_by_name_by_place_and_of_each_client_are_the_same(tmp_path):
    inputs, y = own_models.baskets()
    iid = {**RUN, "num_server_rounds": 2, "partitioner": "iid", "results_dir": tmp_path}
    given = {
        "function": {},
        "tuple": {"dataset": own_models.baskets_by_place, "model": own_models.ByPlace},
        "arrays": {"dataset": (inputs, y)},
        "mapping": {
            "dataset": {**{f"x_train.{name}": value for name, value in inputs.items()}, "y_train": y}
        },
    }
    runs = [fedapp.run(**iid | more, run_name=name).path for name, more in given.items()]
    assert all(same_files(runs[0], other) for other in runs[1:])
    pairs = [({name: value[k::3] for name, value in inputs.items()}, y[k::3]) for k in range(3)]
    divided = fedapp.run(**RUN | {"dataset": pairs, "num_server_rounds": 1}, results_dir=tmp_path)
    assert (
        np.load(divided.path / "partition.npz")["client_offsets"][1] < 100
    )  # of 100 rows some are test rows


def test_ragged_rows_are_padded_by_the_users_function(tmp_path):
    inputs, y = own_models.baskets()
    expected = {"ids": inputs["ids"], "there": inputs["there"]}, y % 2
    loader = DataLoader(own_models.Sentences(), collate_fn=own_models.padded, shuffle=True, batch_size=4)
    config = {"model": Pooled, "num_clients": 3, "num_server_rounds": 2, "results_dir": tmp_path}
    runs = [
        fedapp.run(dataset=data, run_name=f"run{k}", **config) for k, data in enumerate((loader, expected))
    ]
    assert same_files(*(run.path for run in runs))


def test_rows_for_a_collate_function_have_natural_ids(tmp_path):
    """Rows of sites "a", "b" and "c" by their number modulo 3: the collate function gets them without the site."""
    rows = [
        {"ids": ids, "label": y, "site": "abc"[row % 3]}
        for row, (ids, y) in enumerate(map(own_models.Sentences().__getitem__, range(300)))
    ]

    def collate(batch):
        assert all(row.keys() == {"ids", "label"} for row in batch)
        inputs, y = own_models.padded([(row["ids"], row["label"]) for row in batch])
        return {**inputs, "labels": y}

    made = fedapp.run(
        dataset=DataLoader(rows, collate_fn=collate),
        group_column="site",
        partitioner="natural",
        model=Pooled,
        num_clients=3,
        num_server_rounds=1,
        results_dir=tmp_path,
    )
    stored = np.load(made.path / "partition.npz")
    for client, own in enumerate(np.split(stored["client_indices"], stored["client_offsets"][1:-1])):
        assert len(own) > 50
        assert set(own % 3) == {client}
    assert not made.summary["unread-keys"]


class Pooled(own_models.TwoInputs):
    """Without a price."""

    def __init__(self, num_classes: int) -> None:
        super().__init__({"price": (0,)}, num_classes)

    def forward(self, *, ids: torch.Tensor, there: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(ids=ids, there=there, price=torch.zeros(len(ids), 0, device=ids.device))


def test_a_row_comes_back_from_the_cache_as_it_was():
    inputs, _ = own_models.baskets()
    for _ in range(2):  # written, and read
        data = load_dataset("tests.own_models:baskets")
        assert (data.kind, data.parts, data.input_shape) == ("parts", PARTS, (14,))
    found = apart(data.parts, torch.from_numpy(data.inputs(np.arange(300))))
    assert isinstance(found, dict)
    for name, value in inputs.items():
        assert found[name].dtype == torch.from_numpy(value).dtype
        assert np.array_equal(found[name].numpy(), value)
    assert Part.read(str(Part("", "float32", ()))) == Part("", "float32", ())
    assert all(Part.read(str(part)) == part for part in PARTS)
    other = replace(data, parts=(*PARTS[:2], Part("price", "int64", (2,))))
    with pytest.raises(
        DataError, match=r"inputs are ids int64 6, there bool 6, price int64 2; the model's ids int64"
    ):
        Schema.of(data).fit(other)


def test_pictures_among_inputs_are_scaled_and_whole_numbers_are_not(tmp_path):
    y = np.array([0, 1, 0, 1])
    arrays = {"x_train.0": np.full((4, 2, 2), 255, np.uint8), "x_train.1": np.full((4, 3), 255, np.uint8)}
    np.savez(tmp_path / "a.npz", y_train=y, **arrays)
    data = load_dataset("npz", str(tmp_path / "a.npz"))
    assert data.parts == (Part("", "float32", (2, 2)), Part("", "int64", (3,)))
    assert data.inputs([0]).tolist() == [[1, 1, 1, 1, 255, 255, 255]]


IDS = np.arange(8).reshape(4, 2)
Y = np.array([0, 1, 0, 1])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"model": "mlp"},
            r"model = 'mlp': takes one input; the data have several \(ids int64 6, there bool 6, price",
        ),
        ({"normalize": "standardize"}, r"has several inputs a row; allowed for images and vectors"),
        (
            {"dataset": ({"a b": IDS}, Y)},
            "has the input 'a b'; a name that can be a keyword of Python is needed",
        ),
        (
            {"dataset": ({"a": IDS, "b": IDS[:3]}, Y)},
            "x_train.b has 3 rows, the first input 4; they must match",
        ),
        ({"dataset": ({"a": IDS + 2**24}, Y)}, "x_train.a has whole numbers beyond 16777216"),
        (
            {"dataset": ({"a": np.full((4, 2), np.inf)}, Y)},
            "x_train.a has values that are not finite in float32",
        ),
        (
            {"dataset": ({"a": IDS}, Y, {"b": IDS}, Y)},
            "has other inputs in train than in test: x_train has a int64 2",
        ),
        (
            {"dataset": ({"a": IDS}, Y, IDS, Y)},
            "has other inputs in train than in test: x_train has a int64 2",
        ),
        (
            {**SEVERAL, "loss": "cross-entropy"},
            r"loss = 'cross-entropy': takes one tensor, model = .* returns dict of \(8, 4\), \(8, 2\); one of your",
        ),
        (
            {**SEVERAL, "metrics": "accuracy"},
            "metrics = 'accuracy': takes one tensor, .* and metrics may be none",
        ),
        (
            {"dataset": [({"a": IDS}, Y), ({"b": IDS}, Y)]},
            "client 1 has other inputs than client 0; they must match",
        ),
        (
            {"dataset": DataLoader(own_models.Sentences(), collate_fn=len)},
            r"is a DataLoader whose collate_fn makes a int; \(inputs, targets\), or a dict with labels, is needed",
        ),
        (
            {"dataset": DataLoader(own_models.Sentences(), collate_fn=own_models.masked)},
            "is a DataLoader whose collate_fn makes another batch of the same rows when it is called again",
        ),
        (
            {
                "dataset": DataLoader(own_models.Sentences(), collate_fn=own_models.padded),
                "group_column": "site",
            },
            r"has a natural id, group-column = 'site', in 0 of 300 rows; all rows, or the batch that",
        ),
        (
            {"dataset": (IDS, Y), "group_column": "site"},
            "group-column = 'site': arrays have no columns; group_train and group_test of a mapping have the natural",
        ),
    ],
)
def test_what_does_not_fit_is_one_line(changes, said):
    with pytest.raises(ValueError, match=said) as error:
        fedapp.run(**{**RUN, **changes}, num_server_rounds=1)
    assert "\n" not in str(error.value)
