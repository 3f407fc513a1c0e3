"""When clients worked, waited and were away: a bar for every task, or shares of time for many clients."""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedapp.report.activity import AWAY, RECEIVING, SENDING, STATES, WAITING, WORKING, Activity, read_activity
from fedapp.report.client_tables import MOST_TASKS

# Up to this number of clients, each has a line; more are grouped, from the fastest to the slowest.
LINES, GROUPS = 60, 100
BINS = 60  # bins of time in the chart of all clients, which shows rounds and not what happens within a round
BARS, FEWEST_BARS = 4000, 200

Array = NDArray[Any]


def timeline(path: Path, bars: int, side: int, left_out: list[str]) -> dict[str, Any]:
    """Return what a run's clients did by the run's clock and by the machine's; {} if no task is on record.

    Parameters
    ----------
    bars, side
        Most tasks that are drawn of few clients, and most lines and columns of the picture of many.
    """
    activity = read_activity(path)
    if activity is None:
        return {}
    if activity.first:
        left_out.append(f"the first {activity.first:,} tasks: a run has its last {MOST_TASKS:,} on record")
    by_clock = {"time": activity, "wall-seconds": read_activity(path, wall=True) or activity}
    found = {
        "parts": activity.has_timing,
        "absences": activity.absences,
        "fleet": {clock: _fleet(each, side) for clock, each in by_clock.items()},
    }
    if len(activity.clients) > LINES:
        return {**found, "shares": _shares(by_clock, side)}
    kept = slice(-bars, None)
    if (number := len(activity.place)) > bars:
        left_out.append(f"{number - bars:,} of {number:,} tasks: the last are drawn")
    return {**found, "clients": activity.clients.tolist(), **_bars(by_clock, kept)}


def _bars(by_clock: dict[str, Activity], kept: slice) -> dict[str, Any]:
    """Return the last tasks of few clients by outcome, and when the clients were away."""
    activity, wall = by_clock["time"], by_clock["wall-seconds"]
    client = activity.clients[activity.place[kept]]
    times = {
        "began": activity.began,
        "ended": activity.ended,
        "wall-began": wall.began,
        "wall-ended": wall.ended,
    }
    if activity.has_timing:
        times |= {RECEIVING: activity.receiving, SENDING: activity.sending}
    spans, outcomes = {}, activity.outcome[kept]
    for outcome in np.unique(outcomes).tolist():
        own = outcomes == outcome
        columns = {name: _short(values[kept][own]) for name, values in times.items()}
        spans[outcome] = {"client": client[own].tolist(), **columns}
    place, began, ended = activity.spans(AWAY)
    first = activity.began[kept].min(initial=np.inf)
    there = ended > first  # as far back as tasks are drawn
    away = {
        "client": activity.clients[place[there]].tolist(),
        "began": _short(np.maximum(began[there], first if len(activity.place) > len(client) else -np.inf)),
        "ended": _short(ended[there]),
    }
    return {"spans": spans, "away": away}


def _fleet(activity: Activity, side: int) -> dict[str, Any]:
    """Return the share of all clients in each state in bins of time, and their edges; {} if there is no time."""
    if not activity.end > activity.start:
        return {}
    edges = activity.bins(min(side, BINS))
    shares = activity.shares(np.zeros(len(activity.clients), np.int64), edges)
    return {
        "edges": _short(edges),
        **{s: _short(shares[s][0], 3) for s in _told(activity)},
    }


def _shares(by_clock: dict[str, Activity], side: int) -> dict[str, Any]:
    """Return the shares of time (lines, columns) of clients that are about equally fast in each state, by clock."""
    activity = by_clock["time"]
    number, mean = len(activity.clients), activity.mean_task()
    lines = min(number, side, GROUPS)
    line_of = np.empty(number, np.int64)
    line_of[activity.by_speed()] = np.arange(number) * lines // number
    sizes, had = np.bincount(line_of), np.isfinite(mean)
    total = np.bincount(line_of, weights=np.where(had, mean, 0), minlength=lines)
    known = np.bincount(line_of, weights=had, minlength=lines)
    shares: dict[str, Any] = {
        "clients": sizes.tolist(),
        "mean": [
            float(f"{t / n:.6g}") if n else None for t, n in zip(total.tolist(), known.tolist(), strict=True)
        ],
    }
    for clock, each in by_clock.items():
        if not each.end > each.start:
            continue
        edges = each.bins(side)
        found = each.shares(line_of, edges)
        told = {state: [_short(row, 2) for row in found[state]] for state in _told(each) if state != WAITING}
        shares[clock] = {"edges": _short(edges), **told}
    return shares


def _told(activity: Activity) -> list[str]:
    """Return the states that are on record."""
    seen = {RECEIVING: activity.has_timing, SENDING: activity.has_timing, AWAY: bool(len(activity.away[0]))}
    return [state for state in STATES if seen.get(state, state in (WORKING, WAITING))]


def _short(values: Array, digits: int = 6) -> list[float]:
    return [float(f"{value:.{digits}g}") for value in values.tolist()]
