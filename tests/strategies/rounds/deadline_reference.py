"""Rounds that close early, worked out apart from the library: by trying every time at which a round could close."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
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
    number: int
    end: float
    weight: float
    base: float


@dataclass
class Made:
    """What a round came to."""

    time: float
    model: float
    counted: list[int]
    late: list[int]
    ages: list[int] = field(default_factory=list)
    worth: dict[int, float] = field(default_factory=dict)


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
    late: str = "drop",
    failed: Sequence[int] = (),
) -> list[Made]:
    """Return a run's rounds: ``train`` gives a client's model from the one it is sent, ``seconds`` its times."""
    now, w, jobs, made = 0.0, model, list[Job](), list[Made]()
    for number in range(1, rounds + 1):
        if late == "drop":
            jobs = [job for job in jobs if job.end > now + SAME]
        at_work = {job.client for job in jobs}
        free = [client for client in range(clients) if client not in at_work]
        drawn = draws(free, number)
        d = {client: weight * len(free) / clients for client, weight in drawn.items()}
        ends = {client: now + seconds(client, number) for client in d}
        closed = closes_at(ends, now, deadline, needed, failed, [job.end for job in jobs])
        in_time = in_time_of(ends, closed, needed, failed)
        mine = [Job(client, number, ends[client], d[client], w) for client in d]
        arrived = [job for job in jobs if job.end <= closed + SAME] if late == "next" else []
        counting = sorted(
            [job for job in [*mine, *arrived] if (job in arrived or job.client in in_time)],
            key=lambda job: job.client,
        )
        valid = [job for job in counting if job.client not in failed]
        total, given = sum(drawn.values()) if d else 1.0, sum(job.weight for job in valid)
        if valid:
            w = w + sum(
                job.weight * total / given * (train(job.client, job.base) - job.base) for job in valid
            )
        jobs = [job for job in jobs if job not in arrived] + [j for j in mine if j.client not in in_time]
        now = closed
        worth = {job.client: job.weight * total / given for job in valid}
        late_now = sorted(set(d) - set(in_time))
        ages = [number - job.number for job in valid if job in arrived]
        made.append(Made(now, w, [job.client for job in valid], late_now, ages, worth))
    return made


def as_trace(times: Sequence[Sequence[float]]) -> str:
    """Return the task times of clients as a trace: those of one are its tasks, in turn."""
    rows: list[Any] = [f"{client},{one!r}" for client, own in enumerate(times) for one in own]
    return "\n".join(["client,seconds", *rows])
