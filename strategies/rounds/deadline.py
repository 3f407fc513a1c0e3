"""When a round closes, and whose work is late: first replies, a deadline, and what of earlier rounds arrives by then.

A round that needs L clients asks ⌈(1 + o) L⌉ of them (``over_select`` = o) and closes with the L-th valid reply, or
``round_deadline`` seconds after it began, whichever is earlier; with all replies, if they are there before (K.
Bonawitz et al., "Towards federated learning at scale: system design", MLSys 2019). What comes later is late. Its
client is at work until then, and isn't drawn. Late work is dropped, or counts in the round in which it
arrives (``late`` = drop, next). A round for which nobody is free closes when the first client is, or at the deadline.

Replies within 1e-9 s of each other come in the order of the clients, and one that comes just at the deadline is in
time.
"""

import heapq
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, inf
from typing import Any, NamedTuple

import numpy as np
from flwr.app import Message, Metadata
from numpy.typing import NDArray

from strategies.clients.timeline import Parts
from strategies.clock import RESOLUTION
from strategies.flower.arrays import Vector

NEXT = "next"


class Closing(NamedTuple):
    """How a round closes: at which clock time, whose replies are in by then, as they come, and whose are late."""

    at: float
    in_time: list[int]
    late: list[int]


def closing(
    due: Mapping[int, float],
    began: float,
    *,
    deadline: float = 0.0,
    needed: float = inf,
    worth: Mapping[int, int] | None = None,
    failed: Collection[int] = (),
    busy: Collection[float] = (),
) -> Closing:
    """Return how a round closes whose replies come when they are due.

    Parameters
    ----------
    due : mapping of int to float
        Clock seconds at which each client's reply comes, by its index.
    began, deadline : float
        Clock seconds of its beginning, and seconds from then on; 0: no deadline.
    needed : float
        L, replies that close it.
    worth : mapping of int to int, optional
        For how many each counts: with replacement a client may be drawn more than once. By default 1.
    failed : collection of int
        Those whose replies aren't valid: they count for none.
    busy : collection of float
        When those are done who are still at work for earlier rounds.
    """
    limit = began + deadline if deadline else inf
    if not due:
        first = min([limit, *busy])
        return Closing(began if first == inf else max(began, first), [], [])
    in_time: list[int] = []
    got = 0
    for client, earliest in _in_order(due):
        if got >= needed or earliest > limit + RESOLUTION:
            break
        in_time.append(client)
        got += 0 if client in failed else 1 if worth is None else worth[client]
    late = sorted(due.keys() - set(in_time))
    at = max((due[client] for client in in_time), default=began) if got >= needed or not late else limit
    return Closing(min(at, limit), in_time, late)


def _in_order(due: Mapping[int, float]) -> Iterator[tuple[int, float]]:
    """Yield clients as they come, and when the earliest that hasn't come yet is due.

    Of those within ``RESOLUTION`` of the earliest the one with the least index is next, as in a ledger's agenda.
    """
    order = sorted(due.items(), key=lambda pair: (pair[1], pair[0]))
    equal: list[int] = []
    come: set[int] = set()
    first = end = 0
    for _ in order:
        while order[first][0] in come:
            first += 1
        while end < len(order) and order[end][1] <= order[first][1] + RESOLUTION:
            heapq.heappush(equal, order[end][0])
            end += 1
        client = heapq.heappop(equal)
        come.add(client)
        yield client, order[first][1]


def number_to_ask(needed: int, over_select: float) -> int:
    """Return ⌈(1 + o) L⌉, whatever the rounding of the product."""
    return ceil((1 + over_select) * needed - RESOLUTION)


def shared(weights: Sequence[float], total: float) -> list[float]:
    """Return the weights d_i of those that count with the sum that all of a round have; as they are, if that is 0."""
    given = sum(weights)
    return [weight * (total / given) for weight in weights] if given > 0 else list(weights)


@dataclass
class LateTask:
    """A client's task that wasn't done when its round closed.

    Attributes
    ----------
    client, number : int
        Whose it is, by index, and of which round.
    began, due : float
        Clock seconds when it was handed out, and when it ends; in real time, when it is given up.
    weight : float, optional
        Its d_i in its round; None: by the size that its reply tells.
    base : array (D,), optional
        The model that was sent; None where the work is dropped.
    beside : mapping of str to array (D,)
        Vectors that were sent beside it.
    request : Metadata, optional
        Of the message whose reply is waited for, once it is sent.
    reply : Message, optional
        In real time, where it is there already.
    parts : Parts, optional
        What its time consists of, in virtual time, if that is known.
    sent_bytes : int
        That its client was sent for it.
    """

    client: int
    number: int
    began: float
    due: float
    weight: float | None = None
    base: NDArray[Any] | None = None
    beside: Mapping[str, Vector] = field(default_factory=dict)
    request: Metadata | None = None
    reply: Message | None = None
    parts: Parts | None = None
    sent_bytes: int = 0


class LateWork:
    """The tasks that weren't done when their rounds closed; a client has one at most."""

    def __init__(self) -> None:
        self.tasks: dict[int, LateTask] = {}

    def add(self, task: LateTask) -> None:
        """Note a task."""
        self.tasks[task.client] = task

    def done(self, clients: Collection[int]) -> None:
        """Forget the tasks of clients that are done, or gone."""
        for client in clients:
            self.tasks.pop(client, None)

    def due_by(self, now: float) -> list[LateTask]:
        """Return the tasks that end by a clock time, by client."""
        return [task for _, task in sorted(self.tasks.items()) if task.due <= now + RESOLUTION]

    def state(self) -> dict[str, Any]:
        """Return what a run goes on from; nothing where there is none."""
        if not self.tasks:
            return {}
        tasks = [task for _, task in sorted(self.tasks.items())]
        kept = [task for task in tasks if task.base is not None]
        bases = {id(task.base): task.base for task in kept}  # one for all who got the same
        places = [list(bases).index(id(task.base)) if task.base is not None else None for task in tasks]
        names = dict.fromkeys(name for task in kept for name in task.beside)
        return {
            "late-tasks": [
                [t.client, t.number, t.began, t.due, t.weight, at, t.sent_bytes]
                for t, at in zip(tasks, places, strict=True)
            ],
            **({"late-parts": [t.parts for t in tasks]} if any(t.parts for t in tasks) else {}),
            **({"late-bases": np.array(list(bases.values()))} if bases else {}),
            **{f"late-sent-{name}": np.array([task.beside[name] for task in kept]) for name in names},
        }

    @classmethod
    def restored(cls, state: Mapping[str, Any]) -> "LateWork":
        """Return the work of a state."""
        work = cls()
        bases = [np.array(base) for base in state.get("late-bases", ())]
        sent = {key.removeprefix("late-sent-"): key for key in state if key.startswith("late-sent-")}
        rows = state.get("late-tasks", ())
        known = state.get("late-parts", [None] * len(rows))  # an earlier version's has none,
        for row, (client, number, began, due, weight, at, *sent_bytes) in enumerate(
            rows
        ):  # neither have its rows
            task = LateTask(client, number, began, due, weight, sent_bytes=sum(sent_bytes))
            if (parts := known[row]) is not None:
                task.parts = Parts(*parts)
            if at is not None:  # all have one, or none
                task.base = bases[at]
                task.beside = {name: np.array(state[key][row]) for name, key in sent.items()}
            work.add(task)
        return work
