"""The report on an experiment: numbers beside the published ones, a verdict on each claim, figures."""

import csv
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from studies.reproduce.plan import Plan

Outcome = Literal[
    "holds", "doesn't hold", "not decided", "not testable at this scale", "not run", "quick: no verdict"
]


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
        if len(self.ours) > 1 and len(set(self.ours)) == 1 and math.isfinite(self.ours[0]):
            return 0.0  # np.std would give a rounding error
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
    """The content of a report.

    Attributes
    ----------
    rows : list of Row
    verdicts : list of Verdict
        A claim without one is not run: what it needs isn't there.
    figures : list of Path
        In the report's folder.
    notes : list of str
        Paragraphs: what the numbers are, why they differ.
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
    """Return a verdict; ``None``: the data are there and don't decide."""
    outcome: Outcome = "not decided" if holds is None else "holds" if holds else "doesn't hold"
    return Verdict(claim, outcome, evidence)


def not_run(claim: str, missing: str) -> Verdict:
    """Return the verdict on a claim whose runs or numbers are missing."""
    return Verdict(claim, "not run", missing)


def write_report(folder: Path, report: Report, plan: Plan, *, setting: Sequence[str]) -> Path:
    """Write report.md, table.csv and claims.csv.

    Parameters
    ----------
    folder : Path
        Exists, and holds the figures.
    setting : sequence of str
        Lines on how the experiment was run: quick or full, number of runs, dates, machines.
    """
    verdicts = _verdicts(report, plan)
    _write_csv(
        folder / "table.csv",
        ("quantity", "published", "ours", "spread", "difference", "seeds"),
        [
            (
                row.quantity,
                *(_plain(v) for v in (row.published, row.mean, row.spread, row.mean - row.published)),
                len(row.ours),
            )
            for row in report.rows
        ],
    )
    _write_csv(
        folder / "claims.csv",
        CLAIM_COLUMNS,
        [(v.claim, plan.claims[v.claim].text, v.outcome, v.evidence) for v in verdicts],
    )
    sections = [
        [f"# {plan.title}", "", f"Source: {plan.source}", "", *(f"- {line}" for line in setting)],
        _readings(plan),
        _claims(verdicts, plan),
        _numbers(report),
        *(["", f"![{path.stem}]({path.name})"] for path in report.figures),
        *(["", section] for section in report.extra),
        ["", "## Notes", "", *(f"- {note}" for note in report.notes)] if report.notes else [],
        _settings(plan),
    ]
    path = folder / "report.md"
    path.write_text("\n".join(line for lines in sections for line in lines) + "\n", encoding="utf-8")
    return path


CLAIM_COLUMNS = ("claim", "published", "verdict", "evidence")


def _verdicts(report: Report, plan: Plan) -> list[Verdict]:
    """Return a verdict on each of the plan's claims, in their order.

    Runs that are too short to decide a claim (`Plan.too_short`) have no verdict on it, whichever way they came out.

    Raises
    ------
    ValueError
        If there is a verdict on a claim that isn't the plan's.
    """
    found = {verdict.claim: verdict for verdict in report.verdicts}
    if unknown := found.keys() - plan.claims.keys():
        raise ValueError(f"verdicts on {', '.join(sorted(unknown))}, which the plan doesn't claim")
    every = [found.get(claim, not_run(claim, "what it needs isn't there")) for claim in plan.claims]
    if plan.is_quick:
        return [
            each if each.outcome == "not run" else Verdict(each.claim, "quick: no verdict", each.evidence)
            for each in every
        ]
    return [_with_scope(_at_scale(each, plan.too_short(each.claim)), plan) for each in every]


def _with_scope(verdict: Verdict, plan: Plan) -> Verdict:
    """Put where a claim was judged before the evidence."""
    here = plan.claims[verdict.claim].here
    if not here or verdict.outcome == "not run":
        return verdict
    return Verdict(verdict.claim, verdict.outcome, f"{here}: {verdict.evidence}")


def _at_scale(verdict: Verdict, too_short: str) -> Verdict:
    if not too_short or verdict.outcome == "not run":
        return verdict
    return Verdict(
        verdict.claim,
        "not testable at this scale",
        f"{too_short}. These runs: {verdict.outcome}; {verdict.evidence}",
    )


def _readings(plan: Plan) -> list[str]:
    if not plan.readings:
        return []
    lines = [f"- {reading.text} (Chosen: {reading.chosen}.)" for reading in plan.readings]
    return ["", "## What the source leaves open, and how it is read here", "", *lines]


def _claims(verdicts: Sequence[Verdict], plan: Plan) -> list[str]:
    if not verdicts:
        return []
    lines = [
        f"| {v.claim} | {cell(plan.claims[v.claim].text)} | {cell(plan.claims[v.claim].filled_rule())} "
        f"| **{v.outcome}** | {cell(v.evidence)} |"
        for v in verdicts
    ]
    header = ["| claim | published | holds if | verdict | evidence |", "|---|---|---|---|---|"]
    return ["", "## Claims", "", *header, *lines]


def _numbers(report: Report) -> list[str]:
    if not report.rows:
        return []
    return [
        "",
        "## Numbers",
        "",
        "| quantity | published | ours | difference | seeds |",
        "|---|--:|--:|--:|--:|",
        *(_table_line(row, report.digits) for row in report.rows),
        "",
        "Ours is the mean over seeds ± the standard deviation. –: not published, or not reached.",
    ]


def _settings(plan: Plan) -> list[str]:
    lines = []
    tables: dict[str, Mapping[str, Any]] = {
        "base": plan.base,
        "grid": plan.grid,
        "tuning": plan.tuning.model_dump() if plan.tuning else {},
        "settings": plan.settings,
    }
    for name, table in tables.items():
        if table:
            lines += ["", f"[{name}]", *(f"{key} = {_toml(value)}" for key, value in table.items())]
    return ["", "## Settings", "", "```toml", *lines[1:], "```"] if lines else []


def _toml(value: Any) -> str:
    """Write a value of TOML in one line."""
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {_toml(each)}" for key, each in value.items()) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return json.dumps(value, ensure_ascii=False)


def _table_line(row: Row, digits: int) -> str:
    difference = row.mean - row.published
    shown = f"{difference:+.{digits}g}" if math.isfinite(difference) else "–"
    published = _number(row.published, digits)
    return f"| {cell(row.quantity)} | {published} | {row.text(digits)} | {shown} | {len(row.ours)} |"


def _number(value: float, digits: int) -> str:
    return f"{value:.{digits}g}" if math.isfinite(value) else "–"


def _plain(value: float) -> str:
    return f"{value:.6g}" if math.isfinite(value) else ""


def cell(text: str) -> str:
    """Return a text as it can stand in a table of Markdown."""
    return text.replace("|", "\\|").replace("\n", " ")


def _write_csv(path: Path, header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(header)
        writer.writerows(rows)
