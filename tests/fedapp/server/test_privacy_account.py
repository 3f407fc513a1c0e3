"""The privacy account of whole runs: what is spent, the noise for a target, and a run that ends in time."""

import json
import logging
import tomllib
from pathlib import Path
from typing import Any

import pytest

from fedapp.client_app import app
from fedapp.config import ConfigError, RunConfig
from fedapp.config.options import SimulationConfig
from fedapp.engine.run import make_grid, run_on
from fedapp.engine.sequential import SequentialGrid
from fedapp.gaussian_mechanism import gaussian_epsilon
from fedapp.report import read_metrics
from fedapp.server import prepare, privacy, run
from fedapp.server.run_directory import RunDirectory
from fedapp.server.sampled_gaussian import Sampling, sampled_epsilon
from tests.runs import vector_of

CLIENTS, DELTA = 10, 1e-5
CENTRAL = {"dp": "central", "client-weights": "uniform"}  # with an adaptive clipping norm
POISSON = {**CENTRAL, "participation": "poisson", "fraction-train": 0.1}
TREE = {"dp-mechanism": "tree", "dp-clipping-norm": 0.5}
DISTRIBUTED = {**CENTRAL, "dp-mechanism": "distributed", "dp-clipping-norm": 0.5, "secure-sums": True}
WITHOUT_ROUNDS = {
    **CENTRAL,
    "dp-clipping-norm": 0.01,
    "strategy": "fedbuff",
    "buffer-size": 3,
    "num-server-rounds": 60,
    "dp-max-contributions": 3,
}


def config_of(tmp_path: Path, **values: Any) -> RunConfig:
    given = {"model": "logistic", "num-server-rounds": 4, "figures": False, "run-name": "run"}
    return RunConfig.load({**given, "results-dir": str(tmp_path), **values})


def done(config: RunConfig, engine: str = "vectorized") -> tuple[list[Any], dict[str, Any], bytes]:
    """Run it; return its lines of metrics, its summary and its model."""
    experiment = prepare(config, CLIENTS)
    directory = RunDirectory(experiment.config)
    path = run(make_grid(engine, CLIENTS, workers=1), experiment, directory=directory).path
    summary = json.loads((path / "summary.json").read_text("utf-8"))
    return read_metrics(path), summary, (path / "model.safetensors").read_bytes()


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_every_round_of_poisson_sampling_counts_the_empty_ones_too(engine, tmp_path):
    lines, summary, _ = done(config_of(tmp_path, **POISSON, **{"num-server-rounds": 6}), engine)
    assert 0 in [line["participants"] for line in lines[1:]]
    expected = [sampled_epsilon(1.0, DELTA, rounds, Sampling(0.1)) for rounds in range(1, 7)]
    assert [line["dp-epsilon"] for line in lines[1:]] == expected
    assert summary["dp-epsilon"] == expected[-1] < gaussian_epsilon(1.0, DELTA, 6) / 4
    assert summary["dp-neighbours"].startswith("add or remove one client")


@pytest.mark.parametrize(
    ("values", "sampling"),
    [
        ({"participation": "poisson", "fraction-train": 0.3}, Sampling(0.3)),
        ({"participation": "uniform", "fraction-train": 0.3}, Sampling(drawn=3, clients=CLIENTS)),
        (
            {"participation": "flower", "fraction-train": 0.1},
            Sampling(drawn=2, clients=CLIENTS),
        ),  # 2 at least
        ({"participation": "turns", "fraction-train": 0.2}, Sampling(num_turns=5)),
        (
            {"participation": "turns", "fraction-train": 0.2, **TREE, "dp-restart": 5},
            Sampling(num_turns=5, restart=5),
        ),
        (TREE, Sampling(restart=0)),
        ({**DISTRIBUTED, "participation": "turns", "fraction-train": 0.5}, Sampling(num_turns=2)),
        # What isn't drawn among all clients, or is seen by the server.
        ({"participation": "full"}, Sampling()),
        ({"participation": "fixed:0,1"}, Sampling()),
        ({"participation": "uniform", "fraction-train": 0.3, "availability": "bernoulli:0.5"}, Sampling()),
        ({"participation": "uniform", "fraction-train": 0.3, "clock": "wall"}, Sampling()),
        ({"participation": "uniform", "fraction-train": 0.3, "round-deadline": 1.0}, Sampling()),
        ({"participation": "poisson", "fraction-train": 0.3, "dp": "local"}, Sampling()),
        ({**DISTRIBUTED, "participation": "poisson", "fraction-train": 0.3}, Sampling()),
        ({**DISTRIBUTED, "participation": "uniform", "fraction-train": 0.3}, Sampling()),
        ({"participation": "poisson", "fraction-train": 0.3, "clock": "wall"}, Sampling(0.3)),
    ],
)
def test_the_account_counts_on_the_draw_only_where_it_may(values, sampling, tmp_path):
    experiment = prepare(config_of(tmp_path, **{**CENTRAL, **values}), CLIENTS)
    assert privacy.sampling_of(experiment.config, experiment.strategy, CLIENTS) == sampling


@pytest.mark.parametrize(
    "values",
    [
        POISSON,
        CENTRAL,
        {**CENTRAL, **TREE, "participation": "turns", "fraction-train": 0.5, "dp-restart": 2},
        {"dp": "local", "strategy": "spectral", "message-epsilon": 1.0, "dp-clipping-norm": 1e-3},
    ],
)
def test_the_noise_for_a_target_is_solved_and_said(values, tmp_path, caplog):
    with caplog.at_level(logging.INFO, "flwr.fedapp"):
        lines, _, _ = done(config_of(tmp_path, **values, **{"dp-target-epsilon": 3.0}))
    assert 2.99 < lines[-1]["dp-epsilon"] <= 3.0
    (said,) = [r.getMessage() for r in caplog.records if r.getMessage().startswith("dp-target-epsilon = 3:")]
    assert "for 4 rounds (dp-delta = 1e-05; " in said
    # What the run's own config.toml says repeats it.
    again = RunConfig.load({**values, "dp-target-epsilon": 3.0, "num-server-rounds": 4, "model": "logistic"})
    noise = prepare(again, CLIENTS).config.dp_noise_multiplier
    prepare(again.model_copy(update={"dp_noise_multiplier": noise}), CLIENTS)


@pytest.mark.parametrize(
    ("values", "done_after"),
    [
        (POISSON, 2),
        ({"dp": "local"}, 2),
        ({"dp": "local", "keep": "best"}, 2),  # the best evaluation has no other reason to end the run
        ({"dp": "local", "strategy": "fedfix", "num-server-rounds": 50}, None),
    ],
)
def test_a_run_ends_before_it_passes_the_most(values, done_after, tmp_path):
    whole = config_of(tmp_path, **values)
    most = (
        8.5
        if done_after is None
        else sampled_epsilon(
            1.0, DELTA, done_after, privacy.sampling_of(whole, prepare(whole, CLIENTS).strategy, CLIENTS)
        )
    )
    lines, summary, _ = done(config_of(tmp_path, **values, **{"dp-max-epsilon": most}))
    assert summary["status"] == "finished"
    assert summary["reason"].startswith(f"dp-max-epsilon = {most:g}: one more ")
    assert lines[-1]["dp-epsilon"] == summary["dp-epsilon"] <= most
    if done_after is None:  # the tasks of the fastest client: 3 would be 8.38, 4 are 10
        assert summary["dp-epsilon"] == gaussian_epsilon(1.0, DELTA, 3)
    else:
        assert (lines[-1]["aggregation"], summary["aggregations"]) == (done_after, done_after)


@pytest.mark.parametrize(
    "own", [POISSON, {**CENTRAL, **TREE, "participation": "turns", "fraction-train": 0.5, "dp-restart": 4}]
)
def test_a_run_that_goes_on_keeps_its_account_and_its_noise(own, tmp_path):
    values = {**own, "dp-target-epsilon": 3.0, "checkpoint-every": 2, "num-server-rounds": 6}
    config = config_of(tmp_path, **values)
    experiment = prepare(config, CLIENTS)
    grid = make_grid("vectorized", CLIENTS, workers=1)
    # Told to stop after two rounds.
    path = run(grid, experiment, lambda: experiment.strategy.session.aggregations == 2).path
    before = json.loads((path / "summary.json").read_text("utf-8"))
    resume = {"resume": str(path)}
    lines, summary, model = done(RunConfig.load(resume))
    other = {"run-name": "whole"}
    whole_lines, whole, whole_model = done(config_of(tmp_path, **values, **other))
    if own is POISSON:  # whose norm adapts
        assert before["dp-clipping-norm"] != summary["dp-clipping-norm"] == whole["dp-clipping-norm"]
    assert before["dp-epsilon"] < summary["dp-epsilon"] == whole["dp-epsilon"] <= 3.0
    assert [line["dp-epsilon"] for line in lines[1:]] == [line["dp-epsilon"] for line in whole_lines[1:]]
    assert model == whole_model
    with pytest.raises(ConfigError, match="num-server-rounds = 60: with the noise that the run has"):
        prepare(RunConfig.load({**resume, "num-server-rounds": 60}), CLIENTS)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (
            {"dp-noise-multiplier": 0.0, "dp-target-epsilon": 3.0},
            "dp = 'central' with dp-noise-multiplier = 0.0: ",
        ),
        (
            {"dp-noise-multiplier": 9.0, "dp-target-epsilon": 3.0},
            "dp-noise-multiplier = 9: dp-target-epsilon = 3",
        ),
        ({"dp-target-epsilon": 1e-6, "dp-delta": 1e-12}, "can't be reached in 4 rounds"),
        ({"dp-target-epsilon": 1e-9}, "dp-target-epsilon = 1e-09: must be"),
        (TREE, "participation = full, turns, fixed:…, or dp-mechanism = gaussian"),
        ({**WITHOUT_ROUNDS, "dp-mechanism": "tree"}, "dp-mechanism = 'tree' and strategy = 'fedbuff': "),
        ({**DISTRIBUTED, "secure-sums": False}, "dp-mechanism = 'distributed' and secure-sums = false: "),
        (
            {**DISTRIBUTED, "dp-clipping-norm": 0.0},
            "dp-mechanism = 'distributed' and dp-clipping-norm = 0.0: ",
        ),
        ({**DISTRIBUTED, "dp-noise-multiplier": 0.0}, "dp-noise-multiplier = 0"),
        (
            {**DISTRIBUTED, "participation": "uniform", "fraction-train": 0.2},
            "secure-sums: 2 clients in a sum",
        ),
        ({"dp-max-epsilon": 0.01}, "dp-max-epsilon = 0.01: the first round alone costs 1.685"),
        (
            {"dp": "local", "strategy": "fedbuff", "buffer-size": 2, "dp-target-epsilon": 3.0},
            "how often a client sends isn't known beforehand",
        ),
        ({**WITHOUT_ROUNDS, "dp-max-contributions": 0, "dp-target-epsilon": 3.0}, "dp-max-contributions > 0"),
        (
            {**WITHOUT_ROUNDS, "dp-clipping-norm": 0.0},
            "dp-clipping-norm = 0.0 and strategy = 'fedbuff': a norm adapts",
        ),
        (
            {"dp": "local", "strategy": "spectral", "message-epsilon": 4.0, "dp-target-epsilon": 3.0},
            "the direction of a client alone costs message-epsilon = 4",
        ),
    ],
)
def test_a_budget_that_cannot_be_is_refused_before_a_client_starts(values, said, tmp_path):
    own = {"participation": "full", "fraction-train": 1.0} if "strategy" in values else {}
    with pytest.raises(ConfigError) as caught:
        prepare(config_of(tmp_path, **{**POISSON, **values, **own}), CLIENTS)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("values", "engine"), [({}, "vectorized"), ({"strategy": "fedfix"}, "sequential")])
def test_without_rounds_the_account_is_of_the_client_that_has_contributed_most(values, engine, tmp_path):
    lines, summary, _ = done(
        config_of(tmp_path, **{**WITHOUT_ROUNDS, **values, "dp-target-epsilon": 8.0}), engine
    )
    noise = tomllib.loads((tmp_path / "run" / "config.toml").read_text("utf-8"))["dp-noise-multiplier"]
    spent = [line["dp-epsilon"] for line in lines[1:]]
    assert {*spent} == {gaussian_epsilon(noise, DELTA, number) for number in (1, 2, 3)}
    assert spent == sorted(spent)
    assert 7.99 < spent[-1] == summary["dp-epsilon"] <= 8.0
    assert summary["status"] == "finished"
    assert summary["reason"] == "dp-max-contributions = 3: every client has contributed as often"
    assert summary["dp-neighbours"].startswith("one client's updates, or zero in their place")


def test_a_bound_on_contributions_outlives_a_stop(tmp_path):
    values = {**WITHOUT_ROUNDS, "checkpoint-every": 2}
    experiment = prepare(config_of(tmp_path, **values), CLIENTS)
    grid = make_grid("sequential", CLIENTS, workers=1)
    path = run(grid, experiment, lambda: experiment.strategy.session.aggregations == 8).path
    _, summary, model = done(RunConfig.load({"resume": str(path)}), "sequential")
    _, whole, whole_model = done(config_of(tmp_path, **values, **{"run-name": "whole"}), "sequential")
    assert model == whole_model
    assert summary["dp-epsilon"] == whole["dp-epsilon"] == gaussian_epsilon(1.0, DELTA, 3)


def test_against_the_server_the_rounds_of_a_client_count_in_full_also_after_a_stop(tmp_path):
    own = {**DISTRIBUTED, "participation": "poisson", "fraction-train": 0.4, "num-server-rounds": 6}
    own["checkpoint-every"] = 3
    should_stop = prepare(config_of(tmp_path, **own), CLIENTS)
    grid = make_grid("sequential", CLIENTS, workers=1)
    path = run(grid, should_stop, lambda: should_stop.strategy.session.aggregations == 3).path
    _, summary, model = done(RunConfig.load({"resume": str(path)}), "sequential")
    experiment = prepare(config_of(tmp_path, **own, **{"run-name": "whole"}), CLIENTS)
    whole = run(make_grid("sequential", CLIENTS, workers=1), experiment).path
    assert model == (whole / "model.safetensors").read_bytes()
    most = max(account.accepted for _, account in experiment.strategy.session.client_stats.items())
    assert 1 < most < 6
    assert summary["dp-epsilon"] == gaussian_epsilon(1.0, DELTA, most)
    assert summary["dp-neighbours"].endswith("with the same rounds in which it takes part")


def test_clients_add_the_noise_for_a_target(tmp_path):
    still = {"init": "zeros", "lr": 1e-9, "dp-target-epsilon": 3.0}
    own = {**DISTRIBUTED, **still, "participation": "turns", "fraction-train": 0.5}
    lines, _, _ = done(config_of(tmp_path, **own), "sequential")
    noise = tomllib.loads((tmp_path / "run" / "config.toml").read_text("utf-8"))["dp-noise-multiplier"]
    assert 2.99 < lines[-1]["dp-epsilon"] == gaussian_epsilon(noise, DELTA, 2) <= 3.0
    found = vector_of(tmp_path / "run")
    # Four rounds of five clients, of which four have the noise of z S.
    deviation = 2 * noise * 0.5 * (5 / 4) ** 0.5 / 5
    assert found.std() == pytest.approx(deviation, rel=4 / (2 * len(found)) ** 0.5)


def test_config_toml_has_the_noise_from_the_first_round_on(tmp_path):
    """A run that is killed goes on from there; also where the folder is made by who chooses the engine."""
    seen = []

    def should_stop():
        seen.append(tomllib.loads((tmp_path / "run" / "config.toml").read_text("utf-8")))
        return True

    config = config_of(tmp_path, **POISSON, **{"dp-target-epsilon": 3.0})
    run_on("sequential", config, SimulationConfig(**{"num-supernodes": CLIENTS}), should_stop=should_stop)
    assert seen[0]["dp-noise-multiplier"] == prepare(config, CLIENTS).config.dp_noise_multiplier != 1.0


def test_an_account_of_samples_needs_its_package(monkeypatch, tmp_path):
    monkeypatch.setattr("fedapp.server.sampled_gaussian.PACKAGE", "a_package_that_nobody_has")
    prepare(config_of(tmp_path, **CENTRAL), CLIENTS)
    with pytest.raises(ConfigError, match=r"needs dp-accounting, .*pip install '\.\[privacy\]'"):
        prepare(config_of(tmp_path, **POISSON), CLIENTS)


def test_an_observer_of_ones_own_sees_the_end(tmp_path, caplog):
    config = config_of(tmp_path, dp="local", **{"dp-max-epsilon": 6.0})
    with caplog.at_level(logging.WARNING, "flwr.fedapp"):
        run(SequentialGrid(app, 3), prepare(config, 3))
    assert "the run ends after aggregation 1: dp-max-epsilon = 6: one more round would pass it" in caplog.text
