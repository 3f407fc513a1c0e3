"""The report on an experiment: numbers beside the published ones, a verdict on each claim, figures."""

import csv
import math
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Literal

import numpy as np

from fedapp.results import PACKAGES

Outcome = Literal["holds", "doesn't hold", "not decided"]


@dataclass(frozen=True)
class Row:
    """A number of ours, one value per seed, beside the published one (NaN: none is published)."""

    quantity: str
    ours: Sequence[float]
    published: float = math.nan

    @property
    def reached(self) -> list[float]:
        """Values that are numbers: a threshold that wasn't reached has none."""
        return [value for value in self.ours if math.isfinite(value)]

    @property
    def mean(self) -> float:
        """Mean over seeds; NaN unless there is a number for each."""
        return float(np.mean(self.ours)) if self.ours and len(self.reached) == len(self.ours) else math.nan

    @property
    def spread(self) -> float:
        """Standard deviation over seeds (n − 1); NaN for fewer than two."""
        return float(np.std(self.ours, ddof=1)) if len(self.ours) > 1 else math.nan

    def text(self, digits: int) -> str:
        """Write mean ± spread, or how many seeds have a number."""
        if self.reached and len(self.reached) < len(self.ours):
            return f"{len(self.reached)} of {len(self.ours)} seeds"
        spread = f" ± {self.spread:.2g}" if math.isfinite(self.spread) else ""
        return _number(self.mean, digits) + spread


@dataclass(frozen=True)
class Verdict:
    """Whether a published claim holds in our runs, and the numbers that say so."""

    claim: str
    outcome: Outcome
    evidence: str


@dataclass
class Report:
    """What a report function returns.

    Attributes
    ----------
    rows : list of Row
    verdicts : list of Verdict
        A claim without one is not decided.
    figures : list of Path
        In the report's folder.
    notes : list of str
        Paragraphs: settings that the paper leaves open, why numbers differ.
    extra : list of str
        Sections of Markdown, after the figures.
    digits : int
        Significant digits in the table.
    """

    rows: list[Row] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)
    figures: list[Path] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    extra: list[str] = field(default_factory=list)
    digits: int = 4


def judge(claim: str, holds: bool | None, evidence: str) -> Verdict:
    """Return a verdict; ``None``: the data don't decide."""
    outcome: Outcome = "not decided" if holds is None else "holds" if holds else "doesn't hold"
    return Verdict(claim, outcome, evidence)


def write_report(
    folder: Path,
    report: Report,
    *,
    title: str,
    source: str,
    claims: Mapping[str, str],
    setting: Sequence[str],
) -> Path:
    """Write report.md, table.csv and claims.csv.

    Parameters
    ----------
    folder : Path
        Exists, and holds the figures.
    claims : mapping
        Id and text of each claim the experiment is about.
    setting : sequence of str
        How it was run: quick or full, runs, time; the date, versions and machine are added.
    """
    verdicts = {verdict.claim: verdict for verdict in report.verdicts}
    for claim in claims:
        verdicts.setdefault(claim, Verdict(claim, "not decided", "the runs it needs aren't there"))
    _write_csv(
        folder / "table.csv",
        ("quantity", "published", "ours", "spread", "difference", "seeds"),
        [
            (row.quantity, *(_plain(v) for v in (row.published, row.mean, row.spread, row.mean - row.published)),
             len(row.ours))
            for row in report.rows
        ],
    )  # fmt: skip
    _write_csv(
        folder / "claims.csv",
        ("claim", "verdict", "evidence"),
        [(v.claim, v.outcome, v.evidence) for v in verdicts.values()],
    )
    lines = [f"# {title}", "", f"Source: {source}", ""]
    lines += [f"- {line}" for line in (*setting, *circumstances())]
    if verdicts:
        lines += ["", "## Claims", "", "| claim | published | verdict | evidence |", "|---|---|---|---|"]
        lines += [
            f"| {v.claim} | {_cell(claims.get(v.claim, ''))} | **{v.outcome}** | {_cell(v.evidence)} |"
            for v in verdicts.values()
        ]
    if report.rows:
        lines += [
            "",
            "## Numbers",
            "",
            "| quantity | published | ours | difference | seeds |",
            "|---|--:|--:|--:|--:|",
        ]
        lines += [_table_line(row, report.digits) for row in report.rows]
        lines += [
            "",
            "Ours is the mean over seeds ± the standard deviation. –: not published, or not reached.",
        ]
    lines += [line for path in report.figures for line in ("", f"![{path.stem}]({path.name})")]
    lines += [line for section in report.extra for line in ("", section)]
    if report.notes:
        lines += ["", "## Notes", ""] + [f"- {note}" for note in report.notes]
    path = folder / "report.md"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def circumstances() -> list[str]:
    """Return the date, the versions and the machine, a line each."""
    versions = ", ".join(f"{name} {_version(name)}" for name in PACKAGES)
    return [
        f"{date.today().isoformat()}; Python {platform.python_version()}, {versions}",
        f"{_processor()}, {os.cpu_count()} cores{_gpu()}",
    ]


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.machine()


def _gpu() -> str:
    import torch

    return f", {torch.cuda.get_device_name(0)}" if torch.cuda.is_available() else ", no GPU"


def _version(package: str) -> str:
    try:
        return version(package)
    except ModuleNotFoundError:
        return "not installed"


def _table_line(row: Row, digits: int) -> str:
    difference = row.mean - row.published
    shown = f"{difference:+.{digits}g}" if math.isfinite(difference) else "–"
    published = _number(row.published, digits)
    return f"| {_cell(row.quantity)} | {published} | {row.text(digits)} | {shown} | {len(row.ours)} |"


def _number(value: float, digits: int) -> str:
    return f"{value:.{digits}g}" if math.isfinite(value) else "–"


def _plain(value: float) -> str:
    return f"{value:.6g}" if math.isfinite(value) else ""


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _write_csv(path: Path, header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(header)
        writer.writerows(rows)
