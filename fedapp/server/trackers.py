"""Experiment trackers beside the run directory: TensorBoard and Weights & Biases, each an extra of the package."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fedapp.config import ConfigError, RunConfig
from fedapp.server.record import Entry, Observer


class TensorBoard(Observer):
    """Writes event files into the run directory: ``tensorboard --logdir RESULTS-DIR`` compares runs."""

    def __init__(self, path: Path) -> None:
        from torch.utils.tensorboard.writer import SummaryWriter

        self.writer: Any = SummaryWriter(str(path / "tensorboard"))

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
        import wandb

        self.run = wandb.init(project="fedapp", name=path.name, dir=str(path), config=config.flat())

    def note(self, entry: Entry) -> None:
        """Note an evaluation's numbers, by aggregation."""
        if entry.progress.evaluated:
            self.run.log(_numbers(entry), step=entry.progress.aggregation)

    def end(self, status: str) -> None:
        """Finish the wandb run."""
        self.run.finish()


def check_tracker(config: RunConfig) -> None:
    """Raise ConfigError if the tracker's package isn't installed."""
    if config.tracker != "none" and find_spec(config.tracker) is None:
        raise ConfigError(
            f"tracker = {config.tracker!r}: it isn't installed; pip install '.[{config.tracker}]', "
            "or tracker = 'none'"
        )


def make_tracker(config: RunConfig, path: Path) -> Observer | None:
    """Return the configured tracker, if any, writing under the run directory ``path``."""
    if config.tracker == "tensorboard":
        return TensorBoard(path)
    if config.tracker == "wandb":
        return WeightsAndBiases(config, path)
    return None


def _numbers(entry: Entry) -> dict[str, float]:
    numbers = {"time": entry.progress.time, **entry.metrics}
    return {key: value for key, value in numbers.items() if isinstance(value, int | float)}
