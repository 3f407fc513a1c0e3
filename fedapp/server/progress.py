"""What a run shows while it goes and when it ends: a live bar on a terminal, lines in the log anywhere else.

Without a terminal a line of progress is also logged now and then while nothing happens, as a sign of life.
"""

import logging
from collections.abc import Callable
from typing import NamedTuple

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from fedapp.report import read_metrics
from fedapp.report.client_tables import last_clients
from fedapp.report.files import LOSS, metrics_among
from fedapp.report.table import closing_table, devices_table
from fedapp.server.journal import Summary
from fedapp.server.record import Entry, Observer
from strategies.clock import WallClock

log = logging.getLogger("flwr.fedapp")

LINES = 10  # progress lines of a run without a terminal
SCORES = 2  # metrics beside the loss in such a line


class Display(Observer):
    """Progress of a run of ``total`` aggregations, and its ``summary`` in the end.

    Attributes
    ----------
    live : bool
        Whether there is a bar, on a terminal; otherwise there are lines in the log.
    """

    def __init__(self, total: int, summary: Summary, *, has_rounds: bool = True, json: bool = False) -> None:
        self.total = total
        self.step = "round" if has_rounds else "aggregation"
        self.named = summary.experiment.config.metrics
        self.json = json
        self.summary = summary
        self.path = summary.directory.path
        self.console = Console()
        self.live = self.console.is_terminal and not json
        columns = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()]
        left = (TextColumn("left"), TimeRemainingColumn(elapsed_when_finished=False))
        self.bar = Progress(*columns, *left, TextColumn("{task.fields[metrics]}"), console=self.console)
        self.task = self.bar.add_task("waiting for clients", total=total, metrics="")
        self.metrics: dict[str, float] = {}
        self._last: int | None = None

    def begin(self) -> None:
        """Begin to show progress."""
        if self.live:
            self.bar.start()
        else:
            log.info("Recording this run in %s", self.path)

    def announces(self, aggregation: int) -> bool:
        """Tell whether the log gets a line about an aggregation."""
        due = aggregation % max(1, self.total // LINES) == 0 or aggregation == self.total
        return due and not self.live

    def note(self, entry: Entry) -> None:
        """Show an aggregation."""
        aggregation = entry.progress.aggregation
        self.metrics.update(entry.metrics)
        scores = [key for key in metrics_among(self.metrics, self.named) if key != LOSS][:SCORES]
        shown = "  ".join(f"{key} {self.metrics[key]:.4f}" for key in (LOSS, *scores) if key in self.metrics)
        if self._last is None:  # what a resumed run begins with was done before: it says nothing of the pace
            self.bar.reset(self.task, completed=aggregation, total=self.total, metrics=shown)
        self._last = aggregation
        self.bar.update(self.task, completed=aggregation, metrics=shown, description=f"{self.step}s")
        if self.announces(aggregation):
            log.info("%s %d of %d: %s", self.step, aggregation, self.total, shown)

    def end(self, status: str) -> None:
        """End the live bar; print the closing table and where the run is."""
        if self.live:
            self.bar.stop()
        if self.json:
            log.info("%s: %s", status, self.path)
        if self.json or not self.metrics:
            return
        evaluations = read_metrics(self.path)
        self.console.print(closing_table(self.summary.content, evaluations, self.named))
        if (devices := devices_table(last_clients(self.path))) is not None:
            self.console.print(devices)
        # Not through rich, which would break a long path over lines.
        print(f"Run directory: {self.path}", flush=True)
        for name in ("curves.png", "clients.png", "timeline.png", "partition.png", "model.safetensors"):
            if (self.path / name).exists():
                print(f"  {self.path / name}", flush=True)


# Real seconds between two lines. The longest pause between two polls of a waiting run is 5 s: a line every 30 s.
EVERY = 25.0


class HowFar(NamedTuple):
    """How far a run is, and how many of its clients are busy."""

    aggregation: int
    working: int
    clients: int


class Heartbeat(Observer):
    """Logs a line of progress now and then; what waits looks in at every poll.

    It says how far a run is, saved or not: what a kill loses of that is made again.

    Parameters
    ----------
    total : int
        Aggregations of the run.
    standing : callable
        Tells how it stands.
    budget_left : callable
        Real seconds after which the run ends in any case; None: it has no such limit.
    now : callable
        Real seconds.
    """

    def __init__(
        self,
        total: int,
        standing: Callable[[], HowFar],
        budget_left: Callable[[], float | None] = lambda: None,
        now: Callable[[], float] | None = None,
    ) -> None:
        self.total = total
        self.standing = standing
        self.budget_left = budget_left
        self.now = now or WallClock().now
        self._told = self.now()
        self._first: tuple[int, float] | None = None  # aggregation, and when it was noted
        self._last = (0, 0.0)

    def watching(self, stopped: Callable[[], bool]) -> Callable[[], bool]:
        """Return ``stopped`` so that whoever asks it lets the line be logged where it is due."""

        def asked() -> bool:
            self.look()
            return stopped()

        return asked

    def look(self) -> None:
        """Log the line if it is due."""
        if self.now() - self._told >= EVERY:
            self._told = self.now()
            standing = self.standing()
            text = progress_line(
                standing.aggregation, self.total, standing.working, standing.clients, self.seconds_left()
            )
            log.info("%s", text, extra={"aggregation": standing.aggregation})

    def note(self, entry: Entry) -> None:
        """Note when an aggregation was done."""
        self._last = entry.progress.aggregation, self.now()
        self._first = self._first or self._last
        self.look()

    def seconds_left(self) -> float | None:
        """Return how long the rest takes at the mean pace so far, counted from the first that was seen."""
        budget = self.budget_left()
        if self._first is None or self._last[0] == self._first[0]:
            return budget
        mean = (self._last[1] - self._first[1]) / (self._last[0] - self._first[0])
        rest = (self.total - self._last[0]) * mean - min(self.now() - self._last[1], mean)
        return max(0.0, rest if budget is None else min(rest, budget))


def progress_line(
    aggregation: int, total: int, working: int, clients: int, seconds_left: float | None = None
) -> str:
    """Return ``progress: aggregation 12 of 100, 3 of 5 devices at work, 0:04:10 left``.

    The last part, hours:minutes:seconds, is there once it can be told. ``fedapp deploy status`` reads this line.
    """
    line = f"progress: aggregation {aggregation} of {total}, {working} of {clients} devices at work"
    if seconds_left is None:
        return line
    minutes, seconds = divmod(round(seconds_left), 60)
    return f"{line}, {minutes // 60}:{minutes % 60:02}:{seconds:02} left"
