"""A comparison as a table of a paper: LaTeX with a file of references, and Markdown."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fedapp.config.citations import bibliography, paper_name, papers_of
from fedapp.report.cells import Cell, any_without_rounds, clients_text, why_unlike
from fedapp.report.comparison import Comparison
from fedapp.report.differences import described, descriptions, differing
from fedapp.report.files import data_of, without_digest
from fedapp.report.series import spread_text
from fedapp.report.table import markdown_row
from fedapp.report.verdict.doubts import has_untuned_methods
from fedapp.report.verdict.judging import LEVEL
from fedapp.report.verdict.verdict import Verdict

RESULT, GIVEN = ORDERS = ("result", "given")
LATEX, MARKDOWN, BIB = "table.tex", "table.md", "methods.bib"

_METHOD, _SEED = "strategy", "seed"
_LATEX = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
_IN_MATH = {"±": r"$\pm$", "≥": r"$\geq$", "≤": r"$\leq$", "²": "$^2$", "−": "$-$"}


@dataclass(frozen=True)
class PaperRow:
    """A setting's line of a table.

    Attributes
    ----------
    strategy : str
        Its method; empty for settings whose config can't be read.
    name : str
        What the method is called in its paper, and the keys that weren't tuned; or the setting's name.
    cells : sequence of str
        The cells beside the name.
    leads : bool
        Whether the verdict says that the setting leads.
    """

    strategy: str
    name: str
    cells: Sequence[str]
    leads: bool


@dataclass(frozen=True)
class PaperTable:
    """The table of a metric.

    Attributes
    ----------
    note : str
        Why the numbers can't be compared; empty if they can.
    caption : str
        What the table shows, of how many seeds, and what is bold.
    head : sequence of str
        The columns.
    bold_at : int
        The column, beside the name's, that the verdict is on.
    """

    note: str
    caption: str
    head: Sequence[str]
    rows: Sequence[PaperRow]
    bold_at: int

    @classmethod
    def of(cls, comparison: Comparison, key: str, order: str = RESULT) -> "PaperTable":
        """Return the table of a metric: settings from the best to the worst, or in the order of the runs.

        Bold is the setting that leads by the verdict, if one does.
        """
        verdict = comparison.verdict_by(key)
        cells = _ordered(comparison.cells, verdict, order)
        keys, columns = _columns(cells, comparison.tuning.keys)
        is_equal = len({cell.seeds_text for cell in cells}) == 1
        places = [(None, math.nan), *comparison.axes.items()]
        heads = comparison.header[2:]
        if _end_at_one_time(comparison):  # the two columns are one
            places, heads = places[1:], heads[1:]
        axes = [axis for axis, _ in places]
        judged_at = "time" if comparison.time is not None or None not in axes else None
        rows = [
            PaperRow(
                cell.method,
                name,
                [
                    *values,
                    *([] if is_equal else [cell.seeds_text]),
                    *(_spread(cell, key, *at) for at in places),
                ],
                cell.name == verdict.leader,
            )
            for cell, name, *values in zip(cells, _names(cells, keys), *columns.values(), strict=True)
        ]
        head = [*columns, *([] if is_equal else ["seeds"]), *heads]
        first = len(head) - len(places)
        return cls(
            why_unlike(comparison.cells, key),
            _caption(comparison, key, verdict) + _on_untested(heads, axes, judged_at),
            ["method", *head],
            rows,
            first + axes.index(judged_at),
        )


def _end_at_one_time(comparison: Comparison) -> bool:
    """Return True if all runs reach the time at which they are compared at their end, as with a time budget."""
    end = comparison.axes.get("time", math.nan)
    runs = [run for cell in comparison.cells for run in cell.runs]
    return bool(runs) and all(math.isclose(run.reach("time"), end) and not run.keeps_best for run in runs)


def _ordered(cells: Sequence[Cell], verdict: Verdict, order: str) -> list[Cell]:
    places = {name: place for place, name in enumerate(verdict.means)}
    by_result = {cell.name: places.get(cell.name, len(places)) for cell in cells}
    return sorted(cells, key=lambda cell: by_result[cell.name] if order == RESULT else 0)


def _columns(cells: Sequence[Cell], tuned: Sequence[str]) -> tuple[list[str], dict[str, list[str]]]:
    """Return the keys that belong to settings' names, and the values of tuned keys by key."""
    configs = [cell.runs[0].config if cell.runs else {} for cell in cells]
    varied = [key for key in differing(configs) if key not in (_METHOD, _SEED)]
    shown = [key for key in tuned if any(key in config for config in configs)]
    values = {
        key: [described(config, [key]).removeprefix(f"{key}=") or "-" for config in configs] for key in shown
    }
    return [key for key in varied if key not in tuned], values


def _names(cells: Sequence[Cell], keys: Sequence[str]) -> list[str]:
    """Return what settings are called: the method as in its paper, then the values of keys."""
    configs = [cell.runs[0].config if cell.runs else {} for cell in cells]
    beside = descriptions(configs, keys)
    return [
        ", ".join(filter(None, [paper_name(cell.method), told])) if cell.method else cell.name
        for cell, told in zip(cells, beside, strict=True)
    ]


def _spread(cell: Cell, key: str, axis: str | None, end: float) -> str:
    values = cell.finals(key) if axis is None else cell.values_at(axis, end, key)
    return spread_text(values, equal=True)


def _caption(comparison: Comparison, key: str, verdict: Verdict) -> str:
    """Return what a table shows: metric, data, number of seeds, budget, tuning, and what is bold."""
    numbers = sorted({len(cell.seeds) for cell in comparison.cells if cell.runs})
    seeds = f"{numbers[0]} to {numbers[-1]}" if len(numbers) > 1 else f"{numbers[0] if numbers else 0}"
    several = bool(numbers) and numbers[-1] > 1
    data = {data_of(run.config) for run in comparison.runs}
    models = {without_digest(str(run.config.get("model", ""))) for run in comparison.runs}
    model = f" ({next(iter(models))})" if len(models) == 1 and all(models) else ""
    what = comparison.heading(key) + (f" on {next(iter(data))}{model}" if len(data) == 1 else "")
    spread = f"mean ± standard deviation over n = {seeds} seeds" if several else "one seed"
    clients = clients_text(comparison.cells)
    tuning = comparison.tuning.text or "nothing was tuned" * has_untuned_methods(comparison.cells)
    parts = [f"{what[0].upper()}{what[1:]}, {spread}", clients, _budget(comparison), tuning]
    return f"{'; '.join(filter(None, parts))}. {_on_bold(verdict)}"


def _budget(comparison: Comparison) -> str:
    """Return what each run had: the same time, or the same number of rounds; "" where runs differ in that."""
    cells = comparison.cells
    of_runs = [
        (run.config.get("time-budget", 0), run.config.get("num-server-rounds", 0), run.clock)
        for cell in cells
        for run in cell.runs
    ]
    if not of_runs or len(set(of_runs)) > 1:
        return ""
    time, rounds, clock = of_runs[0]
    if time:
        return f"each run had {time:g} s of {'virtual' if clock == 'virtual' else 'real'} time"
    return (
        f"each run had {rounds} {'aggregations' if any_without_rounds(cells) else 'rounds'}" if rounds else ""
    )


def _on_untested(heads: Sequence[str], axes: Sequence[str | None], judged_at: str | None) -> str:
    """Return which columns no test was made on: those of each run's last evaluation up to a place."""
    others = [head for head, axis in zip(heads, axes, strict=True) if axis not in (judged_at, None)]
    return f" Each run's last evaluation up to there, untested: {', '.join(others)}." if others else ""


def _on_bold(verdict: Verdict) -> str:
    """Return what is bold and by which test, or why nothing is."""
    seeds = sorted({pair.seeds for pair in verdict.pairs})
    if not seeds or seeds[-1] < 2:
        return "Nothing is bold: no test is possible."
    number = str(seeds[0]) if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]}"
    pairs = len(verdict.pairs)
    test = (
        f"paired t-test{'s' * (pairs > 1)} {verdict.place} over {number} seeds"
        + f", p-values by Holm over all {pairs} pairs" * (pairs > 1)
        + f", level {LEVEL:g}"
    )
    if verdict.leader:
        return f"Bold: what is apart from every other ({test})."
    return f"Nothing is bold, as none is apart from every other ({test})."


def markdown_of(comparison: Comparison, order: str = RESULT) -> str:
    """Return a table in Markdown for each metric, with its caption."""
    parts = []
    for key in comparison.metrics:
        shown = PaperTable.of(comparison, key, order)
        lines = [markdown_row(shown.head), "|" + "---|" * len(shown.head)]
        for row in shown.rows:
            cited = "; ".join(paper.short for paper in papers_of(row.strategy))
            name = f"{row.name} ({cited})" if cited else row.name
            lines.append(markdown_row(_bold(row, name, row.cells, shown.bold_at, "**{}**")))
        note = [f"**Not comparable:** {shown.note}", ""] if shown.note else []
        parts.append("\n".join([*note, shown.caption, "", *lines]) + "\n")
    return "\n".join(parts)


def latex_of(comparison: Comparison, order: str = RESULT) -> str:
    r"""Return a table of LaTeX (package booktabs) for each metric, with its caption, methods with ``\cite``."""
    return "\n".join(_tabular(PaperTable.of(comparison, key, order)) for key in comparison.metrics)


def write_paper(comparison: Comparison, folder: Path, forms: Sequence[str], order: str) -> list[Path]:
    """Write the tables into a folder, those of LaTeX with a file of the references; return the paths.

    Parameters
    ----------
    forms
        ``latex``, ``markdown`` or both.
    """
    texts = {}
    if "latex" in forms:
        texts[LATEX] = latex_of(comparison, order)
        texts[BIB] = bibliography(cell.method for cell in comparison.cells)
    if "markdown" in forms:
        texts[MARKDOWN] = markdown_of(comparison, order)
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (folder / name).write_text(text, "utf-8")
    return [folder / name for name in texts]


def _tabular(shown: PaperTable) -> str:
    rows = []
    for row in shown.rows:
        keys = ",".join(paper.key for paper in papers_of(row.strategy))
        method, comma, told = row.name.partition(", ")
        name = _in_latex(method) + (rf"~\cite{{{keys}}}" if keys else "") + _in_latex(comma + told)
        rows.append(
            _bold(row, name, [_in_latex(cell) for cell in row.cells], shown.bold_at, r"\textbf{{{}}}")
        )
    lines = [
        *([f"% not comparable: {shown.note}"] if shown.note else []),
        r"\begin{table}",
        r"\centering",
        r"\setlength{\belowcaptionskip}{6pt}",
        rf"\caption{{{_in_latex(shown.caption)}}}",
        rf"\begin{{tabular}}{{l{'r' * (len(shown.head) - 1)}}}",
        r"\toprule",
        " & ".join(map(_in_latex, shown.head)) + r" \\",
        r"\midrule",
        *(" & ".join(row) + r" \\" for row in rows),
        r"\bottomrule",
        r"\end{tabular}",
        r"\end{table}",
    ]
    return "\n".join(lines) + "\n"


def _bold(row: PaperRow, name: str, cells: Sequence[str], at: int, form: str) -> list[str]:
    """Return a row with its name; name and the cell at a place are bold by a form if the setting leads."""
    if not row.leads:
        return [name, *cells]
    return [
        form.format(name),
        *(form.format(cell) if place == at else cell for place, cell in enumerate(cells)),
    ]


def _in_latex(text: str) -> str:
    """Return a text as LaTeX sets it."""
    escaped = re.sub(r"[\\~^&%$#_{}]", lambda sign: _LATEX.get(sign[0], f"\\{sign[0]}"), text)
    return re.sub("|".join(_IN_MATH), lambda sign: _IN_MATH[sign[0]], escaped)
