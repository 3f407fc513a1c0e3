"""What a map leaves behind beside its curves: map.png, map.csv, report.md."""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from fedapp.report.series import mean_and_spread
from fedapp.report.style import current_style
from studies.maps.curves import FILE
from studies.maps.plan import NOT_KEYS, SEARCH, WHY, MapPlan, Spot, candidate_text
from studies.maps.rule import MEASURES, WON, Measure, Win, Wins, standing, wins_of
from studies.maps.scores import Curves, MapScore, scores_of

PICTURE, TABLE, REPORT = "map.png", "map.csv", "report.md"

Scores = Mapping[Spot, Sequence[MapScore]]


def write_report(plan: MapPlan, curves: Curves, versions: Mapping[str, str], folder: Path) -> list[Path]:
    """Write the picture, the table and the report from a map's curves; return their paths."""
    from studies.maps.picture import draw_map  # matplotlib is slow to import

    scores = scores_of(plan, curves)
    wins = wins_of(plan, scores)
    picture = draw_map(folder / PICTURE, plan, scores, wins)
    frame(plan, scores).to_csv(folder / TABLE, index=False)
    text = "\n".join(_lines(plan, scores, wins, curves, versions)) + "\n"
    (folder / REPORT).write_text(text, "utf-8")
    return [*current_style().paths(picture), folder / TABLE, folder / REPORT]


def frame(plan: MapPlan, scores: Scores) -> pd.DataFrame:
    """Return a row for each cell and method.

    Columns: the cell, the method, its server's ``optimizer``, the values that it was tuned to, whether its search was
    still ahead at its end (``open``), judged runs that ended and that diverged, on how many the target was
    ``reached``, ``time`` and ``time-spread`` (only where all reached it), ``mean`` and ``mean-spread``, and what came
    of the cell for it by each measure: ``won``, ``close`` or nothing.
    """
    rows: list[dict[str, Any]] = []
    wins = wins_of(plan, scores)
    for spot, methods in scores.items():
        for each in methods:
            time, time_spread = (
                mean_and_spread(each.times) if each.reached == len(each.times) else (math.nan,) * 2
            )
            mean, mean_spread = mean_and_spread(each.means)
            rows.append(
                {
                    **spot._asdict(),
                    "method": each.method,
                    "optimizer": _optimizer(plan, each.method),
                    "tuned": candidate_text(each.tuned),
                    "open": each.is_open,
                    "runs": len(each.means),
                    "diverged": each.diverged,
                    "reached": each.reached,
                    "time": time,
                    "time-spread": time_spread,
                    "mean": mean,
                    "mean-spread": mean_spread,
                    **{f"by-{measure}": _came(wins[spot, measure], each.method) for measure in MEASURES},
                }
            )
    return pd.DataFrame(rows).round(6)


def _came(found: Win, method: str) -> str:
    if method not in found.best:
        return ""
    return "won" if found.outcome == WON else "close"


def win_text(found: Win, measure: Measure) -> str:
    """Say what came of a cell in words."""
    who = ", ".join(found.best)
    if found.outcome != WON:
        return f"{found.outcome}: {who}" if who else found.outcome
    if not found.runner_up:
        return f"**{who}**; all others diverged"
    bound = "at least " * found.at_least
    by = f"{bound}{found.by:.2f} times as fast as" if measure == "time" else f"by {abs(found.by):.4f} over"
    return f"**{who}**, {by} {found.runner_up}"


def effect_text(found: Win, measure: Measure) -> str:
    """Write the best one's lead over the next with its interval, and the largest p-value, as it is and adjusted."""
    if math.isnan(found.p):
        return "-"
    digits = 2 if measure == "time" else 4
    lead = f"{found.by:.{digits}f} [{found.low:.{digits}f}, {found.high:.{digits}f}] over {found.runner_up}"
    least = max(found.by_rival, key=lambda rival: found.by_rival[rival])
    of = "" if least == found.runner_up else f" over {least}"
    return f"{lead}; p = {found.p:.1e}{of}, Holm {found.holm:.2g}, BH {found.hochberg:.2g}"


def _lines(
    plan: MapPlan, scores: Scores, wins: Wins, curves: Curves, versions: Mapping[str, str]
) -> Iterator[str]:
    """Yield the report's lines."""
    yield f"# {plan.title}"
    yield ""
    yield f"![which method wins where]({PICTURE})"
    yield ""
    yield f"By {len(curves)} runs, in [{FILE}]({FILE}); the table of all cells and methods is [{TABLE}]({TABLE})."
    ended = sum(each.is_complete for methods in scores.values() for each in methods)
    total = sum(map(len, scores.values()))
    if ended < total:
        yield f"It goes on: {ended} of {total} cells × methods have all their runs."
    if waiting := _not_run(plan, scores):
        yield ""
        yield f"Methods that were added to be compared, and whose runs are missing: {', '.join(waiting)}."
    yield ""
    yield f"**Rule**, fixed before the runs. {plan.rule.text}"
    yield ""
    yield (
        f"Each method has in each cell the candidate that did best on seeds {_listed(plan.tuning.seeds)}, by "
        f"{plan.metric} averaged over the time budget of {plan.budget:g} virtual seconds. Judged on seeds "
        f"{_listed(plan.seeds)}."
    )
    if versions:
        yield ""
        yield "Versions: " + ", ".join(f"{name} {number}" for name, number in versions.items()) + "."
    for problem in plan.problems:
        yield from ("", f"## {problem}", "", *_winners(plan, wins, problem))
    yield from ("", "## Methods", "", *_methods(plan))
    if notes := list(_notes(plan, scores)):
        yield from ("", "## Remarks", "", *(f"- {note}" for note in notes))
    for spot, methods in scores.items():
        yield from ("", f"## {spot.problem}, {_where(plan, spot)}", "", *_table(plan, spot, methods, wins))


def _not_run(plan: MapPlan, scores: Scores) -> list[str]:
    """Return the methods that were added, each with the number of its cells that lack runs of it."""
    lacking = [
        method
        for spot in plan.spots
        for method in plan.methods_of(spot)
        if method not in {each.method for each in scores[spot]}
    ]
    return [f"{name} (in {lacking.count(name)} cells)" for name in dict.fromkeys(lacking)]


def _where(plan: MapPlan, spot: Spot) -> str:
    return f"{plan.across.name} {spot.across}, {plan.upwards.name} {spot.upwards}"


def _listed(numbers: Sequence[float]) -> str:
    return ", ".join(f"{number:g}" for number in numbers)


def _winners(plan: MapPlan, wins: Wins, problem: str) -> Iterator[str]:
    target = plan.problems[problem].target
    names = (f"time to {plan.metric} {target:g}", f"mean {plan.metric}")
    effects = [f"{name}: times, or by how much" for name in names]
    heads = [plan.across.name, plan.upwards.name, *names, *effects]
    yield f"| {' | '.join(heads)} |"
    yield "|---" * len(heads) + "|"
    for spot in plan.spots:
        if spot.problem == problem:
            found = {measure: wins[spot, measure] for measure in MEASURES}
            cells = [
                text(found[measure], measure) for text in (win_text, effect_text) for measure in MEASURES
            ]
            yield f"| {' | '.join([spot.across, spot.upwards, *cells])} |"


def _methods(plan: MapPlan) -> Iterator[str]:
    yield "| method | keys | tried | why these |"
    yield "|---|---|---|---|"
    for name, own in plan.methods.items():
        keys = ", ".join(f"`{key} = {_values(value)}`" for key, value in own.items() if key not in NOT_KEYS)
        of: dict[str, list[str]] = {}
        for problem in plan.problems:
            of.setdefault(_grid_text(plan, problem, name), []).append(problem)
        values = (
            next(iter(of))
            if len(of) == 1
            else "; ".join(f"{', '.join(names)}: {text}" for text, names in of.items())
        )
        yield f"| {name} | {keys} | {values} | {own.get(WHY, '')} |"


def _grid_text(plan: MapPlan, problem: str, method: str) -> str:
    return ", ".join(f"`{key}` {_listed(values)}" for key, values in plan.grid(problem, method).items())


def _values(value: object) -> str:
    return " / ".join(map(str, value)) if isinstance(value, list) else str(value)


def _notes(plan: MapPlan, scores: Scores) -> Iterator[str]:
    """Say which search was still ahead at its end, and what diverged."""
    for spot, methods in scores.items():
        for each in methods:
            where = f"{spot.problem}, {_where(plan, spot)}: {each.method}"
            if each.is_open:
                yield f"{where}: the search was still going on after {plan.tuning.steps} steps"
            if each.diverged:
                yield f"{where} diverged in {each.diverged} of {len(plan.seeds)}"
            elif each.is_complete and each.tuned is None:
                yield f"{where} diverged in tuning, with every value"


def _optimizer(plan: MapPlan, method: str) -> str:
    """Return the optimizer at the server, which some methods have as a part of their rule."""
    own = plan.methods[method]
    return str(own.get("server-optimizer", "sgd" if "server-lr" in str(own.get(SEARCH)) else "its own"))


def _table(plan: MapPlan, spot: Spot, methods: Sequence[MapScore], wins: Wins) -> Iterator[str]:
    yield f"| method | optimizer at the server | values | time to the target | mean {plan.metric} |"
    yield "|---|---|---|---|---|"
    compared = standing(plan, methods)
    stands = {plan.family(each.method): each.method for each in compared}
    for each in methods:
        if plan.is_added(each.method) and not each.is_complete:
            continue
        texts = (each.time_text(), each.mean_text())
        cells = [
            f"**{text}**" if found.outcome == WON and each.method in found.best else text
            for found, text in zip((wins[spot, measure] for measure in MEASURES), texts, strict=True)
        ]
        tuned = candidate_text(each.tuned) + " (open)" * each.is_open
        behind = "" if each in compared else f", for which {stands[plan.family(each.method)]} stands"
        yield f"| {each.method}{behind} | {_optimizer(plan, each.method)} | {tuned} | {cells[0]} | {cells[1]} |"
