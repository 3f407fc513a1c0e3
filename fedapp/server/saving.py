"""When a run is saved, so that it can be resumed."""

from collections.abc import Callable

from fedapp.config import RunConfig
from fedapp.server.checkpoint import Checkpoint
from fedapp.server.run_directory import RunDirectory
from strategies import Progress
from strategies.clock import WallClock


class Saving:
    """Says when a checkpoint is due, and writes it.

    Parameters
    ----------
    announces : callable
        Tells whether an aggregation will be reported to somebody who watches.

    Attributes
    ----------
    last : int
        The last aggregation in a checkpoint.
    """

    def __init__(
        self, config: RunConfig, directory: RunDirectory, watch: WallClock, announces: Callable[[int], bool]
    ) -> None:
        self.config = config
        self.directory = directory
        self.watch = watch
        self.announces = announces
        self.last = 0
        self._rest = 0.0  # wall seconds until which no other is written

    def is_due(self, progress: Progress) -> bool:
        """Tell whether an aggregation is saved.

        In real time, before its metrics are told, so that none whose metrics were told is ever lost; the line of
        progress (heartbeat.py) may be ahead of that. In virtual time what is lost comes again: checkpoints may take a
        twentieth of the run's time, and an evaluation that there is only because the run ends here isn't part of what
        is resumed.
        """
        config, aggregation = self.config, progress.aggregation
        if config.checkpoint_every == 0 or aggregation == 0:
            return False
        due = aggregation >= self.last + config.checkpoint_every
        if config.clock == "wall":
            return due or progress.evaluated or self.announces(aggregation)
        on_schedule = not progress.evaluated or aggregation % config.eval_every == 0
        return due and on_schedule and self.watch.now() >= self._rest

    def save(self, made: Callable[[], Checkpoint]) -> None:
        """Make a checkpoint, which may take asking clients, and write it."""
        began = self.watch.now()
        checkpoint = made()
        self.directory.write_checkpoint(checkpoint)
        self.last = checkpoint.strategy["aggregations"]
        self._rest = self.watch.now() + 20 * (self.watch.now() - began)
