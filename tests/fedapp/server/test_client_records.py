"""What the model is worth to each client: with every strategy, in a simulation and on devices, and after a kill."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedapp import client_app, server
from fedapp.config import RunConfig
from fedapp.engine.sequential import SequentialGrid
from fedapp.report.client_tables import WALL, by_evaluation, read_clients
from strategies import REGISTRY
from tests.runs import lines_of


def simulated(clients: int = 3) -> SequentialGrid:
    return SequentialGrid(client_app.app, clients)


@pytest.mark.parametrize("strategy", REGISTRY)
def test_every_strategy_has_a_row_for_each_client_and_evaluation(go, strategy):
    path = go(grid=simulated(), strategy=strategy, buffer_size=2)
    table, lines = read_clients(path), lines_of(path)
    assert table["client"].to_pylist() == [0, 1, 2] * 4
    assert table["aggregation"].to_pylist() == [number for number in range(4) for _ in range(3)]
    for name in ("loss", "accuracy"):
        values = table[name].to_numpy().reshape(4, 3)
        assert np.isfinite(values).all()
        worst = values.max(axis=1) if name == "loss" else values.min(axis=1)
        assert [line[f"client-{name}-worst-tenth"] for line in lines] == worst.tolist()
    for name in ("weight", "expected", "observed"):
        assert sum(table[name].to_pylist()[-3:]) == pytest.approx(1)
    assert sum(table["work"].to_pylist()[-3:]) >= 3
    assert "clients" not in lines[-1]
    assert not (path / "clients.arrows").exists()


def test_devices_that_evaluate_say_what_a_simulation_computes(go):
    devices = by_evaluation(go(client_evaluation=True, clock="virtual"))
    server_side = by_evaluation(go(grid=simulated(), run_name="simulated"))
    for number in (1, 2, 3):  # the initial model is evaluated on the server only
        for name in ("loss", "accuracy"):
            assert devices[number][name] == pytest.approx(server_side[number][name], rel=1e-5)
    assert "loss" not in devices.get(0, {})


@pytest.mark.parametrize(
    ("when", "evaluated"), [("always", [0, 1, 2, 3]), ("last", [3]), ("never", []), ("auto", [0, 1, 2, 3])]
)
def test_when_clients_are_evaluated(go, when, evaluated):
    path = go(grid=simulated(), client_records=when)
    assert [number for number, known in by_evaluation(path).items() if "loss" in known] == evaluated
    assert [line["aggregation"] for line in lines_of(path) if "client-loss-best" in line] == evaluated


def test_what_takes_long_is_done_once(go, monkeypatch, caplog):
    monkeypatch.setattr("fedapp.server.evaluation.CHEAP", 1000)
    with caplog.at_level("INFO", "flwr.fedapp"):
        path = go(grid=simulated())
    assert [number for number, known in by_evaluation(path).items() if "loss" in known] == [3]
    assert "client-records = auto: clients are evaluated one by one in the last round only" in caplog.text


def test_what_may_end_the_run_is_measured_however_long_it_takes(go, monkeypatch):
    monkeypatch.setattr("fedapp.server.evaluation.CHEAP", 1000)
    path = go(grid=simulated(), best_of="client-loss-mean", keep="best")
    assert [number for number, known in by_evaluation(path).items() if "loss" in known] == [0, 1, 2, 3]


def test_on_devices_it_says_that_the_server_cannot(go, caplog):
    go(client_records="always")
    assert "client-records = 'always': the server has none of the clients' data" in caplog.text


class Copies(server.Observer):
    """Copies the run's folder in the midst of it, as a kill would leave it."""

    def __init__(self, run: Path, copy: Path, at: int) -> None:
        self.run, self.copy, self.at = run, copy, at

    def record(self, entry: Any) -> None:
        if entry.progress.aggregation == self.at:
            shutil.copytree(self.run, self.copy)


@pytest.mark.parametrize("strategy", ["fedavg", "async-fedavg", "fedbuff"])
def test_a_run_that_was_killed_goes_on_without_a_row_twice(go, tmp_path, strategy):
    copies = Copies(tmp_path / "run", tmp_path / "copy", at=5)
    keys = {"strategy": strategy, "num_server_rounds": 8, "checkpoint_every": 2, "buffer_size": 2}
    whole = go(grid=simulated(), observers=[copies], **keys)
    killed = read_clients(tmp_path / "copy")
    assert len(killed) == 6 * 3
    resumed = RunConfig.load({"resume": str(tmp_path / "copy")})
    server.run(simulated(), server.prepare(resumed, 3))
    again, expected = (read_clients(path).drop_columns([WALL]) for path in (tmp_path / "copy", whole))
    assert again.equals(expected)
    assert not (tmp_path / "copy" / "clients.arrows").exists()
