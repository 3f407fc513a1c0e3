"""What a run on devices takes from a simulation's config.toml: all but its clock, which it says."""

import logging
from pathlib import Path

import pytest

from fedapp.client_app import app
from fedapp.config import RunConfig
from fedapp.deploy.given import read_given
from fedapp.engine.sequential import SequentialGrid
from fedapp.server import prepare, run

LINE = "clock = virtual: was the simulation's, and isn't taken over; devices have real time"


@pytest.mark.usefixtures("no_figures")
def test_a_simulations_clock_stays_with_it(tmp_path: Path) -> None:
    given = {"model": "logistic", "num-server-rounds": 1, "lr": 0.3, "results-dir": str(tmp_path)}
    recorded = run(SequentialGrid(app, 2), prepare(RunConfig.load(given), 2)).path / "config.toml"
    assert 'clock = "virtual"' in recorded.read_text()
    values, num_clients, said = read_given([str(recorded)])
    assert (values["lr"], num_clients, said) == (0.3, 2, [LINE])
    assert "clock" not in values
    assert RunConfig.load(values).clock == "auto"
    assert prepare(RunConfig.load(values), 2, on_devices=True).config.clock == "wall"


def test_what_is_counted_in_its_seconds_is_named(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text(
        'clock = "virtual"\ntime-budget = 30.0\nround-deadline = 0.0\nfedfix-interval = 0.5\nnum-clients = 2\n'
        '[versions]\nflwr = "1"\n'
    )
    said = f"{LINE}, in seconds of which time-budget = 30"
    assert read_given([str(file), "strategy=fedavg"])[2] == [f"{said} count now"]
    assert read_given([str(file), "strategy=fedfix"])[2] == [f"{said} and fedfix-interval = 0.5 count now"]


@pytest.mark.parametrize("by_file", [False, True])
def test_a_clock_that_somebody_wants_is_taken(by_file: bool, tmp_path: Path) -> None:
    recorded, own = tmp_path / "config.toml", tmp_path / "own.toml"
    recorded.write_text('clock = "virtual"\nnum-clients = 2\n[versions]\nflwr = "1"\n')
    own.write_text('clock = "virtual"\n')
    values, _, said = read_given([str(recorded), str(own) if by_file else "clock=virtual"])
    assert (values, said) == ({"clock": "virtual"}, [])
    assert read_given(None) == ({}, None, [])


def test_devices_in_virtual_time_are_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    config = RunConfig.load({"clock": "virtual", "model": "logistic"})
    with caplog.at_level(logging.WARNING, "flwr.fedapp"):
        prepare(config, 2)
        assert "clock = virtual" not in caplog.text
        prepare(config, 2, on_devices=True)
    (line,) = [r.getMessage() for r in caplog.records if r.getMessage().startswith("clock = virtual")]
    assert "safeguards = auto bounds nothing" in line
