"""``tiers = regions:R``: the strategy's clients are regions of clients, on the engines of this process."""

from contextlib import suppress

import numpy as np
import pytest

from fedapp import server
from fedapp.config import ConfigError, RunConfig
from fedapp.config.key import KeyConflictError
from fedapp.engine.run import make_grid
from strategies import REGISTRY
from tests.runs import lines_of, summary_of, vector_of


@pytest.fixture
def play(tmp_path):
    """Run 10 clients; return the run's folder."""

    def run(name, engine="vectorized", *, clients=10, **values):
        given = {"num-server-rounds": 3, "model": "logistic", "figures": False, "results-dir": str(tmp_path)}
        given |= {key.replace("_", "-"): value for key, value in values.items()} | {"run-name": name}
        config = RunConfig.load(given)
        return server.run(make_grid(engine, clients), server.prepare(config, clients)).path

    return run


@pytest.mark.parametrize(("weights", "down"), [("samples", "none"), ("uniform", "none"), ("samples", "int8")])
def test_one_edge_round_is_the_flat_run(play, weights, down) -> None:
    values = {
        "compression_down": down,
        "strategy": "fedprox",
        "server_optimizer": "adam",
        "lr_schedule": "cosine",
        "client_weights": weights,
    }
    flat = play("flat", **values)
    vectorized, sequential = (
        play(engine, engine, tiers="regions:3", **values) for engine in ("vectorized", "sequential")
    )
    np.testing.assert_allclose(vector_of(vectorized), vector_of(flat), rtol=0, atol=1e-6)
    np.testing.assert_allclose(vector_of(sequential), vector_of(flat), rtol=0, atol=1e-6)
    for ours, theirs in zip(lines_of(vectorized), lines_of(flat), strict=True):
        assert (ours["time"], ours["loss"]) == pytest.approx((theirs["time"], theirs["loss"]), rel=1e-5)
    assert lines_of(vectorized)[-1]["participants"] == 3
    assert summary_of(vectorized)["unread-keys"] == summary_of(flat)["unread-keys"] == []


def test_edge_rounds_take_their_time_and_are_the_same_on_both_engines(play) -> None:
    values = {"strategy": "fedfix", "tiers": "regions:4", "edge_rounds": 2, "fedfix_interval": 1.0}
    paths = [play(engine, engine, **values) for engine in ("vectorized", "sequential")]
    np.testing.assert_allclose(vector_of(paths[0]), vector_of(paths[1]), rtol=0, atol=1e-6)
    # F80 of 10 clients: the slowest of regions 0 to 3 take .2 + .8 × (2, 4, 7, 9)/9 s, twice.
    once = play("once", **values | {"num_server_rounds": 1, "strategy": "async-fedavg"})
    assert lines_of(once)[1]["time"] == pytest.approx(2 * (0.2 + 0.8 * 2 / 9))


def test_a_resumed_run_is_the_run_at_once(play, tmp_path) -> None:
    values = {"strategy": "fedasync", "tiers": "regions:4", "checkpoint_every": 2}
    whole = play("whole", **values | {"num_server_rounds": 6})
    part = play("part", **values | {"num_server_rounds": 4})
    config = RunConfig.load({"resume": str(part), "num-server-rounds": 6, "results-dir": str(tmp_path)})
    again = server.run(make_grid("vectorized", 10), server.prepare(config, 10)).path
    np.testing.assert_array_equal(vector_of(again), vector_of(whole))


def test_every_method_that_is_not_refused_runs_on_regions(play) -> None:
    refused = set()
    for name in REGISTRY:
        with suppress(KeyConflictError):
            assert (
                summary_of(play(name, clients=4, strategy=name, tiers="regions:2", num_server_rounds=2))[
                    "status"
                ]
                == "finished"
            )
            continue
        refused.add(name)
    assert {"spectral", "scaffold", "fednova", "feddyn", "ditto", "async-spectral", "fedcompass"} <= refused
    assert not refused & {"fedavg", "fedprox", "fedfix", "fedbuff", "async-fedavg", "fedasync", "mifa"}


def test_more_regions_than_clients_and_devices_are_refused() -> None:
    with pytest.raises(ConfigError, match="tiers = 'regions:5': there are 4 clients; allowed are 4 or less"):
        server.prepare(RunConfig.load({"tiers": "regions:5"}), 4)
    with pytest.raises(ConfigError, match="tiers = 'regions:2': only a simulation divides its clients"):
        server.prepare(RunConfig.load({"tiers": "regions:2"}), 4, on_devices=True)
