"""The verdict on recorded runs."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from fedapp.report.cells import UNTUNED, Cell, Tuning, axes_of, direction_of, why_unlike
from fedapp.report.files import LOSS
from fedapp.report.tested import num_shared_rows
from fedapp.report.verdict.costs import cost_sentence, costs_of
from fedapp.report.verdict.doubts import doubts_on, has_untuned_methods, is_lost
from fedapp.report.verdict.judging import by_seed, judge
from fedapp.report.verdict.verdict import Verdict
from strategies.flower.higher_is_better import higher_is_better, unknown_direction


def verdict_of(
    cells: Sequence[Cell],
    metric: str,
    *,
    time: float | None = None,
    stated: Mapping[str, bool] | None = None,
    tuning: Tuning = UNTUNED,
    files: str = "",
) -> Verdict:
    """Return the verdict on settings by a metric, at a time or at the end of each run.

    Settings with a run that failed or diverged aren't judged: the mean of the others would flatter them.

    Parameters
    ----------
    stated : mapping of str to bool, optional
        Whether a higher value is better, of metrics of which that is stated.
    tuning : Tuning
        What was tuned, and what of that may spoil the verdict.
    files : str
        The files that the numbers come from.
    """
    place = _place(cells, time)
    higher = direction_of(cells, metric, stated)
    if higher is None:
        return Verdict(
            metric, place, sentences=(f"No setting leads: {unknown_direction(metric)}.",), files=files
        )
    if unlike := why_unlike(cells, metric):
        return Verdict(metric, place, sentences=(f"Settings can't be compared: {unlike}.",), files=files)
    judged = [cell for cell in _with_own_names(cells) if cell.runs and not is_lost(cell)]
    rows = [
        (cell.name, seed, value)
        for cell in judged
        for seed, value in zip(cell.seeds, cell.scores(metric, time), strict=True)
    ]
    found = judge(rows, metric, higher=higher, place=place)
    target, costs = costs_of(judged, metric, higher=higher, time=time)
    order = {name: number for number, name in enumerate(found.means)}
    costs = tuple(
        sorted((cost for cost in costs if cost.setting in order), key=lambda cost: order[cost.setting])
    )
    sentence = cost_sentence(metric, target, costs, place, higher=higher) if len(order) > 1 else ""
    lines = doubts_on(found, by_seed(rows), cells, higher=higher, time=time)
    tied = bool(found.pairs) and all(pair.is_tie for pair in found.pairs)
    return replace(
        found,
        sentences=(*found.sentences, *([sentence] if sentence else [])),
        doubts=(
            *_against_its_name(metric, higher=higher),
            *(() if tied else _on_tuning(judged, tuning)),
            *lines,
            *_on_rows(found, judged),
            *_against_loss(found, judged, time),
        ),
        target=target,
        costs=costs,
        files=files,
    )


def _against_its_name(metric: str, *, higher: bool) -> list[str]:
    """Say that a metric is compared the other way round than its name says."""
    if higher_is_better(metric) in (None, higher):
        return []
    asked, usual = ("higher", "lower") if higher else ("lower", "higher")
    return [f"a {asked} {metric} counts as better, as was asked for; by its name a {usual} one is"]


def _on_rows(verdict: Verdict, judged: Sequence[Cell]) -> list[str]:
    """Say, where settings are told apart, that all seeds have the same test rows, if they do."""
    if not any(pair.apart for pair in verdict.pairs):
        return []
    number = num_shared_rows([run for cell in judged for run in cell.runs])
    if not number:
        return []
    return [f"all seeds have the same {number:,} test rows: the tests don't cover which rows those are"]


def _against_loss(verdict: Verdict, judged: Sequence[Cell], time: float | None) -> list[str]:
    """Name the settings that a test tells to have a lower loss than the best one by another metric."""
    if verdict.metric == LOSS:
        return []
    by_loss = judge(
        [
            (cell.name, seed, value)
            for cell in judged
            for seed, value in zip(cell.seeds, cell.scores(LOSS, time), strict=True)
        ],
        LOSS,
        higher=False,
    )
    better = [pair for pair in by_loss.pairs if pair.other == verdict.best and pair.apart]
    if not better:
        return []
    named = ", ".join(f"{pair.better} (p = {pair.p:.2g})" for pair in better)
    number = len(by_loss.pairs)
    holm = f", by Holm over its {number} pairs" * (number > 1)
    return [f"by the test {LOSS} {verdict.best} is worse than {named}{holm}"]


def _on_tuning(judged: Sequence[Cell], tuning: Tuning) -> Sequence[str]:
    if not tuning.keys and has_untuned_methods(judged):
        return [
            "nothing was tuned: each method has one setting, which may suit one method better than another"
        ]
    return tuning.doubts


def _with_own_names(cells: Sequence[Cell]) -> list[Cell]:
    """Return cells of which those of one name, such as runs whose configs can't be read, have a number behind it."""
    number: Counter[str] = Counter()
    found = []
    for cell in cells:
        number[cell.name] += 1
        own = f"{cell.name} ({number[cell.name]})" if number[cell.name] > 1 else cell.name
        found.append(replace(cell, name=own))
    return found


def _place(cells: Sequence[Cell], time: float | None) -> str:
    """Return where runs are compared, in words."""
    runs = [run for cell in cells for run in cell.runs]
    if time is None and runs and all(run.keeps_best for run in runs):
        return "of the kept models"
    end = axes_of(cells).get("time") if time is None else time
    if end is None or any(run.reach("time") > 1.01 * end for run in runs if time is None):
        return "at the end"
    return f"at time {end:.4g}"
