"""The asynchronous methods in a second way: an event simulation in float64 numpy, from the papers' rules alone."""

import heapq
from collections.abc import Callable
from typing import Any

import numpy as np

WHEN_READY = {
    "fedbuff": "m",
    "ca2fl": "m",
    "fadas": "m",
    "rennala": "m",
    "area": "m",
}  # the others: at every arrival; malenia: by the harmonic mean of their counts

GO_ON = ("rennala", "malenia")  # clients work on while their updates of the present model wait

FROM_ALL = ("ace", "aced")  # the first model is made of all clients' updates


class Step:
    """A method's rule: from what has arrived, (client, Δ, δ, sent model), to the next W."""

    def __init__(
        self,
        method: str,
        p: np.ndarray,
        eta: float,
        m: int,
        alpha: float,
        s: Callable[[int], float],
        age: float,
    ):
        self.method, self.p, self.eta, self.m, self.alpha, self.s = method, p, eta, m, alpha, s
        self.age, self.number, self.arrived = age, 0, dict.fromkeys(range(len(p)), -float("inf"))
        self.h: dict[int, Any] = dict.fromkeys(range(len(p)), 0.0)
        self.first, self.v, self.v_hat = 0.0, 1e-6, 1e-6
        self.y, self.mean = [], 0.0

    def __call__(self, W: np.ndarray, came: list[tuple[int, np.ndarray, int, np.ndarray]]) -> np.ndarray:
        if self.method == "fedbuff":
            return W + self.eta * sum(self.s(delay) * delta / self.m for _, delta, delay, _ in came)
        if self.method == "fedasync":
            ((_, delta, delay, sent),) = came
            a = self.alpha * self.s(delay)
            return (1 - a) * W + a * (sent + delta)
        if self.method == "delay-adaptive":
            ((_, delta, delay, _),) = came
            return W + self.eta * (1.0 if delay <= len(self.p) else len(self.p) / delay) * delta
        if self.method in ("ringmaster", "rescaled"):  # whose steps are in the work
            return W + self.eta * came[0][1]
        if self.method == "rennala":
            return W + self.eta * sum(delta for _, delta, _, _ in came) / self.m
        if self.method == "malenia":
            of = {i: [delta for owner, delta, *_ in came if owner == i] for i in range(len(self.p))}
            return W + self.eta * sum(p * np.mean(of[i], axis=0) for i, p in enumerate(self.p))
        if self.method == "ca2fl":
            v = self.cached() + sum(delta - self.h[i] for i, delta, _, _ in came) / self.m
            self.h |= {i: delta for i, delta, _, _ in came}
            return W + self.eta * v
        if self.method == "ace":
            self.h |= {i: delta for i, delta, _, _ in came}
            return W + self.eta * self.cached()
        if self.method == "aced":
            self.number += 1
            self.h |= {i: delta for i, delta, _, _ in came}
            self.arrived |= {i: self.number for i, *_ in came}
            A = [i for i, number in self.arrived.items() if self.number - number <= self.age]
            return W + self.eta * sum(self.p[i] * self.h[i] for i in A) / sum(self.p[i] for i in A)
        if self.method == "area":
            self.y = self.y or [W] * len(self.p)
            # The paper's residuals, which add up to the mean of the last models: with η = 1 that is the model.
            self.mean = self.mean if self.number else W
            self.mean = self.mean + sum(self.p[i] * (sent + delta - self.y[i]) for i, delta, _, sent in came)
            for i, delta, _, sent in came:
                self.y[i] = sent + delta
            self.number += 1
            return W + self.eta * (self.mean - W)
        assert self.method == "fadas"
        mean = sum(delta for _, delta, _, _ in came) / self.m
        self.first = 0.9 * self.first + 0.1 * mean
        self.v = 0.99 * self.v + 0.01 * mean**2
        self.v_hat = np.maximum(self.v_hat, self.v)
        late = max(1.0, max(delay for _, _, delay, _ in came) / len(self.p))
        return W + self.eta / late * self.first / (np.sqrt(self.v_hat) + 1e-3)

    def cached(self) -> Any:
        return sum(p * self.h[i] for i, p in enumerate(self.p))


def simulate(
    method: str,
    task_time: Callable[[int, int], float],
    work: Callable[[int, np.ndarray], np.ndarray],
    p: np.ndarray,
    W: np.ndarray,
    number: int,
    *,
    eta: float,
    m: int = 2,
    alpha: float = 0.6,
    s: Callable[[int], float] = lambda delay: 1.0,
    R: float = float("inf"),
    age: float = float("inf"),
) -> list[np.ndarray]:
    """Return the models 0 to ``number``; arrivals at one time come in client order."""
    step, clients = Step(method, p, eta, m, alpha, s, age), len(p)
    heap: list[Any] = []
    tasks, models, answered = [0] * clients, [W], set()
    waiting: list[Any] = []

    def hand_out(i: int, now: float) -> None:
        tasks[i] += 1
        due = now + task_time(i, tasks[i])
        heapq.heappush(heap, (round(due, 9), i, len(models) - 1, due))

    for i in range(clients):
        hand_out(i, 0.0)
    while len(models) <= number:
        _, i, version, now = heapq.heappop(heap)
        sent, delay = models[version], len(models) - 1 - version
        if delay >= R or (method in GO_ON and delay):
            hand_out(i, now)
            continue
        answered.add(i)
        waiting.append((i, work(i, sent) - sent, delay, sent))
        if method == "malenia":
            B = [sum(owner == i for owner, *_ in waiting) for i in range(clients)]
            full = all(B) and 1 / np.mean([1 / b for b in B]) >= m / clients - 1e-12
        elif method in WHEN_READY:
            full = len(waiting) >= m
        else:
            full = method not in FROM_ALL or len(answered) == clients
        if not full:
            if method in GO_ON:
                hand_out(i, now)
            continue
        models.append(step(models[-1], waiting))
        for owner in [i] if method in GO_ON else sorted(owner for owner, *_ in waiting):
            hand_out(owner, now)
        waiting = []
    return models
