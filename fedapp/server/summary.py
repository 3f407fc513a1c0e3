"""summary.json: how a run stands, and how it ended."""

from collections.abc import Mapping
from datetime import date
from typing import Any

from fedapp.report.summary import RUNNING, this_process
from fedapp.server.experiment import Experiment
from fedapp.server.machine import machine
from fedapp.server.record import Entry, Observer
from fedapp.server.run_directory import RunDirectory
from strategies.clock import WallClock


class Summary(Observer):
    """Writes the summary with every evaluation and at the end.

    Attributes
    ----------
    content : dict
        What was written last.
    """

    def __init__(
        self, experiment: Experiment, engine: str, directory: RunDirectory, watch: WallClock
    ) -> None:
        self.experiment = experiment
        self.engine = engine
        self.directory = directory
        self.watch = watch
        self.unread = list(experiment.unread)
        self.content: dict[str, Any] = {}
        self._last: dict[str, Any] = {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from the last aggregation and its wall seconds."""
        self._last = dict(state["last"])
        # Not from config.toml, which has what a strategy demands in place of what was given.
        self.unread = state.get("unread-keys", self.unread)
        self.watch.resume(state["wall-seconds"])

    def begin(self) -> None:
        """Write that it runs."""
        self._write(RUNNING)

    def measure(self, entry: Entry) -> None:
        """Remember the metrics that there are so far; comes after those that measure."""
        self._last = {**entry.metrics, "aggregation": entry.progress.aggregation}

    def note(self, entry: Entry) -> None:
        """Write how it stands."""
        if entry.progress.evaluated:
            self._write(RUNNING)

    def state(self) -> dict[str, Any]:
        """Return the last aggregation."""
        return {"last": self._last, "unread-keys": self.unread, "wall-seconds": self.watch.now()}

    def end(self, status: str) -> None:
        """Write how it ended."""
        self._write(status)

    def _write(self, status: str) -> None:
        self.content = {
            "status": status,
            **({"reason": self.reason, "complete": self.complete} if self.reason else {}),
            **({"process": this_process()} if status == RUNNING else {}),
            "strategy": self.experiment.config.strategy,
            "engine": self.engine,
            "num-clients": self.experiment.num_clients,
            "unread-keys": self.unread,
            "wall-seconds": self.watch.now(),
            **({} if status == RUNNING else {"date": date.today().isoformat(), "machine": machine()}),
            "aggregations": self._last.get("aggregation", 0),
            **{key: value for key, value in self._last.items() if key != "aggregation"},
        }
        self.directory.write_summary(self.content)
