"""What a run shows while it goes and when it ends: a live bar on a terminal, plain lines anywhere else."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import strategies
from fedapp.report.table import closing_table

log = logging.getLogger("flwr.fedapp")

LINES = 10  # progress lines of a run without a terminal


class Display:
    """Progress of a run of ``total`` aggregations."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.console = Console()
        columns = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()]
        self.bar = Progress(*columns, TextColumn("{task.fields[metrics]}"), console=self.console)
        self.task = self.bar.add_task("waiting for clients", total=total, metrics="")
        self.metrics: dict[str, float] = {}

    def start(self, path: Path) -> None:
        """Begin to show progress."""
        if self.console.is_terminal:
            self.bar.start()
        else:
            log.info("Recording this run in %s", path)

    def announces(self, aggregation: int) -> bool:
        """Tell whether the log gets a line about an aggregation."""
        due = aggregation % max(1, self.total // LINES) == 0 or aggregation == self.total
        return due and not self.console.is_terminal

    def update(self, progress: strategies.Progress) -> None:
        """Show an aggregation."""
        self.metrics.update(progress.metrics)
        shown = "  ".join(
            f"{key} {self.metrics[key]:.4f}" for key in ("loss", "accuracy") if key in self.metrics
        )
        self.bar.update(self.task, completed=progress.aggregation, metrics=shown, description="rounds")
        if self.announces(progress.aggregation):
            log.info("round %d of %d: %s", progress.aggregation, self.total, shown)

    def stop(self) -> None:
        """End the live bar."""
        if self.console.is_terminal:
            self.bar.stop()

    def close(
        self, summary: Mapping[str, object], metrics: Sequence[Mapping[str, object]], path: Path
    ) -> None:
        """Print the closing table and where the run is."""
        self.console.print(closing_table(summary, metrics))
        # Not through rich, which would break a long path over lines.
        print(f"Run directory: {path}", flush=True)
        for name in ("curves.png", "partition.png", "model.safetensors"):
            print(f"  {path / name}", flush=True)
