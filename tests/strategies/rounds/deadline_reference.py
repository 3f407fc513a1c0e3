"""Rounds that close early, worked out apart from the library: by trying every time at which a round could close."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

SAME = 1e-9  # seconds within which times are equal

# The d_i of a round's participants, by client, from those that are free and the round's number; clients count alike.
Draws = Callable[[list[int], int], dict[int, float]]


def closes_at(
    ends: dict[int, float],
    began: float,
    deadline: float,
    needed: float,
    failed: Collection[int],
    busy: Collection[float] = (),
) -> float:
    """Return the earliest of all times in question at which a round may close."""
    limit = began + deadline if deadline else inf

    def may_close(time: float) -> bool:
        done = [client for client, end in ends.items() if end <= time + SAME]
        if time >= limit:
            return True
        if not ends:
            return any(end <= time + SAME for end in busy) or not (busy or deadline)
        return len(set(done) - set(failed)) >= needed or len(done) == len(ends)

    times = sorted({began, *ends.values(), *busy} | ({limit} if deadline else set()))
    return next(time for time in times if time >= began - SAME and may_close(time))


def in_time_of(ends: dict[int, float], closed: float, needed: float, failed: Collection[int]) -> list[int]:
    """Return whose replies are in, in the order in which they came; equal ones in that of the clients."""
    came = sorted((client for client in ends if ends[client] <= closed + SAME), key=lambda c: (ends[c], c))
    last = None
    for place in range(len(came)):
        valid = [one for one in came[: place + 1] if one not in failed]
        if len(valid) >= needed:
            last = place
            break
    return came if last is None else came[: last + 1]


@dataclass
class Job:
    """A task under way."""

    client: int
    end: float


@dataclass
class Made:
    """What a round came to."""

    time: float
    model: float
    counted: list[int]
    late: list[int]


def run(
    train: Callable[[int, float], float],
    seconds: Callable[[int, int], float],
    draws: Draws,
    *,
    clients: int,
    rounds: int,
    model: float,
    deadline: float = 0.0,
    needed: float = inf,
    failed: Sequence[int] = (),
) -> list[Made]:
    """Return a run's rounds: ``train`` gives a client's model from the one it is sent, ``seconds`` its times."""
    now, w, jobs, made = 0.0, model, list[Job](), list[Made]()
    for number in range(1, rounds + 1):
        jobs = [job for job in jobs if job.end > now + SAME]
        at_work = {job.client for job in jobs}
        free = [client for client in range(clients) if client not in at_work]
        drawn = draws(free, number)
        ends = {client: now + seconds(client, number) for client in drawn}
        closed = closes_at(ends, now, deadline, needed, failed, [job.end for job in jobs])
        in_time = in_time_of(ends, closed, needed, failed)
        valid = sorted(set(in_time) - set(failed))
        if valid:
            scale = sum(drawn.values()) / sum(drawn[client] for client in valid)
            w = w + sum(drawn[client] * scale * (train(client, w) - w) for client in valid)
        late = sorted(set(drawn) - set(in_time))
        jobs += [Job(client, ends[client]) for client in late]
        now = closed
        made.append(Made(now, w, valid, late))
    return made


def as_trace(times: Sequence[Sequence[float]]) -> str:
    """Return the task times of clients as a trace: those of one are its tasks, in turn."""
    rows: list[Any] = [f"{client},{one!r}" for client, own in enumerate(times) for one in own]
    return "\n".join(["client,seconds", *rows])
