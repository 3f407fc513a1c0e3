"""A fleet of 1,000 devices that differ in speed and come and go: one config under every strategy, on every engine."""

import json

import numpy as np
import pyarrow.parquet as pq
import pytest
import safetensors.numpy

from fedapp import server
from fedapp.config import RunConfig
from fedapp.engine.in_process import make_grid
from fedapp.report.clients import last_clients
from strategies import REGISTRY, AsynchronousStrategy

CLIENTS = 1000
# Rows and lognormal devices such that a task takes 1.1 s (median), and 2.2 s at most. Of a day of 5 s each device is
# there for half: who loses its first task, as it goes, ends its next one by 6.7 s.
FLEET = {
    "dataset": "digits", "partitioner": "iid", "min-samples": 1, "model": "logistic", "init": "zeros",
    "local-epochs": 0, "local-steps": 1, "batch-size": 1, "lr": 0.02, "time-scenario": "lognormal:0.2,1",
    "availability": "diurnal:0.5,5", "checkpoint-every": 0, "client-records": "last",
}  # fmt: skip
DAY_AND_A_HALF = {**FLEET, "num-server-rounds": 100_000, "eval-every": 100_000}
BUDGETS = {"mifa": 20.0}  # all have answered in the end


def go(tmp_path, strategy, engine, name, **changes):
    budget = {"time-budget": BUDGETS.get(strategy, 7.5)}
    config = {
        **DAY_AND_A_HALF,
        **budget,
        "strategy": strategy,
        "results-dir": str(tmp_path),
        "run-name": name,
        **changes,
    }
    experiment = server.prepare(RunConfig.load(config), CLIENTS)
    return server.run(make_grid(engine, CLIENTS), experiment).path


def bits(path):
    """Return all that a run has on record, but for real time."""
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    tables = {name: pq.read_table(path / f"{name}.parquet").to_pydict() for name in ("clients", "tasks")}
    told = {"metrics": {str(at): line for at, line in enumerate(lines)}, **tables}
    return {"model": (path / "model.safetensors").read_bytes()} | {
        what: repr({key: values for key, values in table.items() if not key.startswith("wall")})
        for what, table in told.items()
    }


@pytest.mark.thorough
@pytest.mark.usefixtures("no_figures")
@pytest.mark.parametrize("strategy", REGISTRY)
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
        assert len(tasks["client"]) > 2000
