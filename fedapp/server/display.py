"""What a run shows while it goes and when it ends: a live bar on a terminal, plain lines anywhere else."""

import logging

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
from fedapp.report.clients import last_clients
from fedapp.report.scores import LOSS, metrics_among
from fedapp.report.table import closing_table, devices_table
from fedapp.server.record import Entry, Observer
from fedapp.server.summary import Summary

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
