"""Every participation scheme, dataset and model goes through the whole app."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.runs import lines_of

CLIENTS = 4


@pytest.fixture
def metrics_of(run_app):
    """Run the app in this process; return its evaluations."""

    def run(config: Mapping[str, Any], clients: int = CLIENTS) -> list[dict[str, Any]]:
        metrics = lines_of(run_app({"num-server-rounds": 2, **config}, clients))
        assert metrics[-1]["failures"] == 0
        assert np.isfinite([m["loss"] for m in metrics]).all()
        return metrics

    return run


@pytest.mark.parametrize(
    ("participation", "fraction", "participants"),
    [
        ("full", 1.0, {4}),
        ("uniform", 0.5, {2}),
        ("md", 0.5, {1, 2}),
        ("poisson", 0.5, {0, 1, 2, 3, 4}),
        ("paired", 1.0, {2}),
        ("fixed:0,2,3", 1.0, {3}),
    ],
)
def test_participation(metrics_of, participation, fraction, participants):
    config = {"participation": participation, "fraction-train": fraction, "num-server-rounds": 5}
    metrics = metrics_of({**config, "model": "logistic", "batch-size": 64})
    assert {m["participants"] for m in metrics[1:]} <= participants
    assert metrics[-1]["loss"] < metrics[0]["loss"]


def images(
    shape: tuple[int, ...], classes: int, rows: int = 120, **more: np.ndarray
) -> dict[str, np.ndarray]:
    """Make images whose brightness tells the class."""
    rng = np.random.default_rng(0)
    y = np.arange(rows) % classes
    x = rng.integers(40, size=(rows, *shape)) + (200 * y // classes).reshape(-1, *[1] * len(shape))
    return {"x": x.astype(np.uint8), "y": y.astype(np.uint8), **more}


def write_npz(path: Path, data: Mapping[str, np.ndarray]) -> str:
    """Write the first 100 rows as training rows, the others as test rows."""
    arrays = {f"{name}_train": values[:100] for name, values in data.items()}
    np.savez(path, **arrays, **{f"{name}_test": values[100:] for name, values in data.items()})
    return str(path)


@pytest.mark.parametrize(
    ("dataset", "shape", "classes", "model"),
    [
        ("mnist", (28, 28), 10, "cnn"),
        pytest.param("cifar10", (32, 32, 3), 10, "resnet18", marks=pytest.mark.thorough),
        ("cifar10", (32, 32, 3), 10, "logistic"),
        ("cifar100", (32, 32, 3), 100, "mlp"),
        ("npz", (9,), 3, "logistic"),
    ],
)
def test_datasets_and_models(metrics_of, tmp_path, dataset, shape, classes, model):
    path = write_npz(tmp_path / f"{dataset}.npz", images(shape, classes))
    metrics = metrics_of(
        {"dataset": dataset, "data-path": path, "model": model, "partitioner": "iid", "lr": 0.01}
    )
    assert len(metrics) == 3


@pytest.mark.parametrize("dataset", ["femnist", "femnist-digits"])
def test_femnist_by_writer_on_unseen_writers(metrics_of, tmp_path, dataset):
    data = images((28, 28), 62, 1240, writer=(np.arange(1240) % 7).astype(np.int16))
    arrays = {
        f"{k}_{side}": v[rows]
        for k, v in data.items()
        for side, rows in (("train", slice(0, 1000)), ("test", slice(1000, None)))
    }
    np.savez(tmp_path / "femnist.npz", **arrays)
    metrics = metrics_of(
        {
            "dataset": dataset,
            "data-path": str(tmp_path),
            "partitioner": "natural",
            "test-on": "unseen-clients",
            "model": "logistic",
        }
    )
    assert all(m["accuracy-std"] >= 0 for m in metrics)


def test_shakespeare_by_role_with_the_lstm(metrics_of, tmp_path):
    line = "To be, or not to be, that is the question: Whether 'tis nobler in the mind to suffer "
    (tmp_path / "roles.json").write_text(json.dumps({f"ROLE_{i}": line * (2 + i // 3) for i in range(6)}))
    metrics = metrics_of(
        {
            "dataset": "shakespeare",
            "data-path": str(tmp_path / "roles.json"),
            "partitioner": "natural",
            "model": "lstm",
            "local-epochs": 0,
            "local-steps": 2,
        }
    )
    assert metrics[-1]["loss"] < metrics[0]["loss"]


def test_the_synthetic_problem_of_000(metrics_of):
    """Its perceptron, its participation, one client per generated one; 20 steps pull b towards the optimum."""
    config = {
        "dataset": "synthetic",
        "model": "perceptron",
        "partitioner": "natural",
        "participation": "paired",
        "batch-size": 0,
        "local-epochs": 0,
        "local-steps": 20,
        "lr": 0.2,
        "num-server-rounds": 10,
    }
    metrics = metrics_of(config, clients=20)
    assert metrics[-1]["loss"] < metrics[0]["loss"]
    assert metrics[-1]["accuracy"] > 0.9


@pytest.mark.parametrize("partitioner", ["iid", "dirichlet", "shards"])
def test_partitioners(metrics_of, partitioner):
    config = {"partitioner": partitioner, "dirichlet-alpha": 0.5, "model": "logistic", "batch-size": 64}
    assert metrics_of(config)[-1]["participants"] == CLIENTS


def test_a_time_budget_ends_the_run(metrics_of):
    # F0: every round takes 1 s; three fit in 3.5 s.
    config = {"num-server-rounds": 50, "time-budget": 3.5, "time-scenario": "F0", "model": "logistic"}
    assert metrics_of(config)[-1]["time"] == 3.0


def test_everything_else_at_once(metrics_of):
    config = {
        "strategy": "fedprox",
        "momentum": 0.5,
        "l2": 0.001,
        "clip-norm": 1.0,
        "lr-schedule": "cosine",
        "normalize-steps": True,
        "lr": 2.0,
        "client-threads": 0,
        "clock": "wall",
        "eval-every": 3,
        "num-server-rounds": 8,
        "test-on": "unseen-clients",
        "client-weights": "uniform",
    }
    metrics = metrics_of(config)
    assert [m["aggregation"] for m in metrics] == [0, 3, 6, 8]
    assert metrics[-1]["loss"] < metrics[0]["loss"]
