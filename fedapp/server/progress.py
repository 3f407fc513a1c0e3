"""What a run shows while it goes and when it ends: a live bar on a terminal or in a notebook, else lines in the log.

Without a terminal a line of progress is also logged now and then while nothing happens, as a sign of life. The run's
``log.txt`` has every line; a pipe gets the first, the last, and one a minute at most.
"""

import logging
from collections.abc import Callable
from typing import NamedTuple

from rich.console import Console

from fedapp.report import read_metrics
from fedapp.report.client_tables import last_clients
from fedapp.report.files import LOSS, metrics_among, rows_of
from fedapp.report.live_bar import LiveBar
from fedapp.report.table import clients_table, closing_table, devices_table
from fedapp.server.journal import Summary
from fedapp.server.record import Entry, Observer
from strategies.clock import WallClock

log = logging.getLogger("flwr.fedapp")

LINES = 10  # progress lines in the log of a run without a terminal
SCORES = 2  # metrics beside the loss in such a line
MINUTE = 60.0  # real seconds between two progress lines that go to a pipe


class Sparingly:
    """Tells which progress lines go to a pipe as well: at most one a minute, and those marked ``always``."""

    def __init__(self, now: Callable[[], float] | None = None) -> None:
        self.now = now or WallClock().now
        self._last: float | None = None

    def shown(self, *, always: bool = False) -> dict[str, bool]:
        """Return the field of a log record by which ``fedapp.logs.is_shown`` shows it, or doesn't."""
        now = self.now()
        due = always or self._last is None or now - self._last >= MINUTE
        self._last = now if due else self._last
        return {"shown": due}


class Display(Observer):
    """Progress of a run of ``total`` aggregations, and its ``summary`` in the end.

    Attributes
    ----------
    live : bool
        Whether there is a bar, on a terminal or in a notebook; otherwise there are lines in the log.
    """

    def __init__(
        self, total: int, summary: Summary, sparingly: Sparingly, *, has_rounds: bool, json: bool
    ) -> None:
        self.total = total
        self.sparingly = sparingly
        self.step = "round" if has_rounds else "aggregation"
        config = summary.experiment.config
        self.named, self.config = config.metrics, config.flat()
        self.time = "time {:.4g} s" if config.clock == "wall" else "virtual time {:.4g}"
        self.json = json
        self.summary = summary
        self.path = summary.directory.path
        self.console = Console()
        self.live = (self.console.is_terminal or self.console.is_jupyter) and not json
        self.bar = LiveBar(self.console, total, "waiting for clients") if self.live else None
        self.metrics: dict[str, float] = {}
        self._last: int | None = None

    def begin(self) -> None:
        """Begin to show progress."""
        if self.bar is not None:
            self.bar.start()
        else:
            log.info("Recording this run in %s", self.path)

    def announces(self, aggregation: int) -> bool:
        """Tell whether the log gets a line about an aggregation."""
        due = aggregation % max(1, self.total // LINES) == 0 or aggregation == self.total
        return due and not self.live

    def record(self, entry: Entry) -> None:
        """Show an aggregation."""
        aggregation = entry.progress.aggregation
        self.metrics.update(entry.metrics)
        scores = [key for key in metrics_among(self.metrics, self.named) if key != LOSS][:SCORES]
        time = self.time.format(entry.progress.time)
        if self.bar is not None:
            # What a resumed run begins with was done before, and says nothing of the pace.
            if self._last is None:
                self.bar.begin_at(aggregation, self.total)
            self._last = aggregation
            self.bar.advance(aggregation, f"{self.step}s", self._said(scores[:1] or [LOSS], time))
        if self.announces(aggregation):
            # How many there are may have been unknown before, and the last one is what the run came to.
            shown = self.sparingly.shown(always=aggregation in (0, self.total))
            said = self._said([LOSS, *scores], time)
            log.info("%s %d of %d: %s", self.step, aggregation, self.total, said, extra=shown)

    def _said(self, keys: list[str], time: str) -> str:
        return "  ".join([*(f"{key} {self.metrics[key]:.4f}" for key in keys if key in self.metrics), time])

    def end(self, status: str) -> None:
        """End the live bar; print the closing table and where the run is."""
        if self.bar is not None:
            self.bar.stop()
        if self.json:
            log.info("%s: %s", status, self.path)
        if self.json or not self.metrics:
            return
        evaluations = read_metrics(self.path)
        self.console.print(closing_table(self.summary.content, evaluations, self.config))
        clients = last_clients(self.path)
        scores = metrics_among(clients, self.named)
        for table in (clients_table(clients, scores, rows_of(self.config)), devices_table(clients)):
            if table is not None:
                self.console.print(table)
        # Not through rich, which would break a long path over lines.
        print(f"Run directory: {self.path}", flush=True)
        figures = ("curves.png", "clients.png", "timeline.png", "partition.png")
        for name in (*figures, "model.safetensors", "model-last.safetensors"):
            if (self.path / name).exists():
                print(f"  {self.path / name}", flush=True)


# Real seconds between two lines in log.txt, a third of a minute. A waiting run is asked every 5 s at least.
EVERY = 20.0


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
    sparingly : Sparingly
        Tells which of the lines a pipe gets; its clock is the line's.
    budget_left : callable
        Real seconds after which the run ends in any case; None: it has no such limit.
    """

    def __init__(
        self,
        total: int,
        standing: Callable[[], HowFar],
        sparingly: Sparingly,
        budget_left: Callable[[], float | None] = lambda: None,
    ) -> None:
        self.total = total
        self.standing = standing
        self.sparingly = sparingly
        self.budget_left = budget_left
        self.now = sparingly.now
        self._told = self.now()
        self._first: tuple[int, float] | None = None  # aggregation, and when it was noted
        self._last = (0, 0.0)

    def watching(self, should_stop: Callable[[], bool]) -> Callable[[], bool]:
        """Return ``stopped``, made to log the progress line whenever it is called and the line is due."""

        def asked() -> bool:
            self.refresh()
            return should_stop()

        return asked

    def refresh(self) -> None:
        """Log the line if it is due."""
        if self.now() - self._told >= EVERY:
            self._told = self.now()
            standing = self.standing()
            text = progress_line(
                standing.aggregation, self.total, standing.working, standing.clients, self.seconds_left()
            )
            shown = self.sparingly.shown()
            log.info("%s", text, extra={"aggregation": standing.aggregation, **shown})

    def record(self, entry: Entry) -> None:
        """Note when an aggregation was done."""
        self._last = entry.progress.aggregation, self.now()
        self._first = self._first or self._last
        self.refresh()

    def seconds_left(self) -> float | None:
        """Return how long the rest takes at the mean pace so far, counted from the first that was seen."""
        budget = self.budget_left()
        if self._first is None or self._last[0] == self._first[0]:
            return budget
        mean = (self._last[1] - self._first[1]) / (self._last[0] - self._first[0])
        rest = (self.total - self._last[0]) * mean - min(self.now() - self._last[1], mean)
        return max(0.0, rest if budget is None else min(rest, budget))


def progress_line(
    aggregation: int, total: int, working: int, clients: int, seconds_left: float | None
) -> str:
    """Return ``progress: aggregation 12 of 100, 3 of 5 devices at work, 0:04:10 left``.

    The last part, hours:minutes:seconds, is there once it can be told. ``fedapp deploy status`` reads this line.
    """
    line = f"progress: aggregation {aggregation} of {total}, {working} of {clients} devices at work"
    if seconds_left is None:
        return line
    minutes, seconds = divmod(round(seconds_left), 60)
    return f"{line}, {minutes // 60}:{minutes % 60:02}:{seconds:02} left"
