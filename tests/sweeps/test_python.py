"""``fedapp.run`` and its neighbours, with real runs on the digits."""

import subprocess
import sys
import warnings
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas as pd
import pytest
import torch
from scipy.sparse import csr_matrix
from sklearn.datasets import load_digits

import fedapp
from fedapp.config import ConfigError
from fedapp.data import DataError
from strategies import FedAvg, RunError

SMALL: dict[str, Any] = {
    "num_clients": 3,
    "model": "logistic",
    "batch_size": 0,
    "num_server_rounds": 3,
    "quiet": True,
}


@pytest.fixture
def digits():
    x, y = load_digits(return_X_y=True)
    return x / 16, y


def test_a_run_comes_back_as_tables_and_a_model(tmp_path, capsys):
    made = fedapp.run(**SMALL, lr=0.5, strategy="fedprox", proximal_mu=0.01, results_dir=tmp_path)
    assert capsys.readouterr().out == ""
    assert made.path.parent == tmp_path
    assert (made.status, made.num_clients, made.config.lr, made.config.proximal_mu) == (
        "finished",
        3,
        0.5,
        0.01,
    )
    assert made.metrics["aggregation"].tolist() == [0, 1, 2, 3]
    assert made.metrics["accuracy"].iloc[-1] == made.summary["accuracy"]
    assert "fedprox on vectorized, finished: accuracy 0." in repr(made)
    assert "<table>" in made._repr_html_()
    again = fedapp.load(made.path)
    pd.testing.assert_frame_equal(again.metrics, made.metrics)

    model = made.model()
    rows = np.load(made.path / "partition.npz")["test_indices"]
    x, y = load_digits(return_X_y=True)
    images = torch.tensor(x[rows].reshape(-1, 1, 8, 8) / 16, dtype=torch.float32)
    with torch.no_grad():
        hits = (model(images).argmax(1).numpy() == y[rows]).mean()
    assert hits == pytest.approx(made.summary["accuracy"])


def test_a_run_without_an_evaluation_has_a_table_without_rows(tmp_path):
    (tmp_path / "config.toml").write_text("num-clients = 3\n")
    found = fedapp.load(tmp_path).metrics
    assert (list(found.columns), len(found)) == (["aggregation", "time"], 0)


def test_arrays_are_a_dataset_wherever_the_run_goes_on(digits, tmp_path):
    made = fedapp.run(**SMALL, dataset=digits, results_dir=tmp_path)
    assert made.config.dataset == "npz"
    with np.load(made.config.data_path) as stored:
        np.testing.assert_array_equal(stored["x_train"], digits[0].astype(np.float32))
    named = {"x_train": torch.tensor(digits[0]), "y_train": digits[1]}
    assert fedapp.run(**SMALL, dataset=named, results_dir=tmp_path).config.data_path == made.config.data_path
    longer = fedapp.run(resume=made.path, num_server_rounds=5, quiet=True)
    assert longer.path == made.path
    assert longer.metrics["aggregation"].tolist() == [0, 1, 2, 3, 4, 5]


def test_labels_may_be_a_column_of_texts(tmp_path):
    x, y = np.arange(80.0).reshape(40, 2) / 80, pd.Series(["well", "ill"] * 20, dtype=object)
    made = fedapp.run(**SMALL, dataset=(x, y), results_dir=tmp_path)
    assert 0 <= made.summary["accuracy"] <= 1


def test_natural_clients_may_be_a_column_of_texts(tmp_path):
    x, y = np.arange(80.0).reshape(40, 2) / 80, np.arange(40) % 2
    given = {"x_train": x, "y_train": y, "group_train": pd.Series(["a", "b"] * 20, dtype=object)}
    made = fedapp.run(
        **{**SMALL, "num_clients": 2}, dataset=given, partitioner="natural", results_dir=tmp_path
    )
    with np.load(made.path / "partition.npz") as division:
        offsets, rows = division["client_offsets"], division["client_indices"]
    parity = [set(rows[begin:end] % 2) for begin, end in pairwise(offsets)]
    assert sorted(map(sorted, parity)) == [[0], [1]]


def test_a_table_of_pandas_is_a_dataset(digits, tmp_path):
    x, y = digits
    table = pd.DataFrame(x[:300], columns=[f"pixel {number}" for number in range(64)]).assign(digit=y[:300])
    keys = {**SMALL, "results_dir": tmp_path}
    made = fedapp.run(**keys, dataset=table, label_column="digit")
    assert made.config.dataset == "files"
    like = fedapp.run(**keys, dataset=(x[:300].astype(np.float32), y[:300]))
    assert made.summary["loss"] == pytest.approx(like.summary["loss"], rel=1e-6)
    table.iloc[0, 0] = None
    with pytest.raises(DataError, match=r"'pixel 0' has 1 empty cells; .* \(missing = 'drop' leaves"):
        fedapp.run(**keys, dataset=table, label_column="digit")
    table["pixel 0"] = "dark"
    with pytest.raises(DataError, match=r"'pixel 0' has type .*string; .* \(encode = true makes columns"):
        fedapp.run(**keys, dataset=table, label_column="digit")


def test_what_is_taken_for_something_else_when_data_are_read_is_in_each_runs_log(digits, tmp_path):
    x, y = digits
    table = pd.DataFrame(x[:300, :5]).assign(digit=y[:300]).rename(columns={0: "Unnamed: 0"})
    table.columns = table.columns.astype(str)
    for _ in range(2):
        made = fedapp.run(**SMALL, dataset=table, label_column="digit", results_dir=tmp_path)
        said = "data: the column Unnamed: 0 is taken for row numbers and is no input"
        assert (made.path / "log.txt").read_text("utf-8").count(said) == 1


def test_the_division_of_a_list_is_taken(digits, tmp_path):
    """Three clients with 40, 50 and 60 rows, sparse ones: a fifth of all rows tests, as many of each as are drawn."""
    x, y = digits
    ends = [(0, 40), (40, 90), (90, 150)]
    parts = [(csr_matrix(x[first:last]), y[first:last]) for first, last in ends]
    keys = {key: value for key, value in SMALL.items() if key != "num_clients"}
    made = fedapp.run(**keys, dataset=parts, test_on="own", test_fraction=0.2, results_dir=tmp_path)
    assert made.num_clients == 3
    arrays = np.load(made.path / "partition.npz")
    rows = np.split(arrays["client_indices"], arrays["client_offsets"][1:-1])
    held = np.split(arrays["test_indices"], arrays["test_offsets"][1:-1])
    for own, tested, (first, last) in zip(rows, held, ends, strict=True):
        assert sorted([*own, *tested]) == list(range(first, last))
    with pytest.raises(ConfigError, match=r"^dataset: client 1 has inputs \(3, 2\) and labels \(4,\)"):
        fedapp.run(**keys, dataset=[(np.zeros((3, 2)), [0, 1, 0]), (np.zeros((3, 2)), [0, 1, 0, 1])])


def test_runs_on_two_datasets_are_two_lines_and_not_two_seeds(digits, tmp_path):
    x, y = digits
    data = {"all": (x, y), "some": (x[:600], y[:600])}
    made = {
        name: fedapp.run(**SMALL, dataset=each, results_dir=tmp_path / name) for name, each in data.items()
    }
    table = fedapp.compare(*made.values()).table.query("metric == 'accuracy'")
    assert table["seeds"].tolist() == [1, 1]
    assert table["run"].tolist() == [
        f"data-path={Path(each.config.data_path).name}" for each in made.values()
    ]
    assert table["end"].tolist() == [each.summary["accuracy"] for each in made.values()]


@pytest.mark.thorough
def test_metrics_options_and_losses_as_they_are_in_python(tmp_path):
    def share(outputs, targets):
        return 0.25

    keys = {
        **SMALL,
        "optimizer": "adam",
        "optimizer_options": {"eps": 1e-5, "betas": (0.9, np.float64(0.95))},
    }
    loss = torch.nn.CrossEntropyLoss(weight=torch.arange(1.0, 11.0), reduction="none")
    for metrics in (("accuracy", share), ["accuracy", share]):
        made = fedapp.run(**keys, metrics=metrics, loss=loss, results_dir=tmp_path)
        assert made.summary["share"] == 0.25
        assert made.config.optimizer_options == "eps=1e-05 betas=[0.9,0.95]"
        assert made.config.loss.startswith("python:CrossEntropyLoss_")
    swept = fedapp.sweep(**SMALL, metrics=("accuracy", share), lr=[0.1, 0.2], out=tmp_path / "sweep")
    assert swept.table["share"].tolist() == [0.25, 0.25]
    with pytest.raises(ConfigError, match=r"metrics = 'python:share'.*jobs = 2 needs it in a module"):
        fedapp.sweep(**SMALL, metrics=("accuracy", share), lr=[0.1, 0.2], jobs=2, out=tmp_path / "two")


@pytest.mark.thorough
def test_datasets_of_others_are_taken_as_they_are(digits, tmp_path):
    x, y = digits[0].reshape(len(digits[0]), -1).astype("f4")[:300], digits[1][:300]
    rows = torch.utils.data.TensorDataset(torch.tensor(x), torch.tensor(y))
    table = datasets.Dataset.from_dict({"x": x, "label": y})
    keys = {**SMALL, "results_dir": tmp_path}
    plain, both = fedapp.run(dataset=(x, y), **keys), fedapp.run(dataset=(x, y, x, y), **keys)
    for given, like in (
        (rows, plain),
        ((rows, rows), both),
        (table, plain),
        ((table, table), both),
        (datasets.DatasetDict({"train": table, "test": table}), both),
        (partial(lambda given: given, rows), plain),
    ):
        assert fedapp.run(dataset=given, **keys).summary["loss"] == like.summary["loss"]


def test_what_is_handed_over_has_a_name_by_what_it_is(tmp_path):
    class Mine(FedAvg):
        """A strategy that no module has."""

    made = fedapp.run(**SMALL, strategy=Mine, results_dir=tmp_path)
    assert made.config.strategy.startswith("python:Mine_")
    assert (
        fedapp.run(**SMALL, strategy=FedAvg, results_dir=tmp_path).config.strategy
        == "strategies.methods.fedavg:FedAvg"
    )
    with pytest.raises(
        ConfigError,
        match=r"strategy = 'python:Mine': is known in this process alone, and Ray's workers can't import it; put it "
        r"into a module, or take engine sequential or vectorized without workers on Ray$",
    ):
        fedapp.run(**{**SMALL, "engine": "ray"}, strategy=Mine, results_dir=tmp_path)
    with pytest.raises(ConfigError, match="known in this process alone; jobs = 2 needs it in a module"):
        fedapp.sweep(**SMALL, strategy=[Mine, FedAvg], jobs=2, out=tmp_path / "sweep")
    swept = fedapp.sweep(**SMALL, strategy=[Mine, FedAvg], out=tmp_path / "sweep")
    assert swept.table["accuracy"].nunique() == 1  # the same method, under two names
    assert swept.table["runs"].tolist() == [1, 1]


@pytest.mark.parametrize(
    ("keys", "kind", "message"),
    [
        ({"num_rounds": 3}, TypeError, "unknown key 'num_rounds': did you mean 'num_server_rounds'"),
        ({"lr": -1.0}, ConfigError, "lr = -1.0: must be a number > 0"),
        ({"lr": None}, ConfigError, "lr = None: must be a value, a class or a function, not a NoneType"),
        (
            {"model": torch.nn.Linear(2, 2)},
            ConfigError,
            "must be a class, or a function that returns a new one",
        ),
        ({"dataset": [1, 2]}, ConfigError, "dataset: is a list; must be a name, "),
        ({"dataset": {"x": 1}}, ConfigError, "dataset: 'x' is none of its arrays"),
        (
            {"dataset": (pd.Series(["cat", "dog"], dtype=object), np.zeros(2))},
            ConfigError,
            "dataset: x_train holds texts; numbers are needed",
        ),
        (
            {"dataset": (np.zeros((2, 1)), [None, 1])},
            ConfigError,
            "dataset: y_train holds objects; numbers or texts are needed",
        ),
        (
            {"dataset": (np.ma.masked_equal([[1.0], [2.0]], 2), [0, 1])},
            DataError,
            "dataset: x_train has 1 masked entries; none are allowed",
        ),
        ({"dataset": ([[1], [1, 2]], [0, 1])}, ConfigError, "dataset: x_train is no array (setting an array"),
        ({"engine": "rya"}, ConfigError, "engine = 'rya': allowed are auto, sequential, vectorized, ray"),
        ({"way": "single", "engine": "sequential"}, ConfigError, "is a way of engine vectorized"),
        ({"federation_config": {"verbose": True}}, ConfigError, "federation_config: isn't read by engine"),
        ({"num_clients": 0}, ConfigError, "num_clients = 0"),
        ({"num_clients": 2000}, DataError, "num_clients = 2000: 'digits' has "),
        (
            {"num_supernodes": 3},
            TypeError,
            "unknown key 'num_supernodes': clients are counted by num_clients=N",
        ),
        (
            {"dataset": (np.zeros((2, 1)), [-1, 1])},
            DataError,
            "^dataset: y_train has a label below 0; whole numbers from 0 are needed",
        ),
        (
            {"optimizer": "adam", "optimizer_options": {"eps": "small"}},
            ConfigError,
            "optimizer-options: eps is a str; must be a number or a flag",
        ),
    ],
)
def test_what_is_wrong_is_said_at_once(keys, kind, message, tmp_path):
    with pytest.raises(kind, match=message.replace("(", r"\(")):
        fedapp.run(**{"results_dir": tmp_path / "none", **keys})
    assert not (tmp_path / "none").exists()


def test_numbers_beyond_float32_are_one_line_and_no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(DataError, match=r"^dataset: x_train has values that are not finite"):
            fedapp.run(dataset=(np.full((20, 2), 1e300), np.arange(20) % 2), quiet=True)


def test_a_run_that_fails_raises_and_names_its_folder(tmp_path):
    with pytest.raises(RunError) as raised:
        fedapp.run(**SMALL, lr=1e30, results_dir=tmp_path)
    (folder,) = tmp_path.iterdir()
    assert raised.value.__notes__ == [f"What the run has recorded is in {folder}"]
    assert fedapp.load(folder).status in ("failed", "diverged")
    assert fedapp.load(folder).summary["reason"] in repr(fedapp.load(folder))


def test_a_sweep_is_a_table_and_is_read_back(tmp_path):
    keys = {**SMALL, "lr": [0.1, 1e30], "seed": range(2), "out": tmp_path / "own"}
    swept = fedapp.sweep(**keys)
    assert swept.table[["lr", "runs", "lacking"]].to_numpy().tolist() == [[0.1, 2, 0], [1e30, 0, 2]]
    finals = [result.summary["accuracy"] for result in swept.results[:2]]
    assert swept.table["accuracy"][0] == pytest.approx(np.mean(finals))
    assert swept.table["accuracy-std"][0] == pytest.approx(np.std(finals, ddof=1))
    assert len(swept.remarks) == 1
    assert "lr=1e+30, seed 0, 1: " in swept.remarks[0]
    pd.testing.assert_frame_equal(fedapp.load(tmp_path / "own").table, swept.table)
    assert swept.runs["lr"].nunique() == 2
    compared = fedapp.compare(swept, str(tmp_path / "own"))
    assert compared.table["seeds"].tolist() == [2, 2, 0, 0]
    assert compared.table["equal-time"][0] == pytest.approx(swept.table["accuracy"][0])


def test_mappings_of_a_key_are_an_axis(tmp_path):
    options = [{"betas": [0.9, 0.95]}, {"eps": 1e-6}]
    labelled = {"label": "slow", "lr": 0.05, "optimizer_options": {"eps": 1e-7}}
    swept = fedapp.sweep(**SMALL, optimizer="adam", optimizer_options=[*options, labelled], out=tmp_path)
    assert swept.table["optimizer-options"].tolist() == ["betas=[0.9,0.95]", "eps=1e-06", "slow"]
    made = [result.config for result in swept.results]
    assert [config.optimizer_options for config in made] == ["betas=[0.9,0.95]", "eps=1e-06", "eps=1e-07"]
    assert made[0].lr == made[1].lr != made[2].lr == 0.05
    with pytest.raises(ConfigError, match=r"^dataset = \{'x_train'.*: must be a value, .* not a dict$"):
        fedapp.sweep(**SMALL, dataset=[{"x_train": 1, "y_train": 2}], out=tmp_path / "arrays")
    with pytest.raises(ConfigError, match="has no 'label'"):
        fedapp.sweep(**SMALL, case=[{"lr": 0.1}], out=tmp_path / "case")


def test_numbers_of_numpy_count_clients_and_jobs_are_one_at_least(tmp_path):
    run = fedapp.run(**{**SMALL, "num_clients": np.int64(3)}, results_dir=tmp_path)
    assert run.num_clients == 3
    with pytest.raises(ConfigError, match=r"^jobs = -1: must be a whole number >= 1$"):
        fedapp.sweep(**SMALL, lr=[0.1, 0.2], jobs=-1, out=tmp_path / "sweep")


def test_a_sweep_tunes(tmp_path):
    swept = fedapp.sweep(**SMALL, lr=[0.001, 0.5], seed=[0, 1], tune="lr", tuning_seeds=1, out=tmp_path)
    assert swept.tuning["seed"].tolist() == [2, 2]
    best = swept.tuning.set_index("lr")["accuracy"].idxmax()
    assert swept.tuning.set_index("lr")["picked"].to_dict() == {lr: lr == best for lr in (0.001, 0.5)}
    assert swept.table["lr"].tolist() == [best]
    assert sorted(swept.runs["seed"].unique()) == [0, 1]


@pytest.mark.parametrize(
    ("keys", "error"),
    [
        ({"lr": -1.0}, fedapp.ConfigError),
        ({"dataset": "npz", "data_path": "/nowhere"}, fedapp.DataError),
        ({"model": "lstm"}, fedapp.ModelError),
        ({"model": "nowhere:Model"}, fedapp.OwnPartError),
        ({"observers": [3]}, TypeError),
    ],
)
def test_what_isnt_possible_is_an_error_of_a_public_class(keys, error, tmp_path):
    with pytest.raises(error) as raised:
        fedapp.run(**{**SMALL, **keys}, results_dir=tmp_path)
    assert raised.type is error
    assert issubclass(error, TypeError if error is TypeError else ValueError)
    assert not any(tmp_path.iterdir())


def test_importing_the_package_imports_nothing_heavy(repository):
    code = "import sys, fedapp; print([name for name in ('torch', 'pandas', 'flwr', 'ray') if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=repository, check=True
    )
    assert done.stdout.strip() == "[]"
    assert "run" in dir(fedapp)
    with pytest.raises(AttributeError, match="nothing"):
        fedapp.nothing  # noqa: B018
