"""Labels of each position, numbers of each pixel, in runs: they are learnt, and engines agree."""

import logging
from typing import Any

import numpy as np
import pytest

import fedapp
from custom import pictures
from tests import own_models
from tests.runs import close, lines_of

TEXTS: dict[str, Any] = {"dataset": own_models.texts, "model": own_models.NextToken, "lr": 0.3}
RUNS = {
    "tokens": {**TEXTS, "metrics": "accuracy,perplexity", "num_server_rounds": 12},
    "pixels": {
        "dataset": pictures.load,
        "model": pictures.UNet,
        "metrics": "accuracy,iou",
        "optimizer": "adam",
        "lr": 0.02,
        "local_epochs": 2,
        "num_server_rounds": 6,
    },
    "numbers": {
        "dataset": own_models.heights,
        "model": own_models.wide_convolution,
        "loss": "mse",
        "num_server_rounds": 6,
    },
}
LEARNT = {"tokens": ("perplexity", 0, 6), "pixels": ("iou", 0.6, 1), "numbers": ("r2", 0.8, 1)}


@pytest.mark.parametrize("name", RUNS)
def test_it_learns_and_engines_agree(name, tmp_path):
    runs = [
        fedapp.run(**RUNS[name], engine=engine, num_clients=4, results_dir=tmp_path, run_name=engine)
        for engine in ("sequential", "vectorized")
    ]
    assert close(*(run.path for run in runs))
    metric, least, most = LEARNT[name]
    assert least < runs[0].summary[metric] < most


def test_a_loss_of_ones_own_of_each_token_is_cross_entropy(tmp_path):
    runs = [
        fedapp.run(
            **TEXTS, loss=loss, num_server_rounds=2, num_clients=4, results_dir=tmp_path, run_name=name
        )
        for name, loss in (("own", own_models.per_token), ("built-in", "cross-entropy"))
    ]
    assert close(*(run.path for run in runs))
    losses = [[line["loss"] for line in lines_of(run.path)] for run in runs]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_rows_without_a_class_are_divided_at_random_or_by_natural_client_and_that_is_said(tmp_path, caplog):
    x, y = own_models.texts()
    given = {"x_train": x, "y_train": y, "group_train": np.arange(len(x)) % 2}
    for dataset, how in (((x, y), "at random"), (given, "by natural client")):
        with caplog.at_level(logging.INFO, "flwr.fedapp"):
            run = fedapp.run(
                **{**TEXTS, "dataset": dataset},
                num_server_rounds=1,
                num_clients=2,
                class_imbalance=1e6,
                data_imbalance=0.0,
                results_dir=tmp_path,
                run_name=how.replace(" ", "-"),
            )
        said = f"a row of 'npz' has no class: label-quantity-skew divides rows {how}"
        assert sum(said in record.getMessage() for record in caplog.records) == 1
        counts = np.load(run.path / "partition.npz")["class_counts"]
        assert counts.shape == (2, 1 if how == "at random" else 2)
        if how == "by natural client":
            assert counts.min() <= 2  # min-samples; all others of a natural client are on one


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"model": "mlp"},
            r"loss = 'cross-entropy': can't take outputs \(8, 12\) of model = 'mlp' for labels \(8, 10\); allowed "
            r"are \(8, 10, K\) and \(8, K, 10\) for K classes",
        ),
        (
            {"dataset": pictures.load, "model": pictures.UNet, "loss": "mse"},
            r"model = '.*UNet': returns \(8, 16, 16, 16\) for targets \(8, 16, 16\); loss = 'mse' needs them alike",
        ),
        (
            {"loss": "tests.fedapp.test_positions:summed"},
            r"must return the loss of each example, \(8,\), or of each of its targets, \(8, 10\), returns \(\)",
        ),
        ({"metrics": "rmse"}, "metrics = 'rmse': is one of numbers, the targets of the data are classes"),
    ],
)
def test_what_does_not_fit_is_one_line(changes, said):
    with pytest.raises(ValueError, match=said) as error:
        fedapp.run(**{**TEXTS, **changes}, num_server_rounds=1, num_clients=4)
    assert "\n" not in str(error.value)


def test_a_client_without_a_position_that_counts_has_no_score_and_counts_in_no_mean(tmp_path):
    x, y = own_models.texts()
    y, groups = y.copy(), np.arange(len(x)) % 3
    y[groups == 0] = -100
    data = {"x_train": x, "y_train": y, "group_train": groups}
    for strategy in ("fedavg", "fedasync"):
        run = fedapp.run(
            **{**TEXTS, "dataset": data},
            strategy=strategy,
            partitioner="natural",
            client_evaluation=True,
            num_server_rounds=2,
            num_clients=3,
            results_dir=tmp_path,
            run_name=strategy,
        )
        last = lines_of(run.path)[-1]
        assert last["client-loss-best"] > 0.1
        assert last["client-accuracy-mean"] > 0


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
@pytest.mark.parametrize("strategy", ["fedavg", "async-fedavg"])
def test_steps_and_clients_without_a_position_that_counts_are_in_no_train_loss(strategy, engine, tmp_path):
    x, y = own_models.texts()
    y, groups = y.copy(), np.arange(len(x)) % 3
    y[groups == 0] = -100
    y[len(x) // 2 :] = -100  # about half of the steps of the others
    run = fedapp.run(
        **{**TEXTS, "dataset": {"x_train": x, "y_train": y, "group_train": groups}, "lr": 1e-6},
        strategy=strategy,
        time_scenario="F0",
        partitioner="natural",
        init="zeros",  # each label is as likely as any other
        batch_size=1,
        num_clients=3,
        num_server_rounds=3,
        engine=engine,
        results_dir=tmp_path,
    )
    told = [line["train-loss"] for line in lines_of(run.path) if "train-loss" in line]
    assert told == pytest.approx([np.log(12)] * (3 if strategy == "fedavg" else 2), rel=1e-4)


@pytest.mark.parametrize("side", ["train", "test"])
def test_data_of_whose_positions_none_counts_are_refused(side, tmp_path):
    x, y = own_models.texts()
    half = len(x) // 2
    data = {"x_train": x[:half], "y_train": y[:half], "x_test": x[half:], "y_test": y[half:]}
    data[f"y_{side}"] = np.full_like(data[f"y_{side}"], -100)
    what = {"train": "training", "test": "test"}[side]
    with pytest.raises(
        ValueError, match=f"^dataset = .*: its {what} rows have no label but -100.*; at least one is"
    ):
        fedapp.run(**{**TEXTS, "dataset": data}, num_server_rounds=1, num_clients=3, results_dir=tmp_path)
    assert not list(tmp_path.iterdir())


def summed(outputs: Any, targets: Any) -> Any:
    """A loss that forgets reduction='none'."""
    return own_models.per_token(outputs, targets).sum()
