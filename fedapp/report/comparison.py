"""Runs beside each other: at their end, and where all have come equally far, in time, rounds and bytes."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from rich import box
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from fedapp.report.cells import (
    UNTUNED,
    Cell,
    Tuning,
    axes_of,
    cells_of,
    direction_of,
    end_text,
    equal_time,
    warnings_of,
    why_unlike,
)
from fedapp.report.differences import described, differing
from fedapp.report.files import LOSS, data_of, with_rows
from fedapp.report.recorded import RecordedRun, metrics_of, names_of
from fedapp.report.table import add_values, markdown_row
from fedapp.report.verdict.of_runs import verdict_of
from fedapp.report.verdict.verdict import Verdict
from strategies.flower.higher_is_better import unknown_direction

FIGURE, CLIENTS, REPORT = "comparison.png", "clients.png", "comparison.md"

# How a place on one of `fedapp.report.recorded.AXES` is called.
_PLACES = {"time": "at time {:.4g}", "aggregation": "at round {:.0f}", "bytes": "at {:.4g} MB"}


@dataclass(frozen=True, eq=False)
class Comparison:
    """Recorded runs, those that differ in their seed alone as one."""

    runs: Sequence[RecordedRun]
    tuning: Tuning = UNTUNED

    @cached_property
    def cells(self) -> list[Cell]:
        """The settings, named by what tells them from each other."""
        return cells_of(self.runs, self.tuning)

    @cached_property
    def axes(self) -> dict[str, float]:
        """The axes on which all can be compared, and how far all of them came there."""
        return axes_of(self.cells)

    @cached_property
    def metrics(self) -> list[str]:
        """The metrics of the model that runs have."""
        found = metrics_of(self.runs)
        return sorted(found, key=lambda key: key != self.tuning.by)

    @property
    def title(self) -> str:
        """Strategy, dataset and model, as far as all runs have the same."""
        configs = [run.config for run in self.runs]
        varied = differing(configs)
        shared = [key for key in ("strategy", "dataset", "model") if key not in varied]
        config = configs[0]
        if "dataset" in config and "data-path" not in varied:
            config = {**config, "dataset": data_of(config)}
        return described(config, shared) or "runs"

    def heading(self, key: str) -> str:
        """Return a metric's name; of one over clients with the rows on which it is measured."""
        return with_rows(key, (run.rows for run in self.runs))

    @property
    def header(self) -> list[str]:
        """The columns of a metric's table."""
        return [
            "",
            "seeds",
            end_text(self.cells),
            *(_PLACES[axis].format(end) for axis, end in self.axes.items()),
        ]

    def rows(self, key: str) -> list[list[str]]:
        """Return a metric's table: mean ± standard deviation over seeds."""
        return [
            [
                cell.name,
                cell.seeds_text,
                cell.text(key),
                *(cell.text_at(axis, end, key) for axis, end in self.axes.items()),
            ]
            for cell in self.cells
        ]

    @property
    def remarks(self) -> list[str]:
        """Remarks: what can't be compared and why, how runs ended, and warnings in their logs."""
        notes = []
        shown = [run for cell in self.cells for run in cell.runs]
        if not shown:
            notes.append("no run came to its end: nothing is compared")
        elif len({run.clock for run in shown}) > 1:
            notes.append("times are of two clocks, virtual and real: not compared")
        elif "time" not in self.axes:
            notes.append("a run has no times: not compared at equal time")
        ends = [
            f"{name}: {run.standing}"
            for name, run in zip(names_of(self.runs), self.runs, strict=True)
            if run.standing not in ("finished", "?")
        ]
        unlike = {key: why_unlike(self.cells, key) for key in self.metrics}
        for reason in dict.fromkeys(filter(None, unlike.values())):
            notes.append(f"not comparable: {reason}")
        notes += [
            f"{key}: no run is marked as the best: {unknown_direction(key)}; metrics = 'min:…' or 'max:…' states it"
            for key in self.metrics
            if direction_of(self.cells, key) is None
        ]
        return notes + ends + [line for cell in self.cells for line in warnings_of(cell)]

    @cached_property
    def time(self) -> float | None:
        """The time at which the best is sought; None for the end of each run."""
        return equal_time(self.cells)

    @cached_property
    def verdict(self) -> Verdict:
        """The verdict on the settings, by the first metric of the runs, at `time` or their ends."""
        return self.verdict_by(next(iter(self.metrics), LOSS))

    def verdict_by(self, metric: str) -> Verdict:
        """Return the verdict on the settings by a metric, at `time` or their ends."""
        return verdict_of(
            self.cells,
            metric,
            time=self.time,
            tuning=self.tuning,
            files="metrics.jsonl in the folder of each run",
        )

    @property
    def verdict_lines(self) -> list[str]:
        """The lines of the verdict; [] of one setting, or if no run came to its end."""
        return self.verdict.lines if sum(bool(cell.runs) for cell in self.cells) > 1 else []

    def tables(self) -> list[Table]:
        """Return a table for each metric for the terminal; what leads is bold, at equal time if `time` is one."""
        return [self._table(key) for key in self.metrics]

    def _table(self, key: str) -> Table:
        leader = self.verdict_by(key).leader
        title = "\n".join(filter(None, (why_unlike(self.cells, key), f"{self.title}: {self.heading(key)}")))
        table = Table(title=escape(title), box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
        rows = self.rows(key)
        table.add_column(self.header[0], overflow="fold", min_width=13)
        for number, name in enumerate(self.header[1:], 1):
            add_values(table, name, [row[number] for row in rows])
        for cell, row in zip(self.cells, rows, strict=True):
            table.add_row(*map(Text, row), style="bold" if cell.name == leader else None)
        return table

    def write(self, folder: Path) -> list[Path]:
        """Write the tables and the overlaid curves into a folder; return the paths."""
        folder.mkdir(parents=True, exist_ok=True)
        lines = [f"# {self.title}", "", *(f"- {line}" for line in self.verdict_lines)]
        lines += [""] * bool(self.verdict_lines)
        for key in self.metrics:
            unlike = why_unlike(self.cells, key)
            lines += [
                f"## {self.heading(key)}",
                "",
                *([f"**Not comparable:** {unlike}", ""] if unlike else []),
                markdown_row(self.header),
                "|" + "---|" * len(self.header),
            ]
            lines += [*map(markdown_row, self.rows(key)), ""]
        paths = []
        if self.axes and self.metrics:
            from fedapp.report.overlay import draw_overlay  # matplotlib is slow to import

            curves = folder / FIGURE
            paths += draw_overlay(curves, self.cells, self.metrics[:2], self.axes)
            lines += [f"![curves]({FIGURE})", ""]
            if figures := self._draw_clients(folder):
                paths += figures
                lines += [f"![clients]({CLIENTS})", ""]
        lines += [f"- {note}" for note in self.remarks]
        (folder / REPORT).write_text("\n".join(lines).rstrip() + "\n", "utf-8")
        return [*paths, folder / REPORT]

    def _draw_clients(self, folder: Path) -> list[Path]:
        """Draw the clients of each setting's first run, if there are any with test rows of their own."""
        runs = {cell.label: cell.runs[0] for cell in self.cells if cell.runs}
        if not any(run.config.get("test-on") == "own" for run in runs.values()):
            return []
        from fedapp.report.by_client import draw_clients_of_runs

        return draw_clients_of_runs(folder / CLIENTS, runs)
