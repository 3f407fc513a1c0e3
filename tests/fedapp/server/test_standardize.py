"""Inputs by mean and deviation of all clients: worked out in a simulation, or put together from devices' sums."""

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, Context, Message
from flwr.clientapp import ClientApp

from fedapp import client_app, federation, server
from fedapp.client.handlers import handle
from fedapp.config import ConfigError, RunConfig
from fedapp.config.key import KeyConflictError
from fedapp.data import DataError
from fedapp.data.moments import Moments
from fedapp.engine.sequential import SequentialGrid
from fedapp.engine.vectorized import VectorizedGrid
from fedapp.federation.graph import graph_arrays
from strategies import RunError
from strategies.flower import messages
from tests.runs import summary_of, vector_of

CLIENTS = 4


@pytest.fixture
def table(tmp_path):
    """Features of very different sizes, of which a class follows; one is constant."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(300, 4))
    y = (x[:, 0] + x[:, 1] > 0).astype(int)
    np.savez(tmp_path / "own.npz", x_train=x * [1e4, 1e-3, 1, 0] + [5e4, 3, -2, 7], y_train=y)
    return str(tmp_path / "own.npz")


@pytest.fixture
def go(tmp_path, table):
    """Run the app in this process; return the run's folder."""
    numbers = iter(range(99))

    def run(*, on_devices: bool = False, grid: Any = None, resume: Path | None = None, **values: Any) -> Path:
        given = {
            "dataset": "npz",
            "data-path": table,
            "model": "logistic",
            "normalize": "standardize",
            "num-server-rounds": 3,
            "clock": "virtual",
            "checkpoint-every": 1,
            **{key.replace("_", "-"): value for key, value in values.items()},
        }
        name = (
            {"resume": str(resume)}
            if resume
            else {
                "results-dir": str(tmp_path),
                "run-name": f"run-{next(numbers)}",
            }
        )
        experiment = server.prepare(RunConfig.load({**given, **name}), CLIENTS, on_devices=on_devices)
        return server.run(grid or SequentialGrid(client_app.app, CLIENTS), experiment).path

    return run


def moments_of(path: Path) -> dict[str, list[float]]:
    return json.loads((path / "preparation.json").read_text())


def accuracy_of(path: Path) -> float:
    return summary_of(path)["accuracy"]


def test_devices_put_together_what_pooling_the_rows_gives(go, table):
    simulated, on_devices = go(), go(on_devices=True)
    found = moments_of(on_devices)
    assert found["mean"] == pytest.approx(moments_of(simulated)["mean"], rel=1e-13)
    assert found["deviation"] == pytest.approx(moments_of(simulated)["deviation"], rel=1e-12)
    assert vector_of(on_devices) == pytest.approx(vector_of(simulated), abs=1e-6)
    rows = np.load(simulated / "partition.npz")["client_indices"]
    pooled = np.load(table)["x_train"].astype(np.float32).astype(np.float64)[rows]
    assert found["mean"] == pytest.approx(pooled.mean(axis=0), rel=1e-12)
    assert found["deviation"] == pytest.approx([*pooled.std(axis=0)[:3], 1.0], rel=1e-9)
    # The server's own test rows are seen like the clients': without that, all would be of one class.
    assert accuracy_of(on_devices) > 0.85
    with pytest.raises(server.WorseThanGuessingError):
        go(normalize=False)


def test_engines_agree(go):
    one = vector_of(go())
    assert vector_of(go(grid=VectorizedGrid(client_app.app, CLIENTS))) == pytest.approx(one, abs=1e-5)


def test_a_graphs_directions_are_of_standardized_inputs(go, table):
    path = go(strategy="spectral", on_devices=True)
    config = RunConfig.load({"dataset": "npz", "data-path": table, "normalize": "standardize"})
    found = np.load(path / "graph.npz")["messages"]
    assert found == pytest.approx(graph_arrays(config, CLIENTS)["messages"], abs=1e-9)
    plain = graph_arrays(config.model_copy(update={"normalize": False}), CLIENTS)["messages"]
    assert np.abs(found - plain).max() > 0.1


def test_a_run_that_goes_on_keeps_them(go, monkeypatch):
    whole = go(on_devices=True, num_server_rounds=4)
    path = go(on_devices=True, num_server_rounds=2)
    asked: list[object] = []
    monkeypatch.setattr("fedapp.server.standardize._asked", lambda *_: asked.append(_) or [])
    again = go(on_devices=True, num_server_rounds=4, resume=path)
    assert (again, asked) == (path, [])
    assert np.array_equal(vector_of(again), vector_of(whole))
    (path / "preparation.json").unlink()
    with pytest.raises(ConfigError, match=r"resume = .*preparation\.json can't be read"):
        go(on_devices=True, num_server_rounds=6, resume=path)


def test_a_device_whose_sums_are_none_is_named_and_left_out(go, caplog):
    app = ClientApp(mods=[])

    def spoil(message: Message, context: Context) -> Message:
        reply = handle(message, context)
        if context.node_id == 2:
            reply.content.array_records[messages.ARRAYS]["sums"] = Array(np.full(4, np.nan))
        if context.node_id == 3:
            reply.content.array_records[messages.ARRAYS]["count"] = Array(np.full(4, -3.0))
        return reply

    for register in (app.query("describe"), app.train(), app.evaluate()):
        register(handle)
    app.query("sums")(spoil)
    with caplog.at_level(logging.WARNING, "flwr.fedapp"):
        path = go(on_devices=True, grid=SequentialGrid(app, CLIENTS))
    lines = [record.getMessage() for record in caplog.records if "mean and deviation" in record.getMessage()]
    assert lines == [
        f"node {node} isn't in the mean and deviation of inputs: its sums aren't finite, or "
        "of inputs of another shape"
        for node in (2, 3)
    ]
    partition = np.load(path / "partition.npz")
    offsets = partition["client_offsets"]
    rows = np.r_[partition["client_indices"][: offsets[1]], partition["client_indices"][offsets[3] :]]
    x = np.load(path.parent / "own.npz")["x_train"].astype(np.float32).astype(np.float64)[rows]
    assert moments_of(path)["mean"] == pytest.approx(x.mean(axis=0), rel=1e-12)


def test_no_device_that_can_say(go):
    app = ClientApp(mods=[])
    app.query("describe")(handle)  # and nothing else
    with pytest.raises(RunError, match="no client sent sums of its inputs"):
        go(on_devices=True, grid=SequentialGrid(app, CLIENTS))


def test_what_is_refused(go, caplog):
    with pytest.raises(KeyConflictError) as raised:
        go(dp="local")
    assert raised.value.keys == ("dp", "normalize")
    with caplog.at_level(logging.WARNING, "flwr.fedapp"):
        go(dp="central", client_weights="uniform", dp_noise_multiplier=1e-3)
    assert "its noise doesn't cover the mean and deviation" in caplog.text
    dataset = replace(federation.dataset_of(RunConfig.load(), 3), kind="text")
    with pytest.raises(DataError, match="normalize = 'standardize': dataset 'digits' is text"):
        dataset.require_values()


def test_what_is_sent_comes_back():
    dataset = federation.dataset_of(RunConfig.load(), 3)
    moments = Moments((0.1,), (1 / 3,))
    assert federation.moments_of(federation.schema_fields(replace(dataset, moments=moments))) == moments
    assert federation.moments_of(federation.schema_fields(dataset)) is None
