"""Experiment trackers beside the run directory: TensorBoard and Weights & Biases, each an extra of the package."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fedapp.config import ConfigError, RunConfig
from fedapp.data.errors import one_line
from fedapp.server.record import Entry, Observer
from fedapp.server.run_directory import RunDirectory


class TensorBoard(Observer):
    """Writes event files into the run directory: ``tensorboard --logdir RESULTS-DIR`` compares runs."""

    def __init__(self, path: Path, resumed_from: int | None) -> None:
        self.path = path / "tensorboard"
        self.resumed_from = resumed_from
        self.writer: Any = None

    def begin(self) -> None:
        """Open an event file; what a resumed run writes anew is hidden in those before."""
        from torch.utils.tensorboard.writer import SummaryWriter

        self.writer = SummaryWriter(str(self.path), purge_step=self.resumed_from)

    def note(self, entry: Entry) -> None:
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

    def note(self, entry: Entry) -> None:
        """Note an evaluation's numbers, by aggregation."""
        if entry.progress.evaluated:
            self.run.log(_numbers(entry), step=entry.progress.aggregation)

    def end(self, status: str) -> None:
        """Finish the wandb run."""
        self.run.finish()


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
        done = 0 if checkpoint is None else int(checkpoint.strategy["aggregations"])
        return TensorBoard(directory.path, done if config.resume else None)
    return WeightsAndBiases(config, directory.path)


def _numbers(entry: Entry) -> dict[str, float]:
    numbers = {"time": entry.progress.time, **entry.metrics}
    return {key: value for key, value in numbers.items() if isinstance(value, int | float)}
