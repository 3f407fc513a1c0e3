"""Divergence and drift of the clients, against numpy by hand, and as a run records them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.special import expit, softmax

from fedapp import client_app
from fedapp.config import ConfigError, RunConfig
from fedapp.divergence import DivergenceMeter
from fedapp.engine.sequential import SequentialGrid
from fedapp.models import PERCEPTRON_SLOPE, build_model
from fedapp.recorder import Experiment
from fedapp.server_app import prepare, run
from strategies import REGISTRY

OFFSETS = np.array([0, 3000, 3500, 5000])  # more rows than are worked on at once


@pytest.fixture
def meter() -> DivergenceMeter:
    """Three clients of logistic regression with 4 features and 3 classes."""
    rng = np.random.default_rng(1)
    x, y = rng.standard_normal((5000, 4), dtype=np.float32), rng.integers(0, 3, 5000)
    model = build_model("logistic", kind="vector", input_shape=(4,), num_classes=3)
    return DivergenceMeter(model, torch.from_numpy(x), torch.from_numpy(y), OFFSETS)


def state(seed: int) -> dict[str, torch.Tensor]:
    rng = np.random.default_rng(seed)
    return {
        "1.weight": torch.from_numpy(rng.standard_normal((3, 4), dtype=np.float32)),
        "1.bias": torch.from_numpy(rng.standard_normal(3, dtype=np.float32)),
    }


def gradient(meter: DivergenceMeter, parameters: dict[str, torch.Tensor], client: int) -> np.ndarray:
    """∇f_i in float64, by hand."""
    rows = slice(OFFSETS[client], OFFSETS[client + 1])
    x, y = meter.x[rows].double().numpy(), meter.y[rows].numpy()
    weight, bias = (parameters[name].double().numpy() for name in ("1.weight", "1.bias"))
    residual = (softmax(x @ weight.T + bias, axis=1) - np.eye(3)[y]) / len(y)
    return np.hstack([(residual.T @ x).ravel(), residual.sum(0)])


def test_divergence_and_drift_by_hand(meter: DivergenceMeter) -> None:
    importance = {0: 0.5, 1: 0.2, 2: 0.3}
    models = {0: state(10), 2: state(12)}
    expected = []
    for client, parameters in models.items():
        meter.take(client, parameters, importance)
        total = sum(p * gradient(meter, parameters, other) for other, p in importance.items())
        expected.append(np.linalg.norm(gradient(meter, parameters, client) - total))
    flat = [
        np.hstack([value.double().numpy().ravel() for value in model.values()]) for model in models.values()
    ]
    metrics = meter.metrics()
    assert metrics["divergence"] == pytest.approx(max(expected), rel=1e-5)
    # of two models, each is half their difference from the mean
    assert metrics["drift"] == pytest.approx(np.sum((flat[0] - flat[1]) ** 2) / 4, rel=1e-12)


def test_each_aggregation_is_measured_by_itself(meter: DivergenceMeter) -> None:
    assert meter.metrics() == {}
    meter.take(0, state(10), {0: 1.0})
    assert meter.metrics() == {"divergence": pytest.approx(0, abs=1e-6), "drift": 0.0}  # f is f_0
    assert meter.metrics() == {}


def test_drift_keeps_its_digits_far_from_zero(meter: DivergenceMeter) -> None:
    meter.x = meter.x.double()
    for shift in (1e6, 1e6 + 1e-3):
        meter.take(0, {name: value.double() + shift for name, value in state(10).items()}, {0: 1.0})
    # 15 parameters, each of the two models 0.0005 from the mean in each
    assert meter.metrics()["drift"] == pytest.approx(15 * 0.0005**2, rel=1e-4)


# In a run --------------------------------------------------------------------------------------------------


@pytest.fixture
def record(
    configure: Callable[..., RunConfig], tmp_path: Path
) -> Callable[..., tuple[Experiment, list[Any]]]:
    """Run the synthetic problem with five clients and return its experiment and metrics."""

    def run_it(**values: Any) -> tuple[Experiment, list[Any]]:
        config = configure(
            **{
                "dataset": "synthetic",
                "partitioner": "natural",
                "model": "perceptron",
                "local_epochs": 0,
                "local_steps": 40,
                "batch_size": 0,
                "lr": 0.2,
                "num_server_rounds": 3,
                "results_dir": str(tmp_path),
                "client_device": "cpu",
                "server_device": "cpu",
                **values,
            }
        )
        experiment = prepare(config, 5)
        folder = run(SequentialGrid(client_app.app, 5), experiment).path
        return experiment, [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]

    return run_it


def test_a_run_records_what_a_loop_in_numpy_finds(
    record: Callable[..., tuple[Experiment, list[Any]]],
) -> None:
    experiment, records = record(record_divergence=True)
    points = [
        np.asarray(experiment.dataset.x[experiment.partition.client(i)], dtype=np.float64) for i in range(5)
    ]
    labels = [experiment.dataset.y[experiment.partition.client(i)] for i in range(5)]

    def slope(client: int, b: float) -> float:
        return float(np.mean(expit(points[client] @ PERCEPTRON_SLOPE + b) - labels[client]))

    bias, expected = 0.0, []
    for _ in range(3):
        local = []
        for client in range(5):
            b = bias
            for _ in range(40):
                b -= 0.2 * slope(client, b)
            local.append(b)
        bias = float(np.mean(local))
        gaps = [abs(slope(i, b) - np.mean([slope(j, b) for j in range(5)])) for i, b in enumerate(local)]
        expected.append((max(gaps), np.var(local)))
    assert "divergence" not in records[0]
    found = [(r["divergence"], r["drift"]) for r in records[1:]]
    assert np.array(found) == pytest.approx(np.array(expected), rel=1e-4)


def test_unless_asked_a_run_records_none(record: Callable[..., tuple[Experiment, list[Any]]]) -> None:
    _, records = record()
    assert not any("divergence" in r or "drift" in r for r in records)


@pytest.mark.parametrize("name", REGISTRY)
def test_every_strategy_records_it_and_its_result_stays_the_same(
    name: str, record: Callable[..., tuple[Experiment, list[Any]]]
) -> None:
    with_it, without = (
        record(strategy=name, record_divergence=asked, buffer_size=2, server_lr=0.5)[1]
        for asked in (True, False)
    )
    assert [r["loss"] for r in with_it] == [r["loss"] for r in without]
    measured = [r for r in with_it if r.get("contributions", r.get("participants", 0))]
    assert measured
    assert all(r["divergence"] > 0 and r["drift"] >= 0 for r in measured)


def test_devices_keep_their_data_to_themselves(configure: Callable[..., RunConfig], tmp_path: Path) -> None:
    class SomewhereElse(SequentialGrid):
        """A grid that isn't one of the simulation engines."""

    config = configure(record_divergence=True, results_dir=str(tmp_path / "results"))
    with pytest.raises(
        ConfigError, match=r"^record-divergence = true: only a simulation has all clients' data"
    ):
        run(SomewhereElse(client_app.app, 5), prepare(config, 5))
    assert not (tmp_path / "results").exists()
