"""Differential privacy in whole runs: what leaves a client, what it costs, and what is refused."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st

from fedapp.client_app import app
from fedapp.config import ConfigError, RunConfig
from fedapp.engine.run import make_grid
from fedapp.engine.sequential import SequentialGrid
from fedapp.gaussian_mechanism import gaussian_epsilon, gaussian_sigma
from fedapp.report import read_metrics
from fedapp.server import prepare, run
from fedapp.server.run_directory import RunDirectory
from strategies.flower import messages
from strategies.flower.arrays import Layout
from tests.selection import one_of_each

CENTRAL = {"dp": "central", "client-weights": "uniform"}


def config_of(tmp_path: Path, **values: Any) -> RunConfig:
    given = {"model": "logistic", "num-server-rounds": 3, "buffer-size": 2, "server-lr": 0.1, "seed": 1}
    return RunConfig.load({**given, "results-dir": str(tmp_path), **values})


class Watching(SequentialGrid):
    """Keeps ‖Δ‖ of every trained model that leaves a client."""

    def __init__(self) -> None:
        super().__init__(app, 3)
        self.norms: list[float] = []
        self.metrics: list[set[str]] = []

    def _work(self, message: Any) -> Any:
        reply = super()._work(message)
        if reply.has_content():
            self.metrics.append(set(messages.metrics_of(reply)))
        if message.metadata.message_type == messages.TRAIN:
            sent, trained = messages.arrays_of(message), messages.arrays_of(reply)
            assert sent is not None
            assert trained is not None
            layout = Layout.of(sent)
            self.norms.append(float(np.linalg.norm(layout.to_vector(trained) - layout.to_vector(sent))))
        return reply


def test_central_no_update_is_longer_than_the_norm_and_no_loss_is_sent(tmp_path):
    free, bound = Watching(), Watching()
    run(free, prepare(config_of(tmp_path), 3))
    directory = run(bound, prepare(config_of(tmp_path, **CENTRAL, **{"dp-clipping-norm": 0.05}), 3))
    assert min(free.norms) > 0.05
    assert bound.norms == pytest.approx([0.05] * 9, rel=1e-4)
    assert set().union(*bound.metrics) == {"num-examples", "num-steps"}
    assert "train-loss" in set().union(*free.metrics)
    metrics = read_metrics(directory.path)
    expected = [gaussian_epsilon(1.0, 1e-5, rounds) for rounds in (1, 2, 3)]
    assert [line["dp-epsilon"] for line in metrics[1:]] == expected
    assert "dp-epsilon" not in metrics[0]


@pytest.mark.parametrize("strategy", one_of_each("has_rounds", "writes_requests", "personal"))
def test_local_noise_is_on_what_leaves_the_client(strategy, tmp_path):
    grid = Watching()
    values = {"dp": "local", "dp-clipping-norm": 0.05, "dp-noise-multiplier": 4.0, "message-epsilon": 100.0}
    directory = run(grid, prepare(config_of(tmp_path, strategy=strategy, **values), 3))
    size = 64 * 10 + 10
    # ‖noise‖² has mean D (2 z S)², and a standard deviation of √(2/D) = 5.5 % of it
    assert np.array(grid.norms) == pytest.approx(2 * 4 * 0.05 * math.sqrt(size), rel=0.15)
    spent = read_metrics(directory.path)[-1]["dp-epsilon"]
    assert spent >= gaussian_epsilon(4.0, 1e-5, math.ceil(len(grid.norms) / 3))


@pytest.mark.parametrize("values", [{"strategy": "spectral"}, {"client-weights": "adjacency"}])
def test_what_directions_cost_is_added(values, tmp_path):
    private = {"dp": "local", "dp-noise-multiplier": 4.0, "message-epsilon": 100.0, "message-delta": 3e-5}
    directory = run(SequentialGrid(app, 3), prepare(config_of(tmp_path, **values, **private), 3))
    first, *others = read_metrics(directory.path)
    # Evaluated when all have told their directions, and nobody an update.
    assert (first["dp-epsilon"], first["dp-delta"]) == (100.0, 3e-5)
    assert [(line["dp-epsilon"], line["dp-delta"]) for line in others] == [
        (100.0 + gaussian_epsilon(4.0, 1e-5, rounds), pytest.approx(4e-5)) for rounds in (1, 2, 3)
    ]


def test_a_graph_of_last_updates_costs_nothing_beside_them(tmp_path):
    values = {"strategy": "spectral", "graph-source": "updates", "dp": "local", "dp-noise-multiplier": 4.0}
    directory = run(SequentialGrid(app, 3), prepare(config_of(tmp_path, **values), 3))
    spent = [line["dp-epsilon"] for line in read_metrics(directory.path)[1:]]
    assert spent == [gaussian_epsilon(4.0, 1e-5, rounds) for rounds in (1, 2, 3)]


@pytest.mark.parametrize(
    "values",
    [
        CENTRAL,
        {**CENTRAL, "strategy": "fedbuff", "dp-clipping-norm": 0.5},
        {"dp": "local", "strategy": "fedbuff"},
    ],
)
def test_a_private_run_is_the_same_whichever_engine_and_whenever(values, tmp_path):
    models = []
    for number, engine in enumerate(["sequential", "sequential", "vectorized"]):
        experiment = prepare(config_of(tmp_path, **values), 3)
        directory = run(
            make_grid(engine, 3, workers=1), experiment, directory=RunDirectory(experiment.config)
        )
        models.append(safetensors.numpy.load_file(directory.path / "model.safetensors")["1.weight"])
        assert number == 0 or np.allclose(models[0], models[number], atol=1e-5)
    assert np.array_equal(models[0], models[1])


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_an_update_of_zero_gets_its_noise_and_counts(engine, tmp_path):
    experiment = prepare(config_of(tmp_path, dp="local", lr=1e-30, **{"num-server-rounds": 1}), 3)
    directory = run(make_grid(engine, 3, workers=1), experiment, directory=RunDirectory(experiment.config))
    last = read_metrics(directory.path)[-1]
    assert (last["participants"], last["failures"]) == (3, 0)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        (
            {"strategy": "async-fedavg", "dp": "central"},
            "dp = 'central' with strategy = 'async-fedavg': the account",
        ),
        (
            {"strategy": "fedfix", "aggregation-rule": "krum"},
            "aggregation-rule = 'krum' with strategy = 'fedfix': ",
        ),
        (
            {"strategy": "rennala", "aggregation-rule": "krum"},
            "no robust rule fits how the method puts updates together",
        ),
        ({"strategy": "spectral", "dp": "central"}, "dp = 'central' with strategy = 'spectral': "),
        ({"strategy": "spectral", "dp": "local"}, "dp = 'local' with message-epsilon = 0.0 and strategy"),
        ({"dp": "central"}, "dp = 'central' with client-weights = 'samples': "),
        ({"dp": "local", "client-evaluation": True}, "dp = 'local' with client-evaluation = true: "),
        (
            {"aggregation-rule": "krum", "client-weights": "uniform", "faulty-clients": 1},
            "aggregation-rule = 'krum', faulty-clients = 1: needs 5 clients a round or more, 3 take part",
        ),
    ],
)
def test_what_does_not_go_together_is_refused_before_any_client_starts(values, text, tmp_path):
    with pytest.raises(ConfigError) as caught:
        prepare(config_of(tmp_path, **values), 3)
    assert text in str(caught.value)


def test_epsilon_by_hand():
    # Balle and Wang: δ(ε = 0) = 2 Φ(1/(2z)) − 1; z = 1: 2 · 0.69146 − 1 = 0.38292
    assert gaussian_epsilon(1.0, 0.38293) == 0
    assert 0 < gaussian_epsilon(1.0, 0.38292) < 1e-4
    assert gaussian_epsilon(2.0, 1e-5, releases=4) == pytest.approx(gaussian_epsilon(1.0, 1e-5))


@given(st.floats(0.2, 20), st.floats(1e-9, 0.1), st.integers(1, 1000))
def test_epsilon_undoes_sigma(noise, delta, releases):
    epsilon = gaussian_epsilon(noise, delta, releases)
    if epsilon > 1e-6:
        assert gaussian_sigma(epsilon, delta, 1.0) * releases**0.5 == pytest.approx(noise, rel=1e-6)
    assert gaussian_epsilon(noise, delta, releases + 1) >= epsilon
