"""What a sweep's folder says of its runs: runs.csv and runs.parquet, report.md, curves.png."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import tomli_w
from rich import box
from rich.table import Table
from rich.text import Text

from fedapp.report.cells import Cell, axes_of, direction_of, warnings_of
from fedapp.report.files import with_rows
from fedapp.report.recorded import RecordedRun, metrics_of
from fedapp.report.series import mean_and_spread
from fedapp.report.table import add_values, markdown_row
from fedapp.sweeps.plan import SEED
from fedapp.sweeps.point import folder_of
from fedapp.sweeps.sweep import CSV, FIGURE, PARQUET, REPORT, TUNING, TUNING_CSV, Outcome, score_text
from fedapp.sweeps.tuning import HOW_STATED
from strategies.flower.higher_is_better import unknown_direction


def write_results(outcome: Outcome) -> list[Path]:
    """Write what a sweep leaves behind beside its runs; return the paths."""
    folder = outcome.path
    frame = runs_frame(outcome)
    frame.to_csv(folder / CSV, index=False)
    frame.to_parquet(folder / PARQUET, index=False)
    paths = [folder / CSV, folder / PARQUET]
    if outcome.picks:
        tuning_frame(outcome).to_csv(folder / TUNING_CSV, index=False)
        paths.append(folder / TUNING_CSV)
    cells = [cell for cell in outcome.cells if cell.runs]
    if cells and outcome.metrics:
        from fedapp.report.overlay import draw_overlay  # matplotlib is slow to import

        axes = {axis: end for axis, end in axes_of(cells).items() if axis in ("time", "aggregation")}
        if axes:
            figure = folder / FIGURE
            paths += draw_overlay(figure, cells, outcome.metrics[:2], axes, outcome.plan.title)
    (folder / REPORT).write_text(report(outcome, (folder / FIGURE) in paths), "utf-8")
    return [*paths, folder / REPORT]


def runs_frame(outcome: Outcome) -> pd.DataFrame:
    """Return a row for each run and evaluation; one without a metric for a run that has none.

    Columns: ``run``, the axes (`Outcome.columns`), ``seed``, ``status``, ``reason``, then every scalar metric of
    metrics.jsonl.
    """
    rows: list[dict[str, Any]] = []
    for each in outcome.planned:
        run = outcome.run_of(each)
        status, reason = outcome.status_of(each)
        known = {
            "run": run.path.name,
            **outcome.labelled(each.labels),
            SEED: each.config.seed,
            "status": status,
            "reason": reason,
        }
        rows += [known | values for values in _evaluations(run)] or [known]
    return _tidy(rows, ["run", *outcome.columns.values(), SEED, "status", "reason", "aggregation", "time"])


def tuning_frame(outcome: Outcome) -> pd.DataFrame:
    """Return a row for each run on a tuning seed: its axes, how it ended, its final metrics."""
    rows: list[dict[str, Any]] = []
    for each in outcome.tried:
        run = RecordedRun(folder_of(each, outcome.path / TUNING))
        finals = {key: run.final(key) for key in metrics_of([run])}
        picked = outcome.picks[tuple(each.labels[axis] for axis in outcome.plan.cell_axes)].value
        is_picked = picked == tuple(each.labels[axis] for axis in outcome.plan.tune)
        rows.append(
            {
                "run": run.path.name,
                **outcome.labelled(each.labels),
                "status": run.standing,
                "picked": is_picked,
                **finals,
            }
        )
    return _tidy(rows, ["run", *outcome.columns.values(), SEED, "status", "picked"])


def _evaluations(run: RecordedRun) -> Iterator[dict[str, float]]:
    for number in range(run.evaluations):
        yield {key: float(values[number]) for key, values in run.columns.items()}


def _tidy(rows: Sequence[Mapping[str, Any]], first: Sequence[str]) -> pd.DataFrame:
    """Return rows as a table, some columns first; a column of texts and numbers becomes one of texts."""
    frame = pd.DataFrame(list(rows))
    order = [key for key in dict.fromkeys(first) if key in frame]
    frame = frame[order + [key for key in frame.columns if key not in order]]
    for key in frame.columns:
        kinds = {type(value) for value in frame[key]}
        if str in kinds and len(kinds) > 1:
            frame[key] = frame[key].map(str)
    if "aggregation" in frame:
        frame["aggregation"] = frame["aggregation"].astype("Int64")
    return frame


def header(outcome: Outcome) -> list[str]:
    """Return the columns of the table of cells."""
    axes = [outcome.columns[axis] for axis in outcome.plan.shown_axes]
    rows = [run.rows for cell in outcome.cells for run in cell.runs]
    return [*axes, "runs", *(with_rows(key, rows) for key in outcome.metrics), "time", "MB"]


def lines(outcome: Outcome) -> list[tuple[Cell, list[str]]]:
    """Return the cells, and their row of the table: metrics as mean ± standard deviation over seeds."""
    axes = outcome.plan.shown_axes
    found = []
    for cell in outcome.cells:
        labels = [_label(cell.labels.get(axis, "")) for axis in axes]
        values = [cell.text(key, outcome.time) for key in outcome.metrics]
        ends = [[run.reach(axis) for run in cell.runs] for axis in ("time", "bytes")]
        costs = [_label(mean_and_spread(each)[0]) if each else "-" for each in ends]
        found.append((cell, [*labels, cell.seeds_text, *values, *costs]))
    return found


def table(outcome: Outcome) -> Table:
    """Return the table of all cells for the terminal; the best is bold."""
    seeds = outcome.plan.seeds
    over = f"over seeds {', '.join(map(str, seeds))}" if len(seeds) > 1 else f"seed {seeds[0]}"
    leader = outcome.leader
    unlike = f"{outcome.unlike}\n" if outcome.unlike else ""
    found = Table(
        title=f"{unlike}{place_text(outcome)}, {'mean ± standard deviation ' * (len(seeds) > 1)}{over}",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    labels = len(outcome.plan.shown_axes)
    rows = lines(outcome)
    for number, name in enumerate(header(outcome)):
        if number < labels:
            found.add_column(Text(name), overflow="fold")
        else:
            add_values(found, name, [row[number] for _, row in rows])
    for cell, row in rows:
        found.add_row(*map(Text, row), style="bold" if cell.name == leader else None)
    return found


def place_text(outcome: Outcome) -> str:
    """Say where the runs are compared; the columns time and MB are those of the end of each run."""
    if outcome.time is None:
        runs = [run for cell in outcome.cells for run in cell.runs]
        return f"{'the kept model' if runs and all(run.keeps_best for run in runs) else 'at the end'} of each run"
    return f"at equal time, {outcome.time:.4g}, which every run has reached"


def report(outcome: Outcome, has_figure: bool) -> str:
    """Return the report: table, figure, what was picked, what is to be known, the plan."""
    head = header(outcome)
    leader = outcome.leader
    text = [f"# {_title(outcome)}", ""]
    if verdict := outcome.verdict_lines:
        text += ["## Verdict", "", *(f"- {line}" for line in verdict), "", "## Settings", ""]
    text += [f"**Not comparable:** {outcome.unlike}", ""] if outcome.unlike else []
    text += [markdown_row(head), "|" + "---|" * len(head)]
    for cell, row in lines(outcome):
        text.append(markdown_row([f"**{each}**" if cell.name == leader else each for each in row]))
    bold = f" Bold: what leads by {outcome.by}." * bool(leader)
    place = place_text(outcome)
    text += ["", f"{place[0].upper()}{place[1:]}: mean ± standard deviation over the seeds.{bold}"]
    text += ["", f"![curves]({FIGURE})"] if has_figure else []
    if outcome.picks:
        text += ["", "## Picked", "", *_picks(outcome)]
    if notes := remarks(outcome):
        text += ["", "## Remarks", "", *(f"- {note}" for note in notes)]
    plan = outcome.plan.model_dump(by_alias=True, exclude_defaults=True)
    return "\n".join([*text, "", "## Plan", "", "```toml", tomli_w.dumps(plan).rstrip(), "```", ""])


def remarks(outcome: Outcome) -> list[str]:
    """Say which runs failed or warn of something, which axes nothing read, and which picks are none."""
    return [
        *_failures(outcome),
        *(note for cell in outcome.cells for note in _notes_on(cell)),
        *_unread_by_all(outcome),
        *_without_best(outcome),
        *_notes_on_picks(outcome),
    ]


def _failures(outcome: Outcome) -> Iterator[str]:
    """Name reported runs that failed or diverged, those of one setting and reason together, then tuning runs."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for each in outcome.planned:
        if reason := outcome.status_of(each)[1]:
            reasons.setdefault((outcome.plan.name_of(each.labels), reason), []).append(str(each.config.seed))
    for (name, reason), seeds in reasons.items():
        yield f"{name}, seed {', '.join(seeds)}: {reason}"
    reported = {each.name for each in outcome.planned}
    titles = {each.name: each.title for each in outcome.tried}
    for name, reason in outcome.failures.items():
        if name not in reported:
            yield f"tuning, {titles.get(name, name)}: {reason}"


def _notes_on(cell: Cell) -> Iterator[str]:
    """Yield the warnings of a cell's runs, and its axes that none of them read."""
    yield from warnings_of(cell)
    unread = {key for run in cell.runs for key in run.summary.get("unread-keys", ())} & cell.labels.keys()
    if unread:
        yield f"{cell.name}: {', '.join(sorted(unread))} isn't read, so its values give the same run"


def _unread_by_all(outcome: Outcome) -> Iterator[str]:
    runs = [run for cell in outcome.cells for run in cell.runs]
    unread = [set(run.summary.get("unread-keys", ())) for run in runs]
    if unread and (keys := sorted(set.intersection(*unread) - set(outcome.plan.grid))):
        yield f"no run reads {', '.join(keys)}"


def _without_best(outcome: Outcome) -> Iterator[str]:
    """Say why no setting is marked as the best, if runs have metrics."""
    if outcome.metrics and outcome.by not in outcome.metrics:
        there = ", ".join(outcome.metrics)
        yield f"by {outcome.by}: no run has that, so none is the best; there are {there}"
    elif outcome.metrics and direction_of(outcome.cells, outcome.by, outcome.plan.stated) is None:
        yield f"no setting is marked as the best: {unknown_direction(outcome.by)}; {HOW_STATED}"


def _notes_on_picks(outcome: Outcome) -> Iterator[str]:
    for chosen in outcome.picks.values():
        where = outcome.plan.name_of(dict(zip(outcome.plan.cell_axes, chosen.cell, strict=True)))
        if chosen.value is None:
            yield f"{where}: nothing was picked, as no value has runs that all came to their end"
        if chosen.time is not None:
            yield f"{where}: the tuned values are compared at equal time, {chosen.time:.4g}"


def _picks(outcome: Outcome) -> Iterator[str]:
    plan = outcome.plan
    seeds = ", ".join(map(str, plan.seeds_to_tune_on))
    yield f"By {outcome.by} at the end, on seeds {seeds}, none of which is reported above."
    yield ""
    yield markdown_row([*plan.cell_axes, *plan.tune, f"mean {outcome.by} of each value"])
    yield "|" + "---|" * (len(plan.cell_axes) + len(plan.tune) + 1)
    for each in outcome.picks.values():
        value = each.value or ("none",) * len(plan.tune)
        scores = [
            f"{', '.join(map(_label, tuned))}: {score_text(score)}" for tuned, score in each.scores.items()
        ]
        yield markdown_row([*map(_label, each.cell), *map(_label, value), "; ".join(scores)])


def _title(outcome: Outcome) -> str:
    return outcome.plan.title or "Sweep over " + ", ".join(
        axis for axis in outcome.plan.grid if axis != SEED or len(outcome.plan.grid) == 1
    )


def _label(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
