"""Divergence and drift of the clients, as a run records them."""

from typing import Any

import numpy as np
import pytest
from scipy.special import expit

from fedapp import client_app
from fedapp.config import ConfigError
from fedapp.engine.sequential import SequentialGrid
from fedapp.models import PERCEPTRON_SLOPE
from fedapp.server import Experiment, prepare, run
from strategies.flower.grids import DEPLOYMENT
from tests.runs import lines_of
from tests.selection import one_of_each


@pytest.fixture
def record(configure, tmp_path):
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
        return experiment, lines_of(folder)

    return run_it


def test_a_run_records_what_a_loop_in_numpy_finds(record):
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


def test_unless_asked_a_run_records_none(record):
    _, records = record()
    assert not any("divergence" in r or "drift" in r for r in records)


@pytest.mark.parametrize("name", one_of_each("has_rounds", "writes_requests", "personal"))
def test_every_strategy_records_it_and_its_result_stays_the_same(name, record):
    with_it, without = (
        record(strategy=name, record_divergence=asked, buffer_size=2, server_lr=0.5)[1]
        for asked in (True, False)
    )
    assert [r["loss"] for r in with_it] == [r["loss"] for r in without]
    measured = [r for r in with_it if r.get("contributions", r.get("participants", 0))]
    assert measured
    assert all(r["divergence"] > 0 and r["drift"] >= 0 for r in measured)


def test_devices_keep_their_data_to_themselves(configure, tmp_path):
    class SomewhereElse(SequentialGrid):
        """A grid that isn't one of the simulation engines."""

        engine = DEPLOYMENT

    config = configure(record_divergence=True, results_dir=str(tmp_path / "results"))
    with pytest.raises(
        ConfigError, match=r"^record-divergence = true: only a simulation has all clients' data"
    ):
        run(SomewhereElse(client_app.app, 5), prepare(config, 5))
    assert not (tmp_path / "results").exists()
