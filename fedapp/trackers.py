"""Experiment trackers beside the run directory: TensorBoard and Weights & Biases, each an extra of the package."""

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from fedapp.config import ConfigError, RunConfig


class Tracker(Protocol):
    """Takes note of evaluations."""

    def log(self, record: Mapping[str, Any]) -> None:
        """Note one line of metrics.jsonl."""

    def close(self) -> None:
        """Write what is pending."""


class NoTracker:
    """Notes nothing."""

    def log(self, record: Mapping[str, Any]) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


class TensorBoard:
    """Writes event files into the run directory: ``tensorboard --logdir RESULTS-DIR`` compares runs."""

    def __init__(self, path: Path) -> None:
        from torch.utils.tensorboard.writer import SummaryWriter

        self.writer: Any = SummaryWriter(str(path / "tensorboard"))

    def log(self, record: Mapping[str, Any]) -> None:
        """Note the numbers of a record, by aggregation."""
        for key, value in _numbers(record).items():
            self.writer.add_scalar(key, value, record["aggregation"])

    def close(self) -> None:
        """Flush and close the event file."""
        self.writer.close()


class WeightsAndBiases:
    """Logs to a wandb run named as the run directory; WANDB_MODE=offline keeps it on this machine."""

    def __init__(self, config: RunConfig, path: Path) -> None:
        import wandb

        self.run = wandb.init(project="fedapp", name=path.name, dir=str(path), config=config.flat())

    def log(self, record: Mapping[str, Any]) -> None:
        """Note the numbers of a record, by aggregation."""
        self.run.log(_numbers(record), step=record["aggregation"])

    def close(self) -> None:
        """Finish the wandb run."""
        self.run.finish()


def check_tracker(config: RunConfig) -> None:
    """Raise ConfigError if the tracker's package isn't installed."""
    if config.tracker != "none" and find_spec(config.tracker) is None:
        raise ConfigError(
            f"tracker = {config.tracker!r}: it isn't installed; pip install '.[{config.tracker}]', "
            "or tracker = 'none'"
        )


def make_tracker(config: RunConfig, path: Path) -> Tracker:
    """Return the configured tracker, writing under the run directory ``path``."""
    if config.tracker == "tensorboard":
        return TensorBoard(path)
    if config.tracker == "wandb":
        return WeightsAndBiases(config, path)
    return NoTracker()


def _numbers(record: Mapping[str, Any]) -> dict[str, float]:
    return {k: v for k, v in record.items() if isinstance(v, int | float) and k != "aggregation"}
