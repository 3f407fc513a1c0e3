"""Values that nothing in a run reads: named once, listed in summary.json, and really without effect."""

import logging
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fedapp import client_app, server
from fedapp.config import RunConfig, defaults
from fedapp.config.run_config import key_of
from fedapp.engine.sequential import SequentialGrid
from fedapp.server.run_directory import RunDirectory
from strategies import REGISTRY, AsynchronousStrategy, StrategyConfig
from strategies.core.conflicts import may_set
from tests.runs import summary_of
from tests.selection import spread

CLIENTS = 3
COMMON = {"model": "logistic", "num-server-rounds": 2, "checkpoint-every": 1}

Values = Mapping[str, Any]


@pytest.fixture
def go(run_app):
    """Run the app for two rounds; return the run's folder."""
    return lambda values, name="run": run_app({**COMMON, **values}, CLIENTS, name=name)


def unread(values: Values) -> dict[str, Any]:
    return dict(server.prepare(RunConfig.load({**COMMON, **values}), CLIENTS).unread)


def content(path: Path, values: Values) -> dict[str, bytes]:
    """Return what a run came to; its metrics only in virtual time, as real seconds are never the same."""
    names = ["model.safetensors", "partition.npz", "graph.npz"] + ["metrics.jsonl"] * ("clock" not in values)
    return {name: (path / name).read_bytes() for name in names if (path / name).exists()}


# The declarations --------------------------------------------------------------------------------------------


def test_a_key_is_a_strategys_own_if_it_is_in_some_configs_and_not_in_all():
    every = [{field.name.replace("_", "-") for field in fields(kind.Config)} for kind in REGISTRY.values()]
    common = {field.name.replace("_", "-") for field in fields(StrategyConfig)}
    some = set().union(*every) - common
    rounds = ", ".join(name for name, kind in REGISTRY.items() if kind.has_rounds)
    others = ", ".join(name for name, kind in REGISTRY.items() if not kind.has_rounds)
    said = {rounds: "strategies with rounds", others: "strategies without rounds"}
    own = set()
    for key in RunConfig.key_names():
        name_of = key.replace("-", "_")
        having = ", ".join(
            n for n, kind in REGISTRY.items() if may_set(kind.Config, kind.capabilities, name_of)
        )
        if key_of(RunConfig, key).readers.text(key).split(";")[0] == said.get(having, having):
            own.add(key)
    # Clients read these too, under any strategy, where local privacy is asked for.
    assert some - own == {"dp", "dp-clipping-norm", "dp-noise-multiplier"}
    assert own - some == set()


# What is said and what isn't ---------------------------------------------------------------------------------

# Given, and what of it isn't read.
CASES: list[tuple[dict[str, Any], list[str]]] = [
    ({"strategy": "fedavg", "proximal-mu": 0.3}, ["proximal-mu"]),
    ({"strategy": "fedprox", "perturbation-beta": 0.3}, ["perturbation-beta"]),
    ({"strategy": "fednova", "feddyn-alpha": 0.3, "proximal-mu": 0.3}, ["proximal-mu", "feddyn-alpha"]),
    ({"strategy": "ditto", "fedamp-sigma": 2.0, "proximal-mu": 0.3}, ["proximal-mu", "fedamp-sigma"]),
    ({"strategy": "fedamp", "ditto-lambda": 0.3}, ["ditto-lambda"]),
    ({"strategy": "fedavg", "neighbour-memory": 1.0}, ["neighbour-memory"]),
    ({"strategy": "spectral", "graph-source": "updates", "message-epsilon": 1.0}, ["message-epsilon"]),
    ({"strategy": "spectral", "neighbour-memory": 1.0, "perturbation-beta": 1.0}, ["neighbour-memory"]),
    (
        {
            "strategy": "async-spectral",
            "buffer-size": 2,
            "staleness-discount": "polynomial:1",
            "perturbation-beta": 1.0,
        },
        ["staleness-discount"],
    ),
    ({"strategy": "fedavg", "aggregation-weights": "identical"}, ["aggregation-weights"]),
    ({"strategy": "async-fedavg", "server-lr": 0.1, "fedfix-interval": 2.0}, ["fedfix-interval"]),
    ({"strategy": "fedfix", "buffer-size": 2}, ["buffer-size"]),
    ({"strategy": "ringmaster", "aggregation-weights": "identical"}, ["aggregation-weights"]),
    ({"strategy": "ace", "buffer-size": 2, "mixing-alpha": 0.5}, ["buffer-size", "mixing-alpha"]),
    (
        {"strategy": "async-fedavg", "staleness-discount": "polynomial:1", "delay-threshold": 1},
        ["staleness-discount", "delay-threshold"],
    ),
    (
        {
            "strategy": "async-fedavg",
            "server-lr": 0.1,
            "round-deadline": 0.5,
            "over-select": 0.5,
        },
        ["round-deadline", "over-select"],
    ),
    ({"strategy": "fedavg", "message-floor": 0.5}, ["message-floor"]),
    ({"strategy": "fedbuff", "buffer-size": 2, "neighbours": 1}, ["neighbours"]),
    (
        {"strategy": "fedavg", "message-epsilon": 1.0, "message-delta": 0.1},
        ["message-epsilon", "message-delta"],
    ),
    ({"strategy": "spectral", "message-delta": 0.1}, ["message-delta"]),
    ({"strategy": "spectral", "client-weights": "uniform"}, ["client-weights"]),
    ({"strategy": "fedavg", "participation": "paired", "client-weights": "uniform"}, ["client-weights"]),
    (
        {"size-ratio-bound": 1.1, "examples-bound": 9, "norm-ratio-bound": 0.5},
        ["size-ratio-bound", "examples-bound", "norm-ratio-bound"],
    ),
    (
        {"safeguards": "on", "client-weights": "uniform", "size-ratio-bound": 1.1, "examples-bound": 9},
        ["size-ratio-bound", "examples-bound"],
    ),
    ({"safeguards": "on", "strategy": "spectral", "size-ratio-bound": 1.1}, ["size-ratio-bound"]),
    ({"safeguards": "on", "arrival-weight-bound": 0.1}, ["arrival-weight-bound"]),
    ({"safeguards": "on", "update-norm-bound": 0.1, "norm-ratio-bound": 0.5}, ["norm-ratio-bound"]),
    ({"safeguards": "off", "clock": "wall", "norm-ratio-bound": 0.5}, ["norm-ratio-bound"]),
    (
        {"safeguards": "on", "dp": "central", "client-weights": "uniform", "norm-ratio-bound": 0.5},
        ["norm-ratio-bound"],
    ),
    ({"strategy": "async-fedavg", "server-lr": 0.1, "arrival-weight-bound": 0.1}, ["arrival-weight-bound"]),
    ({"strategy": "fedavg", "faulty-clients": 1}, ["faulty-clients"]),
    ({"strategy": "async-fedavg", "server-lr": 0.1, "faulty-clients": 1}, ["faulty-clients"]),
    (
        {"strategy": "fedavg", "dp-clipping-norm": 0.1, "dp-noise-multiplier": 9.0, "dp-delta": 0.1},
        ["dp-clipping-norm", "dp-noise-multiplier", "dp-delta"],
    ),
    ({"dp-target-epsilon": 1.0, "dp-max-epsilon": 1.0}, ["dp-target-epsilon", "dp-max-epsilon"]),
    (
        {"dp": "central", "client-weights": "uniform", "dp-clipping-norm": 0.5, "dp-clipping-quantile": 0.9},
        ["dp-clipping-quantile"],
    ),
    ({"dp": "local", "dp-clipping-quantile": 0.9}, ["dp-clipping-quantile"]),
    ({"dp": "local", "dp-mechanism": "tree", "dp-restart": 2}, ["dp-mechanism", "dp-restart"]),
    ({"dp": "local", "strategy": "fedfix", "dp-max-contributions": 2}, ["dp-max-contributions"]),
    ({"clock": "wall", "time-scenario": "F0"}, ["time-scenario"]),
    (
        {
            "clock": "wall",
            "time-scenario": "lognormal:1",
            "task-work": "flop",
            "availability": "bernoulli:0.1,9",
            "task-failure": 0.9,
        },
        ["time-scenario", "task-work", "availability", "task-failure"],
    ),
    ({"task-work": "flop"}, ["task-work"]),
    (
        {"partitioner": "iid", "class-imbalance": 9.0, "data-imbalance": 0.0},
        ["class-imbalance", "data-imbalance"],
    ),
    ({"dirichlet-alpha": 9.0}, ["dirichlet-alpha"]),
    ({"partitioner": "dirichlet", "dirichlet-alpha": 1.0, "class-imbalance": 9.0}, ["class-imbalance"]),
    ({"partitioner": "shards", "dirichlet-alpha": 1.0}, ["dirichlet-alpha"]),
    ({"partitioner": "iid", "similarity": 0.5}, ["similarity"]),
    ({"strategy": "fedavg", "drop-stragglers": True}, ["drop-stragglers"]),
    ({"strategy": "fedavg", "stragglers": 0.7}, ["stragglers"]),  # of a single epoch nothing is missing
    ({"step-heterogeneity": "speed", "time-scenario": "half-normal"}, ["step-heterogeneity"]),
    (
        {"strategy": "fedbuff", "buffer-size": 2, "stragglers": 0.5, "drop-stragglers": True},
        ["stragglers", "drop-stragglers"],
    ),
    ({"local-epochs": 5, "step-heterogeneity": "list:1,2,1"}, ["local-epochs"]),
    ({"local-epochs": 5, "step-heterogeneity": "range:1-3"}, ["local-epochs"]),
    ({"local-epochs": 5, "step-heterogeneity": "uniform:1-3"}, ["local-epochs"]),
    ({"metrics-host": "localhost"}, ["metrics-host"]),
    ({"client-device": "cpu", "server-device": "cpu", "tf32": True}, ["tf32"]),
    ({"input-column": "a"}, ["input-column"]),
    ({"drop-column": "a", "missing-values": "?"}, ["drop-column", "missing-values"]),
    (
        {"csv-encoding": "cp1252", "separator": ";", "decimal": ","},
        ["csv-encoding", "separator", "decimal"],
    ),
    ({"image-size": "8", "image-mode": "grey"}, ["image-size", "image-mode"]),
    ({"label-column": "b", "group-column": "c"}, ["label-column", "group-column"]),
]


# A key, a value of it, and with which others it changes the run.
CHANGES: list[tuple[str, Any, dict[str, Any]]] = [
    ("server-lr", 0.5, {}),
    ("server-optimizer", "adam", {"strategy": "spectral"}),
    ("compression", "int8", {}),
    ("compression", "topk:0.1", {"strategy": "async-fedavg"}),
    ("compression-down", "fp16", {}),
    ("compression-down", "int8", {"strategy": "async-fedavg"}),
    ("proximal-mu", 0.3, {"strategy": "fedprox"}),
    ("perturbation-beta", 0.3, {"strategy": "spectral"}),
    ("feddyn-alpha", 0.3, {"strategy": "feddyn"}),
    (
        "stale-weight",
        0.5,
        {"strategy": "fedstale", "participation": "uniform", "fraction-train": 0.5},
    ),
    (
        "participation-cutoff",
        1,
        {
            "strategy": "fedau",
            "participation": "uniform",
            "fraction-train": 0.4,
            "num-server-rounds": 4,
        },
    ),
    ("ditto-lambda", 0.3, {"strategy": "ditto"}),
    ("fedamp-sigma", 1.0, {"strategy": "fedamp"}),
    ("fedamp-alpha", 0.3, {"strategy": "fedamp"}),
    ("proximal-mu", 0.3, {"strategy": "fedamp"}),
    ("test-on", "own", {}),
    ("test-fraction", 0.3, {"test-on": "own"}),
    ("fine-tune-epochs", 1, {"test-on": "own"}),
    ("aggregation-weights", "identical", {"strategy": "async-fedavg"}),
    ("fedfix-interval", 2.0, {"strategy": "fedfix"}),
    ("buffer-size", 2, {"strategy": "fedbuff", "buffer-size": 3}),
    ("concurrency", 2, {"strategy": "async-fedavg"}),
    ("staleness-discount", "polynomial:1", {"strategy": "fedasync", "num-server-rounds": 6}),
    (
        "staleness-discount",
        "polynomial:1",
        {"strategy": "async-spectral", "buffer-size": 1, "num-server-rounds": 9},
    ),
    ("mixing-alpha", 0.3, {"strategy": "fedasync"}),
    ("delay-threshold", 1, {"strategy": "ringmaster", "num-server-rounds": 6}),
    ("cache-age", 1, {"strategy": "aced", "num-server-rounds": 9}),
    ("max-local-steps", 5, {"strategy": "fedcompass", "num-server-rounds": 6}),
    ("timed-local-steps", 5, {"strategy": "fedcompass", "num-server-rounds": 6}),
    ("min-local-steps", 9, {"strategy": "fedcompass", "num-server-rounds": 9}),
    (
        "group-slack",
        9.0,
        {"strategy": "fedcompass", "num-server-rounds": 9, "time-scenario": "exponential"},
    ),
    ("server-optimizer", "yogi", {"strategy": "fadas", "buffer-size": 2}),
    ("message-floor", 0.5, {"strategy": "spectral"}),
    ("graph-source", "updates", {"strategy": "spectral"}),
    (
        "graph-source",
        "updates",
        {"strategy": "async-spectral", "buffer-size": 1, "num-server-rounds": 9},
    ),
    ("neighbours", 1, {"client-weights": "adjacency"}),
    ("message-epsilon", 1.0, {"client-weights": "adjacency"}),
    ("message-delta", 0.1, {"strategy": "spectral", "message-epsilon": 1.0}),
    ("client-weights", "uniform", {}),
    ("client-weights", "uniform", {"participation": "paired", "client-evaluation": True}),
    ("client-weights", "adjacency", {"participation": "paired"}),
    ("faulty-clients", 1, {"client-weights": "uniform", "aggregation-rule": "trimmed-mean"}),
    ("round-deadline", 0.7, {}),
    ("over-select", 0.5, {"participation": "uniform", "fraction-train": 0.4}),
    ("size-ratio-bound", 1.1, {"safeguards": "on"}),
    ("examples-bound", 9, {"clock": "wall"}),
    ("norm-ratio-bound", 0.5, {"safeguards": "on", "strategy": "spectral"}),
    ("arrival-weight-bound", 0.1, {"safeguards": "on", "strategy": "async-fedavg"}),
    ("safeguards", "on", {"size-ratio-bound": 1.1}),
    ("dp-clipping-norm", 0.1, {"dp": "local"}),
    ("dp-noise-multiplier", 0.1, {"dp": "local", "strategy": "async-fedavg"}),
    ("dp-delta", 0.1, {"dp": "local"}),
    ("dp-target-epsilon", 3.0, {"dp": "local"}),
    ("dp-max-epsilon", 6.0, {"dp": "local"}),
    (
        "dp-max-contributions",
        1,
        {
            "dp": "central",
            "client-weights": "uniform",
            "dp-clipping-norm": 0.5,
            "strategy": "fedfix",
            "num-server-rounds": 9,
        },
    ),
    ("dp-clipping-quantile", 0.9, {"dp": "central", "client-weights": "uniform"}),
    ("dp-mechanism", "tree", {"dp": "central", "client-weights": "uniform", "dp-clipping-norm": 0.5}),
    (
        "dp-restart",
        1,
        {"dp": "central", "client-weights": "uniform", "dp-clipping-norm": 0.5, "dp-mechanism": "tree"},
    ),
    ("time-scenario", "exponential", {}),
    ("time-scenario", "lognormal:1", {}),
    ("task-work", "flop", {"time-scenario": "lognormal:1,1e6"}),
    ("availability", "bernoulli:0.5", {}),
    ("task-failure", 0.9, {}),
    (
        "aggregation-weights",
        "observed",
        {"strategy": "fedbuff", "buffer-size": 2, "num-server-rounds": 6},
    ),
    ("time-scenario", "F0", {"clock": "wall", "step-heterogeneity": "speed", "local-epochs": 3}),
    ("class-imbalance", 1.0, {}),
    ("data-imbalance", 0.0, {}),
    ("data-imbalance", 1.0, {"partitioner": "dirichlet"}),
    ("dirichlet-alpha", 9.0, {"partitioner": "dirichlet"}),
    ("similarity", 0.7, {"partitioner": "similarity"}),
    ("stragglers", 0.7, {"local-epochs": 9}),
    ("drop-stragglers", True, {"stragglers": 0.7}),
    ("test-fraction", 0.3, {}),
    ("local-epochs", 2, {"step-heterogeneity": "lognormal:0.1"}),
]


def test_what_nothing_reads_is_named_and_nothing_else():
    for values, named in CASES:
        assert sorted(unread(values)) == sorted(named)
    for key, value, others in CHANGES:
        assert unread({**others, key: value}) == {}, key


@pytest.mark.parametrize(("values", "named"), spread(CASES, 8), ids=[str(named) for _, named in CASES])
def test_what_is_said_to_be_unread_changes_nothing(go, values, named):
    path = go(values)
    assert sorted(summary_of(path)["unread-keys"]) == sorted(named)
    without = go({key: value for key, value in values.items() if key not in named}, "without")
    assert summary_of(without)["unread-keys"] == []
    assert content(path, values) == content(without, values)


@pytest.mark.parametrize(("key", "value", "others"), spread(CHANGES, 10))
def test_what_is_not_said_to_be_unread_changes_the_run(go, key, value, others):
    path, before = go({**others, key: value}), go(others, "before")
    assert summary_of(path)["unread-keys"] == []
    assert content(path, others) != content(before, others)


def test_where_prometheus_asks_is_read_if_it_may_ask(free_port):
    assert unread({"metrics-port": free_port, "metrics-host": "localhost", "log-format": "json"}) == {}


def test_the_share_to_test_on_is_not_read_where_the_dataset_ships_test_rows(save_npz):
    own = {"dataset": "npz", "partitioner": "iid", "test-fraction": 0.5}
    shipped, whole = save_npz("shipped.npz", test=True), save_npz("whole.npz")
    assert unread({**own, "data-path": shipped, "hold-out": "last"}) == {
        "test-fraction": 0.5,
        "hold-out": "last",
    }
    assert unread({**own, "data-path": whole, "hold-out": "last"}) == {}
    assert unread({**own, "data-path": shipped, "test-on": "unseen-clients"}) == {}


def test_a_strategy_of_ones_own_reads_the_keys_of_its_config(monkeypatch):
    class Twice(AsynchronousStrategy):
        interval = 2.0

        def contribution_periods(self, times: Any) -> Any:
            return np.ceil(times / 2.0)

    monkeypatch.setitem(REGISTRY, "twice", Twice)
    given = {"strategy": "twice", "aggregation-weights": "identical", "fedfix-interval": 2.0}
    assert unread(given) == {"fedfix-interval": 2.0}


# Where it is said --------------------------------------------------------------------------------------------


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "not read" in record.getMessage()]


def test_it_is_one_line_before_the_first_round(go, caplog):
    with caplog.at_level(logging.INFO, "flwr"):
        go({"fedfix-interval": 2, "proximal-mu": 0.5, "aggregation-weights": "identical", "lr": 0.05})
    assert lines(caplog) == [
        "not read by fedavg: proximal-mu = 0.5, aggregation-weights = 'identical', fedfix-interval = 2.0"
    ]
    said = [record.getMessage().partition(":")[0] for record in caplog.records]
    assert said.index("not read by fedavg") < said.index(
        "FedAvg"
    )  # the strategy's own summary begins the run


def test_no_line_where_all_is_read(go, caplog):
    with caplog.at_level(logging.INFO, "flwr"):
        go({"strategy": "fedprox", "proximal-mu": 0.5, "server-optimizer": "adam", "server-lr": 0.01})
    assert lines(caplog) == []


def test_every_summary_of_a_run_lists_them(go, monkeypatch):
    written: list[Mapping[str, Any]] = []
    write = RunDirectory.write_summary

    def note(directory: RunDirectory, content: Mapping[str, Any]) -> None:
        written.append(content)
        write(directory, content)

    monkeypatch.setattr(RunDirectory, "write_summary", note)
    go({"buffer-size": 3})
    assert [content["status"] for content in written] == [*["running"] * 4, "finished"]
    assert [content["unread-keys"] for content in written] == [["buffer-size"]] * 5


def test_a_resumed_run_lists_what_it_was_given(go):
    # Its config.toml has the weights that the method demands in place of those given.
    path = go({"strategy": "spectral", "client-weights": "uniform", "proximal-mu": 0.5})
    again = RunConfig.load({"resume": str(path), "num-server-rounds": 3})
    assert again.client_weights == "adjacency"
    server.run(SequentialGrid(client_app.app, CLIENTS), server.prepare(again, CLIENTS))
    assert (summary_of(path)["aggregations"], summary_of(path)["unread-keys"]) == (
        3,
        ["client-weights", "proximal-mu"],
    )


# Any config --------------------------------------------------------------------------------------------------

anything = st.fixed_dictionaries(
    {},
    optional={
        "strategy": st.sampled_from(["fedavg", "fedprox", "spectral", "async-fedavg", "fedfix"]),
        "client-weights": st.sampled_from(["uniform", "adjacency"]),
        "proximal-mu": st.just(0.3),
        "perturbation-beta": st.sampled_from([0.3, 1.0]),
        "neighbour-memory": st.just(1.0),
        "message-floor": st.just(0.1),
        "message-epsilon": st.just(1.0),
        "message-delta": st.just(0.1),
        "fedfix-interval": st.just(2.0),
        "buffer-size": st.just(2),
        "concurrency": st.just(2),
        "faulty-clients": st.just(1),
        "partitioner": st.sampled_from(["iid", "dirichlet"]),
        "class-imbalance": st.just(1.0),
        "dirichlet-alpha": st.just(1.0),
        "step-heterogeneity": st.sampled_from(["list:1,2,3", "speed"]),
        "local-epochs": st.just(2),
        "clock": st.just("wall"),
        "time-scenario": st.just("F0"),
        "dp": st.just("local"),
        "dp-delta": st.just(0.1),
        "client-evaluation": st.just(False),
        "server-lr": st.just(0.1),
        "server-optimizer": st.just("yogi"),
    },
)


@given(anything)
@example({"clock": "wall", "time-scenario": "F0", "step-heterogeneity": "speed"})
@example({"clock": "wall", "time-scenario": "F0", "step-heterogeneity": "speed", "strategy": "fedcompass"})
def test_without_what_is_named_nothing_is_named(values):
    if values.get("dp") == "local":
        values["message-epsilon"] = 1.0  # or the graph would tell what local privacy hides
    found = unread(values)
    assert found == {key: values[key] for key in found}
    assert all(value != defaults()[key] for key, value in found.items())
    assert unread({key: value for key, value in values.items() if key not in found}) == {}
