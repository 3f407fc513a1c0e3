"""A fleet of 1,000 devices that differ in speed and come and go: one config under every strategy, on every engine."""

import numpy as np
import pyarrow.parquet as pq
import pytest
import safetensors.numpy

from fedapp import server
from fedapp.config import RunConfig
from fedapp.config.key import KeyConflictError
from fedapp.engine.run import make_grid
from fedapp.report.client_tables import last_clients
from strategies import REGISTRY, AsynchronousStrategy
from tests.runs import lines_of, summary_of

CLIENTS = 1000
# Rows and lognormal devices such that a task takes 1.1 s (median), and 2.2 s at most. Of a day of 5 s each device is
# there for half: who loses its first task, as it goes, ends its next one by 6.7 s.
FLEET = {
    "dataset": "digits",
    "partitioner": "iid",
    "min-samples": 1,
    "model": "logistic",
    "init": "zeros",
    "local-epochs": 0,
    "local-steps": 1,
    "batch-size": 1,
    "lr": 0.02,
    "time-scenario": "lognormal:0.2,1",
    "availability": "diurnal:0.5,5",
    "checkpoint-every": 0,
    "client-records": "last",
}
DAY_AND_A_HALF = {**FLEET, "num-server-rounds": 100_000, "eval-every": 100_000, "time-budget": 7.5}
# MIFA's first model is made when all have answered: with these, none has gone by the end of every round. FedCompass
# asks for 4 steps or more, for which nobody is there long enough.
OWN = {
    "mifa": {"time-scenario": "lognormal:0.2,2"},
    "fedcompass": {"min-local-steps": 1, "max-local-steps": 2},
}


def go(tmp_path, strategy, engine, name):
    config = {**DAY_AND_A_HALF, **OWN.get(strategy, {}), "strategy": strategy}
    config |= {"results-dir": str(tmp_path), "run-name": name}
    experiment = server.prepare(RunConfig.load(config), CLIENTS)
    return server.run(make_grid(engine, CLIENTS), experiment).path


def bits(path):
    """Return all that a run has on record, but for real time."""
    lines = lines_of(path)
    tables = {name: pq.read_table(path / f"{name}.parquet").to_pydict() for name in ("clients", "tasks")}
    told = {"metrics": {str(at): line for at, line in enumerate(lines)}, **tables}
    return {"model": (path / "model.safetensors").read_bytes()} | {
        what: repr({key: values for key, values in table.items() if not key.startswith("wall")})
        for what, table in told.items()
    }


# Half a minute each: one of rounds, one that remembers clients, and one without rounds beside the tests of every day.
FEW = ("fedavg", "scaffold", "fedbuff")
EVERY = [
    pytest.param(name, marks=pytest.mark.thorough if name in FEW else pytest.mark.slow) for name in REGISTRY
]


@pytest.mark.parametrize("strategy", EVERY)
def test_one_config_runs_under_every_strategy_twice_to_the_same_bits(tmp_path, strategy):
    seen = {}
    for engine in ("sequential", "vectorized"):
        paths = [go(tmp_path, strategy, engine, f"{engine}-{time}") for time in "ab"]
        first, second = (bits(path) for path in paths)
        for what in first:
            assert first[what] == second[what], (engine, what)
        seen[engine] = first, safetensors.numpy.load_file(paths[0] / "model.safetensors")
    # Both engines have the same schedule, exactly, and the same model but for rounding.
    (one, model), (other, vectorized) = seen.values()
    assert one["tasks"] == other["tasks"]
    for name, values in model.items():
        assert np.isfinite(values).all()
        assert np.linalg.norm(values - vectorized[name]) <= 1e-4 * np.linalg.norm(values)
    assert np.linalg.norm(model["1.weight"]) > 0
    # Devices came, went and lost tasks.
    told, tasks = last_clients(paths[0]), pq.read_table(paths[0] / "tasks.parquet").to_pydict()
    assert len(told["participation"]) == CLIENTS
    assert tasks["outcome"].count("lost") > 100
    assert max(tasks["ended"]) > 5
    if issubclass(REGISTRY[strategy], AsynchronousStrategy):
        assert len(tasks["client"]) > 1500


# A few rounds, or aggregations, of few at a time: what Ray needs for a task is many times what the task does.
ROUNDS = {"participation": "uniform", "fraction-train": 0.02, "num-server-rounds": 3}
ARRIVALS = {"concurrency": 20, "num-server-rounds": 20}
# MIFA, Ringleader and Malenia make no model until all have answered: with 20 at a time Ringleader's first would take
# 38,000 tasks. Rennala's buffer is as large as the fleet otherwise.
ALL = {
    "mifa": {"participation": "full", "fraction-train": 1.0, "num-server-rounds": 7},
    "ringleader": {"concurrency": 0, "time-scenario": "lognormal:0.2,2"},
    "malenia": {"concurrency": 0, "num-server-rounds": 3, "time-scenario": "lognormal:0.2,2"},
    "rennala": {"buffer-size": 10},
}


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("strategy", REGISTRY)
def test_ray_has_the_bits_of_the_sequential_engine_with_1000_devices(simulate, strategy):
    few = ARRIVALS if issubclass(REGISTRY[strategy], AsynchronousStrategy) else ROUNDS
    config = {**FLEET, **few, "figures": False, "strategy": strategy}
    config |= OWN.get(strategy, {}) | ALL.get(strategy, {})
    runs = [
        simulate(config, engine=engine, federation="num-supernodes=1000") for engine in ("sequential", "ray")
    ]
    assert [run.returncode for run in runs] == [0, 0], [run.output for run in runs]
    engines = [summary_of(run.path)["engine"] for run in runs]
    assert engines == ["sequential", "ray"]
    one, other = (bits(run.path) for run in runs)
    for what in one:
        assert one[what] == other[what], what
    model = safetensors.numpy.load_file(runs[0].path / "model.safetensors")
    assert np.linalg.norm(model["1.weight"]) > 0


ASYNCHRONOUS = [name for name, kind in REGISTRY.items() if issubclass(kind, AsynchronousStrategy)]


@pytest.mark.parametrize("strategy", ASYNCHRONOUS)
def test_a_method_that_cant_run_as_asked_says_so_in_one_line_before_a_client_starts(strategy):
    with pytest.raises(KeyConflictError) as error:
        RunConfig.load({**FLEET, "strategy": strategy, "participation": "uniform"})
    assert error.value.keys == ("participation", "strategy")
