"""What each client did when: receiving the model, working, sending the update, waiting, or away."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedapp.report import as_number, read_config, read_metrics
from fedapp.report.client_tables import Away, names_of_clients, read_away, read_tasks

RECEIVING, WORKING, SENDING, AWAY, WAITING = "receiving", "working", "sending", "away", "waiting"
STATES = (RECEIVING, WORKING, SENDING, AWAY, WAITING)
LATE = "late"

Array = NDArray[Any]
Spans = tuple[Array, Array, Array]  # places of clients, when it began, when it ended


@dataclass(frozen=True)
class Activity:
    """The states of a run's clients from ``start`` to ``end``, seconds of the run's clock or the machine's.

    Attributes
    ----------
    clients : array (C,) of int
        The clients' indices, ascending; a place below is a position in this array.
    place, began, ended, receiving, sending, outcome : array (T,)
        Each task's client, begin and end, the seconds in which the model and the reply are sent, and the outcome. If
        ``parts`` is false, all of a task is work.
    away : (array, array, array)
        Places of clients, and when they were away; a task at the same time takes precedence over being away.
    wall : bool
        Whether times are the machine's: a task then lasts from its dispatch to its reply.
    parts, absences : bool
        Whether the times that messages take, and when clients are away, are on record.
    first : int
        Number of tasks before the first that is on record.
    config : dict
        The run's config.
    names : dict of int to str
        Names of clients, by index.
    """

    clients: Array
    place: Array
    began: Array
    ended: Array
    receiving: Array
    sending: Array
    outcome: Array
    away: Spans
    start: float
    end: float
    wall: bool
    has_timing: bool
    absences: bool
    first: int
    config: dict[str, Any]
    names: dict[int, str] = field(default_factory=dict)

    def mean_task(self) -> Array:
        """Return each client's mean task time (C,), infinite for one without a task."""
        number = np.bincount(self.place, minlength=len(self.clients))
        total = np.bincount(self.place, weights=self.ended - self.began, minlength=len(self.clients))
        return np.where(number > 0, total / np.maximum(number, 1), np.inf)

    def by_speed(self) -> Array:
        """Return the places of the clients (C,), the fastest first, clients without a task last."""
        return np.lexsort((self.clients, self.mean_task()))

    def spans(self, state: str) -> Spans:
        """Return when clients were in a state other than waiting, which is the rest of the time."""
        worked = np.maximum(self.began + self.receiving, self.ended - self.sending)
        begins = {RECEIVING: self.began, WORKING: self.began + self.receiving, SENDING: worked}
        ends = {RECEIVING: self.began + self.receiving, WORKING: worked, SENDING: self.ended}
        if state == AWAY:
            return _outside(self.away, (self.place, self.began, np.minimum(self.ended, self.end)))
        return self.place, np.minimum(begins[state], self.end), np.minimum(ends[state], self.end)

    def within(self, since: float, until: float) -> "Activity":
        """Return the activity between two times."""
        shown = (self.ended > since) & (self.began < until)
        columns = ("place", "began", "ended", "receiving", "sending", "outcome")
        parts: dict[str, Any] = {name: getattr(self, name)[shown] for name in columns}
        place, began, ended = self.away
        there = (ended > since) & (began < until)
        away = place[there], np.maximum(began[there], since), np.minimum(ended[there], until)
        return replace(self, **parts, away=away, start=max(since, self.start), end=min(until, self.end))

    def bins(self, most: int) -> Array:
        """Return the edges of up to ``most`` bins of time, (bins + 1,).

        Where several clients begin at one time, as in rounds, a bin is a whole number of rounds, or a round is a
        whole number of bins. Bins cut regardless of the rounds would show how the two fall on each other.
        """
        end = self.end if self.end > self.start else self.start + 1.0
        least = 1e-9 * (end - self.start)  # below, two times are one but for rounding
        begins = np.unique(self.began[(self.began > self.start + least) & (self.began < end - least)])
        begins = begins[np.diff(begins, prepend=self.start) > least]
        if 2 * len(begins) > len(self.place):
            return np.linspace(self.start, end, most + 1)
        rounds = np.array([self.start, *begins])
        kept = np.append(rounds[:: -(-len(rounds) // most)], end)
        parts = max(1, most // (len(kept) - 1))
        places = np.arange(parts * (len(kept) - 1) + 1) / parts
        return np.asarray(np.interp(places, np.arange(len(kept)), kept))

    def shares(self, line: Array, edges: Array) -> dict[str, Array]:
        """Return the share of time (lines, bins) that the clients of a line are in each state.

        Parameters
        ----------
        line
            The line of each client (C,), counted from 0.
        edges
            Edges of the bins of time (bins + 1,).
        """
        sizes = np.bincount(line)
        found = {}
        for state in STATES[:-1]:
            place, began, ended = self.spans(state)
            busy = _since(began, line[place], edges, len(sizes)) - _since(
                ended, line[place], edges, len(sizes)
            )
            found[state] = np.clip(np.diff(busy, axis=1) / np.diff(edges) / sizes[:, None], 0, 1)
        found[WAITING] = np.clip(1 - sum(found.values()), 0, 1)
        return found


def read_activity(run_dir: Path, *, wall: bool = False) -> Activity | None:
    """Return what a run's clients did by its clock, or by the machine's (``wall``); None if no task is on record."""
    table = read_tasks(run_dir)
    if not len(table):
        return None
    columns = {name: np.asarray(table[name].to_numpy()) for name in table.column_names}
    columns["outcome"] = columns["outcome"].astype(str)
    config, last = read_config(run_dir), _last(run_dir)
    began, ended = (columns[f"wall-{name}" if wall else name] for name in ("began", "ended"))
    real = last.get("clock", config.get("clock")) == "wall"
    away = None if real else read_away(run_dir)
    number = str(config.get("tiers", "")).partition(":")[2] or config.get("num-clients", 0)  # of regions
    clients = _clients(columns["client"], 0 if real else int(number), away)
    wall, away = wall or real, None if wall else away
    parts = not wall and bool(np.isfinite(columns[RECEIVING]).any())
    if not parts:
        columns |= {RECEIVING: np.zeros(len(table)), SENDING: np.zeros(len(table))}
    first = int(columns["number"][0])
    is_late = columns["outcome"] == LATE
    in_time = ended if is_late.all() else ended[~is_late]
    usual = float(began.min()) if wall else 0.0
    start = float(in_time[0]) if first else usual  # from when on all tasks are on record
    end = float(in_time.max())  # late work, for which no aggregation waited, doesn't extend it
    if not wall:
        end = max(end, as_number(last.get("time", 0.0)))
    if away is not None:
        start, end = max(start, away.since), min(end, away.until)
    nothing = np.zeros(0)
    absent = (nothing.astype(np.int32), nothing, nothing) if away is None else away[:3]
    return Activity(
        clients=clients,
        place=np.searchsorted(clients, columns["client"]).astype(np.int64),
        began=began,
        ended=ended,
        receiving=np.nan_to_num(columns[RECEIVING]),
        sending=np.nan_to_num(columns[SENDING]),
        outcome=columns["outcome"],
        away=(np.searchsorted(clients, absent[0]).astype(np.int64), absent[1], absent[2]),
        start=min(start, end),
        end=end,
        wall=wall,
        has_timing=parts,
        absences=not wall and (away is not None or config.get("availability", "always") == "always"),
        first=first,
        config=config,
        names=names_of_clients(run_dir),
    )


def _clients(of_tasks: Array, number: int, away: Away | None) -> Array:
    """Return the indices of clients, ascending: the first ``number``, those of tasks, and those that were away."""
    absent = np.zeros(0, np.int32) if away is None else away.client
    return np.unique(np.concatenate([np.arange(number), of_tasks, absent])).astype(np.int64)


def _outside(spans: Spans, others: Spans) -> Spans:
    """Return the parts of spans in which the client is in none of the others."""
    place = np.concatenate([spans[0], spans[0], others[0], others[0]])
    time = np.concatenate([*spans[1:], *others[1:]])
    own, taken = (np.repeat([1, -1], len(each[0])) for each in (spans, others))
    order = np.lexsort((time, place))
    inside = np.concatenate([own, 0 * taken])[order].cumsum()
    busy = np.concatenate([0 * own, taken])[order].cumsum()
    place, time = place[order], time[order]
    kept = (inside[:-1] > 0) & (busy[:-1] <= 0) & (place[1:] == place[:-1]) & (time[1:] > time[:-1])
    return place[:-1][kept], time[:-1][kept], time[1:][kept]


def _since(times: Array, line: Array, edges: Array, lines: int) -> Array:
    """Return Σ max(0, edge − time) over each line's times, (lines, edges)."""
    width = len(edges) + 1
    place = line * width + np.searchsorted(edges, times, side="left")
    number = np.bincount(place, minlength=lines * width).reshape(lines, width).cumsum(axis=1)
    total = np.bincount(place, weights=times, minlength=lines * width).reshape(lines, width).cumsum(axis=1)
    return np.asarray(edges * number[:, :-1] - total[:, :-1])


def _last(run_dir: Path) -> dict[str, Any]:
    try:
        return read_metrics(run_dir)[-1]
    except (OSError, ValueError, IndexError):
        return {}
