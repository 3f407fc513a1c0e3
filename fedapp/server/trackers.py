"""Experiment trackers beside the run directory: TensorBoard, Weights & Biases and MLflow, each an extra."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from time import time
from typing import Any

from fedapp.config import ConfigError, RunConfig
from fedapp.data.errors import one_line
from fedapp.server.record import Entry, Observer
from fedapp.server.run_directory import RunDirectory

_PARAMS = 100  # that MLflow takes at a time
_SQLITE = "sqlite:///"


class TensorBoard(Observer):
    """Writes event files into the run directory: ``tensorboard --logdir RESULTS-DIR`` compares runs."""

    def __init__(self, path: Path, resumed_from: int | None) -> None:
        self.path = path / "tensorboard"
        self.resumed_from = resumed_from
        self.writer: Any = None

    def begin(self) -> None:
        """Open an event file; steps that a resumed run writes anew are hidden in the earlier event files."""
        from torch.utils.tensorboard.writer import SummaryWriter

        self.writer = SummaryWriter(str(self.path), purge_step=self.resumed_from)

    def record(self, entry: Entry) -> None:
        """Note an evaluation's numbers, by aggregation."""
        if entry.progress.evaluated:
            for key, value in _numbers(entry).items():
                self.writer.add_scalar(key, value, entry.progress.aggregation)

    def end(self, status: str) -> None:
        """Flush and close the event file."""
        self.writer.close()


class WeightsAndBiases(Observer):
    """Logs to a wandb run named as the run directory; WANDB_MODE=offline keeps it on this machine."""

    def __init__(self, config: RunConfig, path: Path) -> None:
        self.config = config
        self.path = path
        self.run: Any = None

    def begin(self) -> None:
        """Begin the wandb run.

        Raises
        ------
        ConfigError
            If wandb doesn't, as nobody is logged in, say.
        """
        import wandb

        name, folder = self.path.name, str(self.path)
        try:
            self.run = wandb.init(project="fedapp", name=name, dir=folder, config=self.config.flat())
        except Exception as error:  # it has its own for everything
            raise ConfigError(
                f"tracker = 'wandb': {one_line(error)} (WANDB_MODE=offline needs no login, and keeps the run on this "
                "machine)"
            ) from error

    def record(self, entry: Entry) -> None:
        """Note an evaluation's numbers, by aggregation."""
        if entry.progress.evaluated:
            self.run.log(_numbers(entry), step=entry.progress.aggregation)

    def end(self, status: str) -> None:
        """Finish the wandb run."""
        self.run.finish()


class MLflow(Observer):
    """Logs to an MLflow run named as the run directory.

    Where MLFLOW_TRACKING_URI names no server, runs are in RESULTS-DIR/mlflow.db, which ``mlflow ui
    --backend-store-uri`` compares.
    """

    def __init__(self, config: RunConfig, path: Path) -> None:
        self.config = config
        self.path = path
        self.client: Any = None
        self.run_id = ""

    def begin(self) -> None:
        """Begin the MLflow run, with the config as its parameters.

        Raises
        ------
        ConfigError
            If its server can't be reached, say.
        """
        from mlflow import MlflowClient
        from mlflow.entities import Param

        if not (uri := os.environ.get("MLFLOW_TRACKING_URI")):
            uri = f"{_SQLITE}{(self.path.parent / 'mlflow.db').absolute()}"
        try:
            with _alone(uri):
                self.client = MlflowClient(uri)
                place = self._experiment()
            self.run_id = self.client.create_run(place, run_name=self.path.name).info.run_id
            params = [Param(key, str(value)) for key, value in self.config.flat().items()]
            for start in range(0, len(params), _PARAMS):
                self.client.log_batch(self.run_id, params=params[start : start + _PARAMS])
        except Exception as error:  # it has its own for everything
            raise ConfigError(
                f"tracker = 'mlflow': {one_line(error)} (MLFLOW_TRACKING_URI = {uri})"
            ) from error

    def _experiment(self) -> str:
        """Return the id of the experiment of all runs, which the first run makes."""
        name = "fedapp"
        if found := self.client.get_experiment_by_name(name):
            return str(found.experiment_id)
        try:
            return str(self.client.create_experiment(name))
        except Exception:  # a run of another process, on a server say, may have made it since
            if found := self.client.get_experiment_by_name(name):
                return str(found.experiment_id)
            raise

    def record(self, entry: Entry) -> None:
        """Note an evaluation's numbers, by aggregation."""
        if entry.progress.evaluated:
            from mlflow.entities import Metric

            now, step = int(1000 * time()), entry.progress.aggregation
            metrics = [Metric(key, float(value), now, step) for key, value in _numbers(entry).items()]
            self.client.log_batch(self.run_id, metrics=metrics)

    def end(self, status: str) -> None:
        """End the MLflow run as the run ended."""
        ends = {"finished": "FINISHED", "interrupted": "KILLED", "stopped": "KILLED"}
        self.client.set_terminated(self.run_id, ends.get(status, "FAILED"))


@contextmanager
def _alone(uri: str) -> Iterator[None]:
    """Let one process at a time make the tables of a database in a file, as MLflow does not."""
    if not (path := uri.removeprefix(_SQLITE)) or path == uri:
        yield
        return
    with Path(f"{path}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def check_tracker(config: RunConfig) -> None:
    """Raise ConfigError if the tracker's package isn't installed."""
    if find_spec(config.tracker) is None:
        raise ConfigError(
            f"tracker = {config.tracker!r}: it isn't installed; pip install '.[{config.tracker}]', "
            "or tracker = 'none'"
        )


def make_tracker(config: RunConfig, directory: RunDirectory) -> Observer:
    """Return the tracker of a run whose config has one; it writes under the run directory."""
    if config.tracker == "tensorboard":
        checkpoint = directory.checkpoint
        first = 0
        if checkpoint is not None:  # which has the line of an evaluation that is told once more
            first = int(checkpoint.strategy["aggregations"]) + (checkpoint.observers["line"] is None)
        return TensorBoard(directory.path, first if config.resume else None)
    return {"wandb": WeightsAndBiases, "mlflow": MLflow}[config.tracker](config, directory.path)


def _numbers(entry: Entry) -> dict[str, float]:
    numbers = {"time": entry.progress.time, **entry.metrics}
    return {key: value for key, value in numbers.items() if isinstance(value, int | float)}
