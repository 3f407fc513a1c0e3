"""Where noise that protects comes from: nobody can repeat a device's, and a simulation says that its own can be."""

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Context, RecordDict

from fedapp.client_app import app
from fedapp.config import ConfigError, RunConfig
from fedapp.engine.sequential import SequentialGrid
from fedapp.server import Experiment, prepare, run
from fedapp.server.run_directory import RunDirectory
from strategies import streams
from strategies.flower import messages
from strategies.flower.arrays import Layout, unpack
from strategies.flower.simulated import SimulatedContext
from tests.fedapp.client.asking import CLIENTS, request_for

SIZE = 64 * 10 + 10
NORM, Z = 0.05, 4.0
LOCAL = {"dp": "local", "dp-clipping-norm": NORM, "dp-noise-multiplier": Z}
CENTRAL = {"dp": "central", "client-weights": "uniform", "dp-clipping-norm": NORM}


def config_of(tmp_path: Path, **values: Any) -> RunConfig:
    given = {"model": "logistic", "num-server-rounds": 3, "seed": 1, "results-dir": str(tmp_path)}
    return RunConfig.load({**given, **values})


def update_without_seeded_noise(experiment: Experiment, kind: type[Context], **values: Any) -> np.ndarray:
    """Return a node's update (D,) from which a server that knows the seed has subtracted the seed's noise."""
    request = request_for(messages.TRAIN, experiment, **values)
    node = {"partition-id": 2, "num-partitions": CLIENTS}  # data that all machines have
    reply = app(request, kind(2, 7, node, RecordDict(), {}))
    layout = Layout.of(messages.arrays_of(request))
    update = layout.to_vector(messages.arrays_of(reply)) - layout.to_vector(messages.arrays_of(request))
    guess = streams.generator(experiment.config.seed, "local-noise", 2, 1)
    return update - guess.normal(0.0, 2 * Z * NORM, SIZE)


def test_a_server_cannot_subtract_the_noise_of_a_device_whatever_its_data(tmp_path):
    experiment = prepare(config_of(tmp_path, **LOCAL), CLIENTS)
    assert experiment.config.dp_noise == "seed"
    simulated = update_without_seeded_noise(experiment, SimulatedContext)
    assert np.linalg.norm(simulated) == pytest.approx(NORM, rel=1e-3)  # the update alone
    for values in ({}, {"dp-noise": "seed"}):  # whatever the server asks for
        device = update_without_seeded_noise(experiment, Context, config=values)
        # Two independent draws of 2 z S: √(1/(2·650)) = 3 % of it
        assert device.std() == pytest.approx(2 * Z * NORM * 2**0.5, rel=0.15)


def test_a_server_cannot_subtract_the_noise_of_a_direction(tmp_path):
    values = {**LOCAL, "strategy": "spectral", "message-epsilon": 10.0}
    experiment = prepare(config_of(tmp_path, **values), CLIENTS)
    node = {"partition-id": 2, "num-partitions": CLIENTS}

    def direction(kind: type[Context]) -> np.ndarray:
        request = request_for(messages.ASK_DIRECTION, experiment)
        reply = app(request, kind(2, 7, node, RecordDict(), {}))
        return unpack(reply.content.array_records[messages.DIRECTION][messages.DIRECTION])

    assert (direction(SimulatedContext) == direction(SimulatedContext)).all()
    assert (direction(Context) != direction(Context)).any()


def test_a_device_refuses_noise_of_the_seed(tmp_path):
    config = config_of(tmp_path, **CENTRAL, **{"dp-noise": "seed"})
    with pytest.raises(ConfigError, match=r"^dp-noise = 'seed': .*; allowed on devices are auto, system$"):
        prepare(config, 3, on_devices=True)
    assert prepare(config_of(tmp_path, **CENTRAL), 3, on_devices=True).config.dp_noise == "system"


@pytest.mark.parametrize("source", ["auto", "system"])
def test_a_simulation_says_whether_its_noise_is_real(source, tmp_path, caplog):
    found = []
    for _ in range(2):
        with caplog.at_level(logging.WARNING, "flwr.fedapp"):
            values = {**CENTRAL, "dp-noise": source, "lr": 1e-9}
            directory = run(SequentialGrid(app, 3), prepare(config_of(tmp_path, **values), 3))
        found.append((directory.path / "model.safetensors").read_bytes())
    summary = json.loads((directory.path / "summary.json").read_text("utf-8"))
    from_seed = source != "system"
    assert summary["dp-epsilon"] > 0
    assert summary["dp-noise-from-seed"] is from_seed
    assert (found[0] == found[1]) is from_seed
    said = [each.getMessage() for each in caplog.records if each.getMessage().startswith("dp-noise = seed")]
    assert len(said) == 2 * from_seed


@pytest.mark.parametrize(
    ("values", "repeated"),
    [
        (CENTRAL, 1),
        (LOCAL, 1),
        ({**CENTRAL, "participation": "turns", "fraction-train": 0.5}, 1),
        ({**LOCAL, "strategy": "fedbuff", "buffer-size": 3}, 2),
    ],
)
def test_a_release_that_is_repeated_counts_again(values, repeated, tmp_path, caplog):
    shared = {**values, "dp-noise": "system", "checkpoint-every": 2, "num-server-rounds": 6, "lr": 1e-9}
    first = prepare(config_of(tmp_path, **shared), 4)
    path = run(SequentialGrid(app, 4), first, lambda: first.strategy.session.aggregations == 3).path
    experiment = prepare(RunConfig.load({"resume": str(path)}), 4)
    run(SequentialGrid(app, 4), experiment, directory=RunDirectory(experiment.config))
    assert "are sent again with new noise: dp-epsilon counts both" in caplog.text
    again = json.loads((path / "summary.json").read_text("utf-8"))["dp-epsilon"]
    path = run(SequentialGrid(app, 4), prepare(config_of(tmp_path, **shared), 4)).path
    once = json.loads((path / "summary.json").read_text("utf-8"))["dp-epsilon"]
    assert again > once
