"""What settings take to reach a common target: time, bytes, and memory on the server."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from rich.filesize import decimal

from fedapp.report.cells import Cell
from fedapp.report.recorded import RecordedRun, rounded_up
from fedapp.report.series import Array
from fedapp.report.verdict.verdict import Cost

SERVER = "bytes-server"
_DIGITS = 3  # significant digits of the target
_MOST = 6  # settings that the sentence names


@dataclass(frozen=True)
class Curve:
    """The metric of a run's evaluations up to where runs are compared, and the costs so far, each (evaluations,).

    Metrics have the sign with which a higher value is better.
    """

    metric: Array
    time: Array
    bytes: Array
    server: Array

    @classmethod
    def of(cls, run: RecordedRun, metric: str, sign: float, time: float | None) -> "Curve":
        """Return the curve of a run up to a time, or to its end."""
        times = run.along("time")
        within = np.ones(len(times), bool) if time is None else ~(times > rounded_up(time))
        server = np.fmax.accumulate(run.column(SERVER)) if run.evaluations else run.column(SERVER)
        each = (sign * run.column(metric), times, run.along("bytes") * 1e6, server)
        return cls(*(values[within] for values in each))

    @property
    def end(self) -> float:
        """The last value; −∞ if there is none."""
        return float(self.metric[-1]) if len(self.metric) and np.isfinite(self.metric[-1]) else -math.inf

    def cost(self, target: float) -> tuple[float, float, float] | None:
        """Return time, bytes and server memory at the evaluation from which the target is kept; None if it isn't."""
        below = np.flatnonzero(~(self.metric >= target))
        at = int(below[-1]) + 1 if below.size else 0
        if at == len(self.metric):
            return None
        return float(self.time[at]), float(self.bytes[at]), float(self.server[at])


def costs_of(
    judged: Sequence[Cell], metric: str, *, higher: bool, time: float | None
) -> tuple[float, tuple[Cost, ...]]:
    """Return a target, and what each setting takes to reach it and keep it.

    The target is the value that more than half of the settings have at the end on every seed, to three digits: a peak
    of a noisy curve is no target. There are no costs if an initial model has it.
    """
    sign = 1.0 if higher else -1.0
    curves = {cell.name: [Curve.of(run, metric, sign, time) for run in cell.runs] for cell in judged}
    reached = sorted((min(curve.end for curve in each) for each in curves.values()), reverse=True)
    if not reached or not math.isfinite(value := reached[len(reached) // 2]):
        return math.nan, ()
    target = _rounded_down(value)
    if any((curve.metric[:1] >= target).any() for each in curves.values() for curve in each):
        return math.nan, ()
    return sign * target, tuple(_cost(name, each, target) for name, each in curves.items())


def _rounded_down(value: float) -> float:
    """Return a number of three digits that isn't above a value."""
    if value == 0:
        return 0.0
    decimals = _DIGITS - 1 - math.floor(math.log10(abs(value)))
    nearest = round(value, decimals)
    return nearest if nearest <= value else round(nearest - 10.0**-decimals, decimals)


def _cost(setting: str, curves: Sequence[Curve], target: float) -> Cost:
    found = [cost for curve in curves if (cost := curve.cost(target)) is not None]
    time, sent, server = np.mean(found, axis=0).tolist() if found else [math.nan] * 3
    times = [each for each, *_ in found] or [math.nan]
    evaluations = float(np.mean([len(curve.metric) for curve in curves]))
    return Cost(setting, time, sent, server, len(found), len(curves), min(times), max(times), evaluations)


def cost_sentence(metric: str, target: float, costs: Sequence[Cost], place: str, *, higher: bool) -> str:
    """Return what the settings that keep the target on every seed take, the first by name, and name the others.

    ``place`` is where runs are compared, as in ``at time 10``. Nothing is said where all settings take the same.
    """
    there = [cost for cost in costs if cost.reached == cost.seeds]
    if not there or len({replace(cost, setting="") for cost in costs}) == 1 < len(costs):
        return ""
    shown = there[:_MOST]
    more = f"; {len(there) - len(shown)} more keep it" * (len(there) > len(shown))
    some = "".join(
        f"; {cost.setting} keeps it on {cost.reached} of {cost.seeds} seeds"
        for cost in costs
        if 0 < cost.reached < cost.seeds
    )
    never = [cost.setting for cost in costs if not cost.reached]
    rest = f"; {', '.join(never[:_MOST])} do{'es' * (len(never) == 1)}n't" if never else ""
    rest += " on any seed" * bool(never and costs[0].seeds > 1)
    relation = "≥" if higher else "≤"
    words = "; ".join(map(_words, shown))
    until = place.removeprefix("at ") if place.startswith("at ") else "the end"
    means = f"; means over {there[0].seeds} seeds, in brackets the range of the time" * (there[0].seeds > 1)
    often = [cost.evaluations for cost in costs]
    unlike = (
        " Settings that are evaluated more often have more chances to fall off it "
        f"({min(often):.0f} to {max(often):.0f} evaluations)."
    ) * (max(often) >= 2 * min(often))
    return (
        f"To reach {metric} {relation} {target:.{_DIGITS}g} and keep it until {until} (what more than half of the "
        f"settings have then on every seed{means}; untested): {words}{more}{some}{rest}.{unlike}"
    )


def _words(cost: Cost) -> str:
    parts = [
        *([f"time {time_text(cost.time)}{_range_of(cost)}"] if math.isfinite(cost.time) else []),
        *([f"{bytes_text(cost.bytes)} sent"] if math.isfinite(cost.bytes) else []),
        *([f"{bytes_text(cost.server_bytes)} on the server"] if math.isfinite(cost.server_bytes) else []),
    ]
    return f"{cost.setting} takes {', '.join(parts)}"


def time_text(seconds: float) -> str:
    """Write a time; - for NaN."""
    return f"{seconds:.3g}" if math.isfinite(seconds) else "-"


def bytes_text(number: float) -> str:
    """Write a number of bytes; - for NaN."""
    return decimal(round(number)) if math.isfinite(number) else "-"


def _range_of(cost: Cost) -> str:
    low, high = map(time_text, (cost.earliest, cost.latest))
    return "" if low == high else f" ({low} to {high})"
