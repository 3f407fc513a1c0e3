"""What may spoil a verdict: one line for each doubt that holds."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from fedapp.report.cells import LOST, Cell
from fedapp.report.differences import differing, values_of
from fedapp.report.files import RUNNING
from fedapp.report.recorded import RecordedRun
from fedapp.report.series import Array
from fedapp.report.verdict.judging import Results
from fedapp.report.verdict.paired import deviation_interval
from fedapp.report.verdict.verdict import Verdict

ENOUGH_SEEDS = 5
_EARLY = 0.3  # share of the run at its end in which the evaluation before that must be
_LAST, _RISING = 0.2, 0.05  # share of the run at its end, and of the whole gain that still comes there

_OF_METHOD, _SEED = "strategy", "seed"


def doubts_on(
    verdict: Verdict, results: Results, cells: Sequence[Cell], *, higher: bool, time: float | None
) -> list[str]:
    """Return a line for each thing that may spoil a verdict.

    Parameters
    ----------
    results : mapping
        The judged values by setting and seed.
    cells : sequence of Cell
        All settings, those that aren't judged, too.
    time : float, optional
        The time at which runs are compared; None for the end of each run.
    """
    judged = [cell for cell in cells if cell.name in verdict.means]
    found = [
        *_lost(cells),
        *_missing(cells),
        *_without_value(verdict.metric, cells, time),
        *_unstable(judged),
        *_running(judged),
        *_at_edge(verdict, judged),
        *_unequal_tries(judged),
        *_deciding_seed(verdict, results, higher=higher),
        *_still_moving(verdict, judged, higher=higher, time=time),
        *_seeds(results),
    ]
    return [line for line in found if line]


def is_lost(cell: Cell) -> bool:
    """Return True if a run of a setting diverged or failed: the mean of the others would flatter the setting."""
    return not LOST.isdisjoint(cell.lacking)


def _lost(cells: Sequence[Cell]) -> Iterator[str]:
    for cell in filter(is_lost, cells):
        counts = Counter(status for status in cell.lacking if status in LOST)
        ends = " and ".join(f"{number} {status}" for status, number in counts.items())
        yield f"{cell.name} isn't judged: of {len(cell.runs) + len(cell.lacking)} runs {ends}"


def _missing(cells: Sequence[Cell]) -> Iterator[str]:
    number = sum(status not in LOST for cell in cells for status in cell.lacking)
    every = sum(len(cell.runs) + len(cell.lacking) for cell in cells)
    if number:
        yield f"{number} of {every} runs aren't there: the verdict is on the others"


def _without_value(metric: str, cells: Sequence[Cell], time: float | None) -> Iterator[str]:
    """Name settings with seeds whose runs finished and have no finite value, as if they had diverged."""
    for cell in cells:
        scores = cell.scores(metric, time) if not is_lost(cell) else []
        if number := sum(not math.isfinite(score) for score in scores):
            yield f"{number} of {len(scores)} seeds of {cell.name} finished without a finite {metric}"


def _unstable(judged: Sequence[Cell]) -> Iterator[str]:
    swinging = {cell.name: sum("unstable" in run.summary for run in cell.runs) for cell in judged}
    if told := [f"{name} ({number} of its runs)" for name, number in swinging.items() if number]:
        yield f"unstable runs: {', '.join(told)}"


def _running(judged: Sequence[Cell]) -> Iterator[str]:
    if number := sum(run.status == RUNNING for cell in judged for run in cell.runs):
        yield f"{number} run{'s' * (number > 1)} of these go on: runs are compared as far as all have come"


def _at_edge(verdict: Verdict, judged: Sequence[Cell]) -> Iterator[str]:
    """Name numbers of the best setting that are the lowest or the highest of three or more that were compared."""
    configs = {cell.name: cell.runs[0].config for cell in judged}
    best = configs.get(verdict.best, {})
    keys = [key for key in differing(list(configs.values())) if key != _SEED]
    for key in keys:
        others = [each for each in keys if each != key]
        alike = [each for each in configs.values() if values_of(each, others) == values_of(best, others)]
        values = {float(value) for each in alike if _is_number(value := each.get(key, ""))}
        if len(values) > 2 and best.get(key) in (min(values), max(values)):
            yield (
                f"{key} = {best[key]:g} of {verdict.best} is at the end of the {len(values)} values that were tried"
            )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def has_untuned_methods(cells: Sequence[Cell]) -> bool:
    """Return True if several methods are compared, each at one setting."""
    tries = _tries([cell for cell in cells if cell.runs])
    return len(tries) > 1 and set(tries.values()) == {1}


def _unequal_tries(judged: Sequence[Cell]) -> Iterator[str]:
    """Say how many settings of each method were compared if the numbers differ: the best of more is better."""
    yield unequal_tries(_tries(judged))


def _tries(judged: Sequence[Cell]) -> dict[str, int]:
    """Return how many settings of each method are compared."""
    of_methods: dict[str, list[RecordedRun]] = {}
    for cell in judged:
        of_methods.setdefault(str(cell.runs[0].config.get(_OF_METHOD, "")), []).append(cell.runs[0])
    keys = differing([cell.runs[0].config for cell in judged])
    tries: dict[str, int] = {}
    for method, runs in of_methods.items():
        # A key at its default isn't among a run's unread keys, so that of another run tells.
        unread = {key for run in runs for key in run.summary.get("unread-keys", ())}
        read = [key for key in keys if key not in (_OF_METHOD, _SEED, *unread)]
        tries[method] = len({values_of(run.config, read) for run in runs})
    return tries


def unequal_tries(tries: Mapping[str, int]) -> str:
    """Return a line on numbers of tries by method if they differ; "" if they don't."""
    if len(set(tries.values())) < 2:
        return ""
    counts = ", ".join(f"{method} {number}" for method, number in tries.items())
    return f"methods had unequal numbers of tries: {counts}"


def _deciding_seed(verdict: Verdict, results: Results, *, higher: bool) -> Iterator[str]:
    """Name a seed without which another setting would have the best mean."""
    seeds = list(dict.fromkeys(seed for values in results.values() for seed in values))
    sign = 1.0 if higher else -1.0
    for left_out in seeds if len(seeds) > 1 else ():
        means = {
            setting: sign * float(np.mean(rest))
            for setting, values in results.items()
            if (rest := [value for seed, value in values.items() if seed != left_out])
        }
        best = max(means.values())
        if means.get(verdict.best, -math.inf) < best:
            other = next(setting for setting, mean in means.items() if mean == best)
            yield f"seed {left_out} alone decides: without it {other} has a better mean than {verdict.best}"


def _still_moving(
    verdict: Verdict, judged: Sequence[Cell], *, higher: bool, time: float | None
) -> Iterator[str]:
    """Name settings that still gain on every seed in the last fifth of the run.

    That is a twentieth or more of all their gain, or as much as a difference by which the best is apart from another.
    A tie has no order.
    """
    if verdict.pairs and all(pair.is_tie for pair in verdict.pairs):
        return
    metric, sign = verdict.metric, 1.0 if higher else -1.0
    apart = [pair.difference for pair in verdict.pairs if pair.apart and pair.better == verdict.best]
    closest = min(apart, default=math.inf)
    moving = []
    for cell in judged:
        gains = [sign * each for run in cell.runs if (each := _gains(run, metric, time)) is not None]
        if not gains:
            continue
        last, whole = np.transpose(gains)
        if (last > 0).all() and 0 < min(_RISING * whole.mean(), closest) <= last.mean():
            moving.append(f"{cell.name} by {sign * last.mean():+.2g}")
    if moving:
        word = "rising" if higher else "falling"
        yield (
            f"{metric} is still {word}, in the last fifth of {', '.join(moving)}: a longer run may have another order"
        )


def _gains(run: RecordedRun, metric: str, time: float | None) -> Array | None:
    """Return a run's gain of a metric in its last fifth, and its whole gain, (2,); None if one isn't known."""
    axis = "time" if math.isfinite(run.reach("time")) and run.reach("time") > 0 else "aggregation"
    end = time if time is not None else run.reach(axis)
    before = run.along(axis)[run.along(axis) <= (1 - _LAST) * end]
    if not before.size or before[-1] < (1 - _EARLY) * end:  # what came since is more than a fifth's
        return None
    begin, late, last = (run.at(axis, share * end, metric) for share in (0.0, 1 - _LAST, 1.0))
    gains = np.array([last - late, last - begin])
    return gains if np.isfinite(gains).all() else None


def _seeds(results: Results) -> Iterator[str]:
    """Say that there are few seeds, and which settings lack some that others have."""
    every = list(dict.fromkeys(seed for values in results.values() for seed in values))
    for setting, values in results.items():
        if lacking := [str(seed) for seed in every if seed not in values]:
            yield f"{setting} lacks seed {', '.join(lacking)}, and is compared on the others"
    if len(every) == 1:
        yield "1 seed: nothing is known of the deviation over seeds"
    elif len(every) < ENOUGH_SEEDS:
        low, high = deviation_interval(1.0, len(every))
        yield (
            f"{len(every)} seeds: a true deviation is {low:.2g} to {high:.2g} times the one seen (95 % interval), "
            "and nothing shows whether differences are normal"
        )
