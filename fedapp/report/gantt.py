"""The figure of what each client did when: a row for each of few clients, or one picture of many."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import wrap
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator, PercentFormatter
from numpy.typing import NDArray

from fedapp.report.activity import AWAY, RECEIVING, SENDING, STATES, WAITING, WORKING, Activity, read_activity
from fedapp.report.figures import INK, STEPS, add_legend_below, new_figure, save, shortened, style_axes

Array = NDArray[Any]

# docs/timeline.png is drawn from `fedapp run num-clients=10 model=logistic participation=uniform fraction-train=0.6
# round-deadline=15 num-server-rounds=20 availability=diurnal:0.7,200 time-scenario=lognormal:0.5,40,20000,5000,0.5`,
# docs/timeline-1000.png from `fedapp run num-clients=1000 model=logistic participation=uniform fraction-train=0.5
# round-deadline=10 num-server-rounds=40 availability=diurnal:0.7,400 time-scenario=lognormal:0.5,1,20000,10000,0.5
# min-samples=1 eval-every=40 client-records=never`.
FIGURE = "timeline.png"
ROWS = 60  # up to this number of clients, each has a row

COLORS = {RECEIVING: "#56B4E9", WORKING: "#0072B2", SENDING: "#44AA99", AWAY: "#8C8C8C", WAITING: "#ECECEC"}
# Colour and mark of a task's end, by its outcome.
OUTCOMES = {
    "accepted": ("#333333", "|"),
    "late": ("#E69F00", ">"),
    "lost": ("#D55E00", "X"),
    "failed": ("#CC79A7", "s"),
    "refused": ("#882255", "D"),
    "discarded": ("#999933", "v"),
    "under way": ("#332288", "4"),
}
_MEANING = {"accepted": "used", "discarded": "discarded (too old)"}

_BINS, _COARSE = 400, 80  # bins of time: where tasks are long enough to be seen in narrow ones, and elsewhere
# Of many clients: lines of the picture, and groups beside it, each with the outcomes of its tasks.
_LINES, _GROUPS = 300, 40
_WIDTH = 900  # pixels, about, of an axis
# Pixels of the median task. If it has less than the first number in the whole run, only the last part of the run is
# drawn, in which it has the second.
_NARROWEST, _USUAL = 8, 20


def draw_timeline(
    run_dir: Path, since: float | None = None, until: float | None = None, out: Path | None = None
) -> Path | None:
    """Draw what a run's clients did when, 1200 pixels wide; None if no task is on record.

    Above is the share of the clients in each state over the whole run. Below up to 60 clients have a row each, with a
    mark at the end of each task, in the last stretch of time in which tasks are wide enough to be seen; more clients
    are lines of a picture, from the fastest to the slowest, whose colours are mixed by the time in each state, with
    what became of their tasks beside it.

    Parameters
    ----------
    run_dir
        Holds ``tasks.parquet`` and, where it is known who was away, ``away.parquet``.
    since, until
        Seconds of the run's clock between which clients are drawn.
    out
        The figure's file; by default the run's ``timeline.png``.

    Raises
    ------
    ValueError
        If the run has nothing between them, or the figure's file isn't called .png.
    """
    if out is not None and out.suffix != ".png":
        raise ValueError(f"--out = {str(out)!r}: the figure is a PNG; the file's name must end in .png")
    activity = read_activity(run_dir)
    if activity is None:
        return None
    shown = _shown(activity, since, until)
    if len(activity.clients) <= ROWS:
        height = min(max(0.26 * len(activity.clients), 1.3), 7.0)
        figure = new_figure(2.9 + height, _title(activity, run_dir))
        fleet, rows = figure.subplots(2, 1, height_ratios=[1.3, height])
        _draw_rows(rows, shown)
    else:
        figure = new_figure(7.2, _title(activity, run_dir))
        grid = figure.subplots(2, 2, height_ratios=[1.3, 3.8], width_ratios=[5, 1])
        (fleet, corner), (rows, ends) = grid
        corner.set_axis_off()
        order = shown.by_speed()
        _draw_picture(rows, shown, order)
        _draw_ends(ends, shown, order)
    share = _draw_fleet(fleet, activity)
    if shown is not activity:
        for at in (shown.start, shown.end):
            fleet.axvline(at, color=INK, lw=0.9, ls=(0, (2, 2)))
    _label_time(fleet, activity, "")
    stretch = " (the time between the dotted lines above)" * (shown is not activity)
    _label_time(rows, shown, stretch)
    _legend(figure, activity, shown, share)
    return save(figure, out or run_dir / FIGURE)


def _shown(activity: Activity, since: float | None, until: float | None) -> Activity:
    """Return the activity between the given times, or the last part, with tasks wide enough to be seen."""
    if since is not None or until is not None:
        first = activity.start if since is None else since
        last = activity.end if until is None else until
        if not max(first, activity.start) < min(last, activity.end):
            raise ValueError(
                f"since = {first:g}, until = {last:g}: since must be below until, and the run is on record from "
                f"{activity.start:g} to {activity.end:g} s"
            )
        return activity.within(first, last)
    span = activity.end - activity.start
    median = float(np.median(activity.ended - activity.began))
    if len(activity.clients) > ROWS or not 0 < median * _WIDTH < _NARROWEST * span:
        return activity
    return activity.within(activity.end - median * _WIDTH / _USUAL, activity.end)


def _draw_rows(axes: Axes, activity: Activity) -> None:
    """Draw a row for each client, the first above."""
    number = len(activity.clients)
    axes.barh(range(number), activity.end - activity.start, 0.8, activity.start, color=COLORS[WAITING])
    for state in (AWAY, RECEIVING, WORKING, SENDING):
        place, began, ended = activity.spans(state)
        there = ended > began
        bars = PolyCollection(list(_boxes(place[there], began[there], ended[there])), fc=COLORS[state], lw=0)
        if state == AWAY:
            bars.set(hatch="////", ec="white")
        axes.add_collection(bars)
    for outcome, (color, mark) in OUTCOMES.items():
        own = (
            (activity.outcome == outcome)
            & (activity.ended <= activity.end)
            & (activity.ended >= activity.start)
        )
        if not own.any():  # a line of nothing would take room in the figure's corner
            continue
        size = {"accepted": min(300 / number, 10), "under way": 6}.get(outcome, 5)
        edge = {"mec": "white", "mew": 0.4} if mark not in "|4" else {"mew": 1}
        axes.plot(
            activity.ended[own],
            activity.place[own],
            mark,
            color=color,
            ms=size,
            clip_on=False,
            zorder=3,
            **edge,
        )
    style_axes(axes)
    axes.grid(False)
    axes.set(ylabel="client", ylim=(number - 0.4, -0.6))
    step = -(-number // 30)
    named = [activity.names.get(index, str(index)) for index in activity.clients[::step].tolist()]
    axes.set_yticks(range(0, number, step), [shortened(name) for name in named])


def _boxes(place: Array, began: Array, ended: Array) -> Array:
    """Return the corners (n, 4, 2) of bars."""
    low, high = place - 0.4, place + 0.4
    corners = [(began, low), (began, high), (ended, high), (ended, low)]
    return np.stack([np.stack(corner, axis=1) for corner in corners], axis=1)


def _draw_picture(axes: Axes, activity: Activity, order: Array) -> None:
    """Draw many clients as lines, the fastest above, in colours that are mixed by the time in each state."""
    number = len(order)
    line = np.empty(number, np.int64)
    line[order] = np.arange(number) * min(number, _LINES) // number
    edges = _edges(activity)
    shares = activity.shares(line, edges)
    mixed = sum(shares[state][..., None] * np.array(to_rgb(COLORS[state])) for state in STATES)
    axes.pcolorfast(edges, np.linspace(0, number, line.max() + 2), np.clip(mixed, 0, 1))
    axes.set_ylim(number, 0)
    style_axes(axes)
    axes.grid(False)
    axes.set_ylabel("clients, by mean task time, the fastest above")


def _draw_ends(axes: Axes, activity: Activity, order: Array) -> None:
    """Draw the outcomes of the tasks of each group of clients, beside the lines of these clients."""
    number = len(order)
    groups = min(number, _GROUPS)
    group = np.empty(number, np.int64)
    group[order] = np.arange(number) * groups // number
    edges = np.searchsorted(np.arange(number) * groups // number, np.arange(groups + 1))
    counts = {
        outcome: np.bincount(group[activity.place[activity.outcome == outcome]], minlength=groups)
        for outcome in OUTCOMES
    }
    total = np.maximum(sum(counts.values()), 1)
    left = np.zeros(groups)
    for outcome, count in counts.items():
        if count.any():
            color = "#B8D4E6" if outcome == "accepted" else OUTCOMES[outcome][0]
            axes.barh(edges[:-1], count / total, np.diff(edges), left, align="edge", color=color)
            left = left + count / total
    style_axes(axes)
    axes.grid(False)
    axes.set(xlim=(0, 1), ylim=(number, 0), xlabel="their tasks")
    axes.xaxis.set_major_formatter(PercentFormatter(1, 0))
    axes.set_xticks([0, 0.5, 1])
    axes.set_yticklabels([])


def _draw_fleet(axes: Axes, activity: Activity) -> dict[str, Array]:
    """Draw the share of the clients in each state over time, and return it."""
    edges = _edges(activity)
    shares = activity.shares(np.zeros(len(activity.clients), np.int64), edges)
    below = np.zeros(len(edges) - 1)
    for state in (WORKING, RECEIVING, SENDING, WAITING, AWAY):
        above = below + shares[state][0]
        low, high = (np.append(each, each[-1]) for each in (below, above))
        axes.fill_between(edges, low, high, step="post", color=COLORS[state], lw=0)  # stairs are slow
        below = above
    style_axes(axes)
    axes.grid(False)
    axes.set(ylabel="clients", ylim=(0, 1))
    axes.yaxis.set_major_formatter(PercentFormatter(1, 0))
    return shares


def _edges(activity: Activity) -> Array:
    """Return the edges of bins of time: narrow where tasks are long enough to be seen in them, else wide."""
    median = np.median(activity.ended - activity.began) if len(activity.place) else 0.0
    fine = median * _BINS >= 2 * (activity.end - activity.start)
    return activity.bins(_BINS if fine else _COARSE)


def _label_time(axes: Axes, activity: Activity, more: str) -> None:
    span = activity.end - activity.start
    unit, seconds = (
        ("s", 1.0) if span < 10_000 else ("h", 3600.0) if span < 400 * 3600 else ("days", 86_400.0)
    )
    axes.set_xlim(activity.start, activity.end if span > 0 else activity.start + 1)
    axes.set_xlabel(f"{'time' if activity.wall else 'virtual time'}, {unit}{more}", fontsize=9)
    low, high = activity.start / seconds, activity.end / seconds
    axes.set_xticks(
        [at * seconds for at in MaxNLocator(8, steps=STEPS).tick_values(low, high) if low <= at <= high]
    )
    axes.xaxis.set_major_formatter(FuncFormatter(lambda at, _: f"{at / seconds:g}"))


def _title(activity: Activity, run_dir: Path) -> str:
    config = activity.config
    told = [str(config.get("strategy", run_dir.name)), f"{len(activity.clients):,} clients"]
    usual = {
        "availability": "always",
        "round-deadline": 0.0,
        "over-select": 0.0,
        "concurrency": 0,
        "task-failure": 0.0,
    }
    keys = [key for key in ("time-scenario", *usual) if key in config and config[key] != usual.get(key)]
    told += [f"{key} {config[key]}" for key in keys if not activity.wall or key == "round-deadline"]
    text = ", ".join(each.replace(" ", "\N{NO-BREAK SPACE}") for each in told)
    lines = wrap(text, 85, break_on_hyphens=False)
    if activity.start > 0 and not activity.wall:
        lines.append(
            f"from {activity.start:,.6g} s on: the last tasks, and times away, of a run are on record"
        )
    return "\n".join(lines)


def _legend(figure: Figure, activity: Activity, shown: Activity, share: Mapping[str, Array]) -> None:
    """Draw the legend: the colours and marks that the figure has, and the share of each state in all time."""
    names = {
        RECEIVING: "receiving the model",
        WORKING: "working",
        SENDING: "sending the update",
        AWAY: "away",
        WAITING: "waiting",
    }
    if activity.wall:
        names |= {WORKING: "at the client: handed out, not yet returned", WAITING: "without a task"}
    elif not activity.has_timing:
        names[WORKING] = "at work (its task as a whole)"
    if not activity.wall and not activity.absences:
        names[WAITING] = "waiting, or away (isn't on record)"
    there: Mapping[str, bool] = {
        RECEIVING: activity.has_timing,
        SENDING: activity.has_timing,
        AWAY: bool(len(activity.away[0])),
    }
    handles: list[Any] = []
    for state in (state for state in STATES if there.get(state, True)):
        handles.append(Patch(fc=COLORS[state], label=f"{names[state]}: {share[state].mean():.1%}", lw=0))
        if state == AWAY and len(activity.clients) <= ROWS:
            handles[-1].set(hatch="////", ec="white")
    outcomes: Sequence[str] = [outcome for outcome in OUTCOMES if (shown.outcome == outcome).any()]
    for outcome in outcomes:
        color, mark = OUTCOMES[outcome]
        label = f"ends: {_MEANING.get(outcome, outcome)}"
        if len(activity.clients) > ROWS:
            color = "#B8D4E6" if outcome == "accepted" else color
            handles.append(Patch(fc=color, label=label.replace("ends", "tasks")))
        else:
            handles.append(Line2D([], [], color=color, marker=mark, ls="", ms=6, label=label))
    title = "what a client does, with its share of all clients' time, and how tasks end"
    add_legend_below(figure, handles, title)
