"""When a round closes, and which clients are late: first replies, and a deadline.

A round that needs L clients asks ⌈(1 + o) L⌉ of them (``over_select`` = o; with full participation it asks all n, and
L = ⌊n / (1 + o)⌋), and closes with the L-th valid reply, or
``round_deadline`` seconds after it began, whichever is earlier; with all replies, if they are there before (K.
Bonawitz et al., "Towards federated learning at scale: system design", MLSys 2019). A later reply is late,
and dropped. Its client is at work until then, and isn't drawn. A round for which nobody is free closes when the first
client is, or at the deadline.

Replies within 1e-9 s of each other come in the order of the clients, and one that comes just at the deadline is in
time.
"""

from collections.abc import Collection, Iterator, Mapping
from math import ceil, floor, inf
from typing import NamedTuple

from strategies.clock import RESOLUTION
from strategies.timing.event_queue import EventQueue


class ClosingTime(NamedTuple):
    """When a round closes, which clients have replied by then, in order, and which are late."""

    at: float
    in_time: list[int]
    late: list[int]


def closing_time(
    due: Mapping[int, float],
    began: float,
    *,
    deadline: float = 0.0,
    needed: float = inf,
    multiplicities: Mapping[int, int] | None = None,
    failed: Collection[int] = (),
    busy: Collection[float] = (),
) -> ClosingTime:
    """Return how a round closes whose replies come when they are due.

    Parameters
    ----------
    due : mapping of int to float
        Clock seconds at which each client's reply comes, by its index.
    began, deadline : float
        Clock seconds of its beginning, and seconds from then on; 0: no deadline.
    needed : float
        L, the number of valid replies that closes the round.
    multiplicities : mapping of int to int, optional
        The number of replies for which each client's reply counts: how often the client was drawn. By default 1.
    failed : collection of int
        Clients whose replies aren't valid, and count for no reply.
    busy : collection of float
        Clock seconds at which clients that still work for earlier rounds are done.
    """
    limit = began + deadline if deadline else inf
    if not due:
        first = min([limit, *busy])
        return ClosingTime(began if first == inf else max(began, first), [], [])
    in_time: list[int] = []
    got, counts = 0, {**dict.fromkeys(due, 1), **(multiplicities or {}), **dict.fromkeys(failed, 0)}
    for client, earliest in _in_order(due):
        if got >= needed or earliest > limit + RESOLUTION:
            break
        in_time.append(client)
        got += counts[client]
    late = sorted(due.keys() - set(in_time))
    at = max((due[client] for client in in_time), default=began) if got >= needed or not late else limit
    return ClosingTime(min(at, limit), in_time, late)


def _in_order(due: Mapping[int, float]) -> Iterator[tuple[int, float]]:
    """Yield clients as they come, and when the earliest that hasn't come yet is due.

    Of those within ``RESOLUTION`` of the earliest the one with the least index is next, as in an event queue.
    """
    queue = EventQueue()
    for client, time in due.items():
        queue.push(time, client, client)
    while len(queue):
        earliest = queue.next_due()
        yield queue.pop()[1], earliest


def number_to_ask(needed: int, over_select: float) -> int:
    """Return ⌈(1 + o) L⌉, whatever the rounding of the product."""
    return ceil((1 + over_select) * needed - RESOLUTION)


def number_needed(asked: int, over_select: float) -> int:
    """Return ⌊n / (1 + o)⌋, at least 1: of n clients that are asked, how many close a round."""
    return max(floor(asked / (1 + over_select) + RESOLUTION), 1)
