"""Runs that begin at the same time share a new database of MLflow; a stand-in, as the package is an extra."""

import sys
import threading
import time
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from fedapp.config import ConfigError, RunConfig
from fedapp.server.trackers import MLflow


class Client:
    """Makes the tables of a database that it finds empty, as MLflow does: two at a time fail."""

    tables: ClassVar[set[str]] = set()  # databases whose tables are made
    making = threading.Lock()
    experiments: ClassVar[dict[str, str]] = {}
    runs: ClassVar[list[str]] = []
    late = False  # whether another process makes the experiment between the first read and its creation

    def __init__(self, uri: str) -> None:
        if uri not in self.tables:
            if not self.making.acquire(blocking=False):
                raise RuntimeError("table experiments already exists")
            time.sleep(0.2)
            self.tables.add(uri)
            self.making.release()

    def get_experiment_by_name(self, name: str) -> Any:
        if name not in self.experiments:
            return None
        return SimpleNamespace(experiment_id=self.experiments[name])

    def create_experiment(self, name: str) -> str:
        if Client.late:
            self.experiments[name] = "7"
        if name in self.experiments:
            raise RuntimeError(f"Experiment {name!r} already exists")
        self.experiments[name] = "0"
        return "0"

    def create_run(self, place: str, run_name: str) -> Any:
        self.runs.append(f"{place}/{run_name}")
        return SimpleNamespace(info=SimpleNamespace(run_id=run_name))

    def log_batch(self, run_id: str, **_: Any) -> None:
        """Take the parameters."""


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> type[Client]:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setitem(sys.modules, "mlflow", SimpleNamespace(MlflowClient=Client))
    monkeypatch.setitem(
        sys.modules, "mlflow.entities", SimpleNamespace(Param=lambda key, value: (key, value))
    )
    for name, value in (("tables", set()), ("experiments", {}), ("runs", []), ("late", False)):
        monkeypatch.setattr(Client, name, value)
    return Client


def test_runs_that_begin_together_make_the_database_one_after_the_other(client, tmp_path):
    failed: list[Exception] = []

    def begin(name: str) -> None:
        try:
            MLflow(RunConfig.load({}), tmp_path / name).begin()
        except ConfigError as error:
            failed.append(error)

    threads = [threading.Thread(target=begin, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert sorted(client.runs) == ["0/a", "0/b", "0/c"]


def test_an_experiment_that_another_run_has_made_meanwhile_is_taken(client, tmp_path):
    client.late = True
    MLflow(RunConfig.load({}), tmp_path / "run").begin()
    assert client.runs == ["7/run"]
