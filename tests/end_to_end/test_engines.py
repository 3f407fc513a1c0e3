"""The vectorized engine against real Ray, as a user starts them."""

import numpy as np
import pytest
import safetensors.numpy

from fedapp.report.client_tables import by_evaluation
from tests.runs import ROUNDED, lines_of, summary_of, vector_of

RUNS = {
    "fedavg": {"model": "mlp", "data-imbalance": 1.0, "num-server-rounds": 3},
    "async-fedavg": {"model": "logistic", "num-server-rounds": 20, "eval-every": 5},
}


# Without Ray, of every strategy and model: tests/fedapp/engine/test_vectorized.py.
@pytest.mark.ci
@pytest.mark.thorough
@pytest.mark.parametrize("strategy", ["fedavg", pytest.param("async-fedavg", marks=pytest.mark.thorough)])
def test_the_vectorized_engine_gives_the_model_and_the_events_of_ray(simulate, strategy):
    config = {"strategy": strategy, **RUNS[strategy]}
    runs = [simulate(config, engine=engine) for engine in ("vectorized", "ray")]
    logs, models, by_client = [], [], []
    for run in runs:
        assert run.returncode == 0, run.output
        lines = lines_of(run.path)
        told = []
        for line in lines:
            line["clients"] = by_evaluation(run.path)[line["aggregation"]]
            told.append([line["clients"].pop("loss"), line["clients"].pop("accuracy")])
        by_client.append(told)
        logs.append(
            [
                {key: value for key, value in line.items() if key not in ROUNDED and "client-" not in key}
                for line in lines
            ]
        )
        models.append(vector_of(run.path))
    engines = [summary_of(run.path)["engine"] for run in runs]
    assert engines == ["vectorized", "ray"]
    assert logs[0] == logs[1]
    assert len(logs[0]) > 3
    np.testing.assert_allclose(*by_client, rtol=1e-3, atol=5e-2)  # a row on the boundary between two classes
    assert np.linalg.norm(models[0] - models[1]) <= 1e-5 * np.linalg.norm(models[1])


@pytest.mark.thorough
def test_linear_models_of_images_are_trained_alike_by_every_engine(simulate, tmp_path):
    rng = np.random.default_rng(0)
    labels = rng.integers(3, size=480)
    images = rng.integers(60, size=(480, 32, 32)) + 60 * labels[:, None, None]
    train, test = slice(0, 400), slice(400, 480)
    arrays = {
        "x_train": images[train].astype(np.uint8),
        "y_train": labels[train],
        "x_test": images[test].astype(np.uint8),
        "y_test": labels[test],
    }
    np.savez(tmp_path / "images.npz", **arrays)
    config = {
        "dataset": "npz",
        "data-path": str(tmp_path / "images.npz"),
        "normalize": "symmetric",
        "model": "logistic",
        "strategy": "spectral",
        "local-epochs": 20,
        "batch-size": 0,
        "lr": 0.01,
        "num-server-rounds": 3,
    }
    runs = {engine: simulate(config, engine=engine) for engine in ("sequential", "ray", "vectorized")}
    assert all(run.returncode == 0 for run in runs.values()), [run.output for run in runs.values()]
    assert runs["ray"].model == runs["sequential"].model
    weights, other = (safetensors.numpy.load(runs[name].model)["1.weight"] for name in ("vectorized", "ray"))
    assert np.linalg.norm(weights - other) <= 1e-5 * np.linalg.norm(other)
