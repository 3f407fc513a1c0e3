"""The methods without rounds. Each yields the model after every aggregation of a problem.

In all of them W is the global model and ``models`` holds all of them, so that client i, whose work has staleness δ,
was sent ``models[-1 - δ]``; Δ_i is its local model minus the model it was sent, and C is the number of clients.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from ..problem import Arrival, Problem, Vector, total
from .rounds import similarities

Trajectory = Iterator[Vector]
Work = tuple[int, int, Vector]  # client, δ, Δ_i


def each_model(problem: Problem, rule: Callable[[Vector, Sequence[Work]], Vector]) -> Trajectory:
    """W ← rule(W, the work that has arrived)."""
    models = [problem.initial]
    for arrived in problem.steps:
        came = []
        for client, staleness in arrived:
            sent = models[-1 - staleness]
            came.append((client, staleness, problem.train(client, sent) - sent))
        models.append(rule(models[-1], came))
        yield models[-1]


def async_fedavg(problem: Problem) -> Trajectory:
    """W ← W + η_g d_i Δ_i, d_i = (Σ_j 1/τ_j) τ_i p_i."""
    tau = np.array(problem.task_seconds)
    d: Vector = np.sum(1 / tau) * tau * problem.importance
    rate = problem.parameters["server_lr"]

    def rule(W: Vector, came: Sequence[Work]) -> Vector:
        ((i, _, delta),) = came
        return W + rate * float(d[i]) * delta

    return each_model(problem, rule)


def fedfix(problem: Problem) -> Trajectory:
    """W ← W + η_g Σ d_i Δ_i over the arrivals of an interval, d_i = ⌈τ_i / Δt⌉ p_i."""
    d = np.ceil(np.array(problem.task_seconds) / problem.parameters["interval"]) * problem.importance
    rate = problem.parameters["server_lr"]
    return each_model(problem, lambda W, came: W + rate * total(d[i] * delta for i, _, delta in came))


def fedbuff(problem: Problem) -> Trajectory:
    """W ← W + η_g (1/m) Σ s(δ) Δ_i, s(δ) = (1 + δ)^(−1/2)."""
    m, rate = problem.parameters["m"], problem.parameters["server_lr"]

    def rule(W: Vector, came: Sequence[Work]) -> Vector:
        return W + rate / m * total(delta / np.sqrt(1 + staleness) for _, staleness, delta in came)

    return each_model(problem, rule)


def async_spectral(problem: Problem) -> Trajectory:
    """W ← W + η_g Σ d_i Δ_i, d_i = p_i N / N_i; gradients are taken at β w + (1 − β) u_i, u_i as client i began."""
    given, C, W = problem.parameters, len(problem.clients), problem.initial
    A = similarities(problem)
    counts = [sum(client == i for arrived in problem.steps for client, _ in arrived) for i in range(C)]
    models, last, came = [W], [W] * C, [0] * C
    u = [W] * C  # of equal models

    def local(i: int, sent: Vector, mean: Vector) -> Vector:
        g = problem.clients[i].gradient
        return problem.train(i, sent, lambda w: g(given["beta"] * w + (1 - given["beta"]) * mean))

    for number, arrived in enumerate(problem.steps, 1):
        W = models[-1]
        for i, staleness in arrived:
            sent = models[-1 - staleness]
            last[i], came[i] = local(i, sent, u[i]), number
            d = problem.importance[i] * len(problem.steps) / counts[i]
            W = W + given["server_lr"] * d * (last[i] - sent)
        models.append(W)
        for i, _ in arrived:
            factors = [A[i, j] * (1 + number - came[j]) ** -given["a"] for j in range(C)]
            u[i] = total(factor * w for factor, w in zip(factors, last, strict=True)) / sum(factors)
        yield W


def fedasync(problem: Problem) -> Trajectory:
    """W ← (1 − α_t) W + α_t w_i, α_t = α (δ + 1)^(−a)."""
    alpha, a, models = problem.parameters["alpha"], problem.parameters["a"], [problem.initial]
    for arrived in problem.steps:
        ((client, staleness),) = arrived
        local = problem.train(client, models[-1 - staleness])
        alpha_t = alpha * (staleness + 1) ** -a
        models.append((1 - alpha_t) * models[-1] + alpha_t * local)
        yield models[-1]


def delay_adaptive(problem: Problem) -> Trajectory:
    """W ← W + η_g min(1, τ_c / δ) Δ_i."""
    rate, tau_c = problem.parameters["server_lr"], problem.parameters["tau_c"]

    def rule(W: Vector, came: Sequence[Work]) -> Vector:
        ((_, staleness, delta),) = came
        return W + (rate if staleness <= tau_c else rate * tau_c / staleness) * delta

    return each_model(problem, rule)


def ringmaster(problem: Problem) -> Trajectory:
    """W ← W + η_g Δ_i if δ < R, else Δ_i is thrown away."""
    rate, R = problem.parameters["server_lr"], problem.parameters["R"]
    return each_model(
        problem, lambda W, came: W + rate * total(delta for _, staleness, delta in came if staleness < R)
    )


def rennala(problem: Problem) -> Trajectory:
    """W ← W + η_g (1/B) Σ Δ_i of the first B arrivals with δ = 0; others are thrown away."""
    rate, B = problem.parameters["server_lr"], problem.parameters["B"]
    return each_model(
        problem, lambda W, came: W + rate / B * total(delta for _, staleness, delta in came if not staleness)
    )


def malenia(problem: Problem) -> Trajectory:
    """W ← W + η_g (1/C) Σ_i (1/B_i) Σ_b Δ_ib over the B_i arrivals of client i with δ = 0; others are thrown away."""
    rate, C = problem.parameters["server_lr"], len(problem.clients)

    def rule(W: Vector, came: Sequence[Work]) -> Vector:
        of = [[delta for client, staleness, delta in came if client == i and not staleness] for i in range(C)]
        return W + rate / C * total(total(deltas) / len(deltas) for deltas in of)

    return each_model(problem, rule)


def ca2fl(problem: Problem) -> Trajectory:
    """W ← W + η_g (h + (1/m) Σ (Δ_i − h_i)), h = (1/C) Σ h_i, and then h_i ← Δ_i."""
    rate, m, C = problem.parameters["server_lr"], problem.parameters["m"], len(problem.clients)
    h = [np.zeros_like(problem.initial) for _ in range(C)]

    def rule(W: Vector, came: Sequence[Work]) -> Vector:
        v = total(h) / C + total(delta - h[i] for i, _, delta in came) / m
        for i, _, delta in came:
            h[i] = delta
        return W + rate * v

    return each_model(problem, rule)


def ace(problem: Problem) -> Trajectory:
    """h_i ← Δ_i, W ← W + η_g (1/C) Σ_j h_j; the first model when all clients have answered."""
    rate, C = problem.parameters["server_lr"], len(problem.clients)
    h: dict[int, Vector] = {}

    def rule(W: Vector, came: Sequence[Work]) -> Vector:
        h.update({i: delta for i, _, delta in came})
        return W + rate * total(h.values()) / C

    return each_model(problem, rule)


def aced(problem: Problem) -> Trajectory:
    """h_i ← Δ_i, W ← W + η_g (1/|A|) Σ_A h_j, A the clients whose h_j came at most τ models ago."""
    rate, tau = problem.parameters["server_lr"], problem.parameters["tau"]
    h: dict[int, tuple[int, Vector]] = {}
    number = 0

    def rule(W: Vector, came: Sequence[Work]) -> Vector:
        nonlocal number
        number += 1
        h.update({i: (number, delta) for i, _, delta in came})
        A = [delta for when, delta in h.values() if number - when <= tau]
        return W + rate * total(A) / len(A)

    return each_model(problem, rule)


def area(problem: Problem) -> Trajectory:
    """Client i sends w_i − y_i, and then y_i ← w_i; after m arrivals W ← W + (1/C) Σ (w_i − y_i)."""
    C, models = len(problem.clients), [problem.initial]
    y = [problem.initial] * C
    for arrived in problem.steps:
        residuals = []
        for i, staleness in arrived:
            local = problem.train(i, models[-1 - staleness])
            residuals.append(local - y[i])
            y[i] = local
        models.append(models[-1] + total(residuals) / C)
        yield models[-1]


def ringleader(problem: Problem) -> Trajectory:
    """W ← W + η_g (1/C) Σ_i G_i / b_i, once for each client and round."""
    rate, C = problem.parameters["server_lr"], len(problem.clients)
    G, later = ([np.zeros_like(problem.initial)] * C for _ in range(2))
    b, b_later, stepped = [0] * C, [0] * C, set[int]()

    def rule(W: Vector, came: Sequence[Work]) -> Vector:
        nonlocal G, later, b, b_later
        for i, _, delta in came:
            if i in stepped:  # phase 2, and the client has made its step
                later[i], b_later[i] = later[i] + delta, b_later[i] + 1
            else:
                G[i], b[i] = G[i] + delta, b[i] + 1
        W = W + rate / C * total(G[i] / b[i] for i in range(C))
        stepped.add(came[-1][0])
        if len(stepped) == C:
            G, later = later, [np.zeros_like(W)] * C
            b, b_later = b_later, [0] * C
            stepped.clear()
        return W

    return each_model(problem, rule)


def fadas(problem: Problem) -> Trajectory:
    """An AMSGrad step by Δ = (1/m) Σ Δ_i, its η_g divided by max(1, δ_max / τ_c)."""
    given = problem.parameters
    first = np.zeros_like(problem.initial)
    v = v_hat = np.full_like(first, given["tau"] ** 2)

    def rule(W: Vector, came: Sequence[Work]) -> Vector:
        nonlocal first, v, v_hat
        mean = total(delta for _, _, delta in came) / given["m"]
        first = given["beta_1"] * first + (1 - given["beta_1"]) * mean
        v = given["beta_2"] * v + (1 - given["beta_2"]) * mean**2
        v_hat = np.maximum(v_hat, v)
        oldest = max(staleness for _, staleness, _ in came)
        return W + given["server_lr"] / max(1, oldest / given["tau_c"]) * first / (
            np.sqrt(v_hat) + given["tau"]
        )

    return each_model(problem, rule)


def fedcompass(problem: Problem) -> Trajectory:
    """W ← W + η_g Σ p_i s(δ) Δ_i over a group's arrivals, s(δ) = (1 + δ)^(−1/2); Δ_i after the task's own steps."""
    rate, models = problem.parameters["server_lr"], [problem.initial]
    for arrived, steps in zip(problem.steps, problem.task_steps, strict=True):
        W = models[-1]
        for (i, staleness), number in zip(arrived, steps, strict=True):
            sent = models[-1 - staleness]
            delta = problem.train(i, sent, steps=number) - sent
            W = W + rate * problem.importance[i] / np.sqrt(1 + staleness) * delta
        models.append(W)
        yield W


# ---- Who arrives when ---------------------------------------------------------------------------------------------


def schedule(
    seconds: Sequence[float],
    number: int,
    *,
    buffer: int = 1,
    interval: float = 0.0,
    stale_from: float = float("inf"),
    trains_while_waiting: bool = False,
    first: int = 0,
) -> list[list[Arrival]]:
    """Return the arrivals between one model and the next, of clients whose tasks always take their ``seconds``.

    All begin at 0 with the first model. A client begins anew with the newest model, at the moment when its work is
    aggregated.

    Parameters
    ----------
    number : int
        How many models.
    buffer : int
        Contributions that make a model; a client whose work waits doesn't begin anew before the model is made.
    interval : float
        Seconds between two models, in place of a buffer; an interval in which nothing arrives makes none.
    stale_from : float
        Work of this staleness or more doesn't count: its client begins anew at once.
    trains_while_waiting : bool
        Whether a client whose work waits begins anew at once, with the model that it has.
    first : int
        Contributions that make the first model; 0: as many as make the others.

    Raises
    ------
    ValueError
        If two arrivals, or an arrival and the end of an interval, are at the same time: their order would be a
        convention.
    """
    # When the work of each client arrives, and with which model it began.
    due = [(each, 0) for each in seconds]
    groups: list[list[Arrival]] = []
    group: list[Arrival] = []
    waiting: list[int] = []
    counted, ends = 0, interval

    def next_model(now: float) -> None:
        nonlocal group, counted
        groups.append(group)
        for client in waiting:
            due[client] = (now + seconds[client], len(groups))
        group, counted = [], 0
        waiting.clear()

    while len(groups) < number:
        busy = sorted((when, client) for client, (when, _) in enumerate(due) if client not in waiting)
        if len(busy) > 1 and busy[1][0] - busy[0][0] < 1e-6:
            raise ValueError(f"clients {busy[0][1]} and {busy[1][1]} arrive at the same time, {busy[0][0]} s")
        if interval and (not busy or busy[0][0] > ends):
            if waiting:
                next_model(ends)
            ends += interval
            continue
        now, client = busy[0]
        if interval and ends - now < 1e-6:
            raise ValueError(f"client {client} arrives at the end of an interval, {now} s")
        began = due[client][1]
        group.append(Arrival(client, len(groups) - began))
        if group[-1].staleness >= stale_from:
            due[client] = (now + seconds[client], len(groups))
            continue
        counted += 1
        if trains_while_waiting:
            due[client] = (now + seconds[client], began)
        else:
            waiting.append(client)
        if not interval and counted == (first if first and not groups else buffer):
            if trains_while_waiting:
                waiting.append(client)  # the client that completes the model begins with it
            next_model(now)
    return groups


def by_harmonic_mean(seconds: Sequence[float], number: int, least: float) -> list[list[Arrival]]:
    """Return the arrivals between one model of Malenia's and the next, as ``schedule`` does.

    A model is made when the counts B_i of fresh arrivals have a harmonic mean of ``least``/C or more.
    """
    due = [(each, 0) for each in seconds]
    groups: list[list[Arrival]] = [[]]
    while len(groups) <= number:
        (now, began), client = min((due[i], i) for i in range(len(seconds)))
        groups[-1].append(Arrival(client, len(groups) - 1 - began))
        B = [sum(not staleness and who == i for who, staleness in groups[-1]) for i in range(len(seconds))]
        if all(B) and len(B) / sum(1 / b for b in B) >= least / len(B):
            groups.append([])
        due[client] = (now + seconds[client], len(groups) - 1)
    return groups[:number]


def in_two_phases(seconds: Sequence[float], number: int) -> list[list[Arrival]]:
    """Return the arrivals between one model of Ringleader's and the next, as ``schedule`` does."""
    clients = range(len(seconds))
    due = [(each, 0) for each in seconds]
    groups: list[list[Arrival]] = [[]]
    there, later, stepped = set[int](), set[int](), set[int]()
    while len(groups) <= number:
        (now, began), client = min((due[i], i) for i in clients)
        groups[-1].append(Arrival(client, len(groups) - 1 - began))
        (later if client in stepped else there).add(client)
        if client not in stepped and (stepped or len(there) == len(seconds)):
            began = len(groups)
            groups.append([])
            stepped.add(client)
            if len(stepped) == len(seconds):
                there, later, stepped = later, set(), set()
        due[client] = (now + seconds[client], began)
    return groups[:number]


def in_speed_groups(
    seconds: Sequence[float], number: int, least: int, most: int, slack: float
) -> tuple[list[list[Arrival]], list[list[int]]]:
    """Return the arrivals between one model of FedCompass's and the next, and the local steps of each.

    A task of Q steps takes Q / ``most`` of the client's ``seconds``, always, so that nobody is late.

    Raises
    ------
    ValueError
        If two arrivals are at the same time, or one is after its group's latest time.
    """
    speed = [each / most for each in seconds]
    # When each client's work is due, its steps, the model that it began with, and its group.
    tasks: dict[int, tuple[float, int, int, Any]] = {
        i: (each, most, 0, None) for i, each in enumerate(seconds)
    }
    groups: list[dict[str, Any]] = []
    arrivals: list[list[Arrival]] = []
    steps_of: list[list[int]] = []

    def whole(steps: float) -> int:
        return int(np.floor(steps + 1e-7))

    def assign(i: int, now: float) -> None:
        fits = [(whole((group["expected"] - now) / speed[i]), at) for at, group in enumerate(groups)]
        fits = [(steps, at) for steps, at in fits if least <= steps <= most]
        if fits:  # the group in which it does the most steps, of equals the last
            steps, at = max(fits)
            group = groups[at]
        else:  # a new one, to meet again those of a group that will have come
            wanted = [
                whole((group["latest"] + most * min(speed[j] for j in group["all"]) - now) / speed[i])
                for group in groups
                if now < group["latest"]
            ]
            wanted = [steps for steps in wanted if steps <= most]
            steps = max(least, *wanted) if wanted else most
            group = {"expected": now + steps * speed[i], "all": [], "here": []}
            group["latest"] = now + slack * steps * speed[i]
            groups.append(group)
        group["all"].append(i)
        tasks[i] = (now + steps * speed[i], steps, len(arrivals), group)

    while len(arrivals) < number:
        (now, i), *others = sorted((task[0], i) for i, task in tasks.items())
        if others and others[0][0] - now < 1e-6:
            raise ValueError(f"clients {i} and {others[0][1]} arrive at the same time, {now} s")
        _, steps, began, group = tasks.pop(i)
        if group is None:  # its first work is a model of its own: its speed wasn't known
            come = [(i, steps, began)]
        else:
            if now > group["latest"]:
                raise ValueError(f"client {i} arrives late, at {now} s")
            group["here"].append((i, steps, began))
            come = group["here"] if len(group["here"]) == len(group["all"]) else []
            if come:
                groups.remove(group)
        if come:
            arrivals.append([Arrival(each, len(arrivals) - model) for each, _, model in come])
            steps_of.append([done for _, done, _ in come])
            for each in sorted((each for each, _, _ in come), key=lambda each: (speed[each], each)):
                assign(each, now)
    return arrivals, steps_of
