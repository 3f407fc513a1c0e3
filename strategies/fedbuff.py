"""FedBuff: a new model when m contributions have arrived.

J. Nguyen et al., "Federated learning with buffered asynchronous aggregation", AISTATS 2022; as in
Fraboni et al. 2023, section 4.5:

    identical    d_i = s(δ)/m
    time-based   d_i = s(δ) p_i / (share of the aggregations that client i contributes to)

Late work may be worth less, by its staleness δ: ``polynomial:0.5`` is the paper's s(δ) = (1 + δ)^−½; by default it
is 1.

A client waits in the buffer until it is full, so its cycle isn't its task time and the share has no closed form. In
virtual time the schedule follows from the task times alone: it is played through beforehand, and the shares are
those of the very run. In real time they are those observed so far. With m = C and equal τ it is synchronous FedAvg,
exactly.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from strategies.arrivals import Buffered, BufferedConfig
from strategies.config import StrategyConfig
from strategies.ledger import Agenda
from strategies.pace import TaskTime, Times
from strategies.scheme import AsynchronousConfig
from strategies.staleness import discount_of

# Aggregations that are played through; longer runs take these for all.
HORIZON = 20_000


@dataclass(frozen=True)
class FedBuffConfig(BufferedConfig, AsynchronousConfig):
    """Parameters of FedBuff.

    Parameters
    ----------
    staleness_discount : str
        s, what late work is worth: see ``strategies.staleness``.
    """

    staleness_discount: str = "constant"

    def __post_init__(self) -> None:
        super().__post_init__()
        discount_of(self.staleness_discount)


def participation_counts(
    task_time: Callable[[int, int], float], num_clients: int, buffer_size: int, num_aggregations: int
) -> np.ndarray:
    """Play the schedule through; return how many aggregations each client contributes to, shape (C,).

    ``task_time(i, k)`` is the seconds of task k (from 1) of client i.
    """
    agenda, tasks = Agenda(), np.zeros(num_clients, dtype=np.int64)
    counts = np.zeros(num_clients, dtype=np.int64)

    def hand_out(client: int, now: float) -> None:
        tasks[client] += 1
        agenda.push(now + task_time(client, int(tasks[client])), client, client)

    for client in range(num_clients):
        hand_out(client, 0.0)
    for _ in range(num_aggregations):
        arrived = [agenda.pop() for _ in range(buffer_size)]
        for client in sorted(client for _, client in arrived):
            counts[client] += 1
            hand_out(client, arrived[-1][0])
    return counts


class FedBuff(Buffered):
    """FedBuff (Nguyen et al. 2022, algorithm 1; time-based: Fraboni et al. 2023, section 4.5).

    Rule: the model moves by Σ d_i Δ_i, d_i = s(δ)/m, or time-based.
    Helps: where the slowest are far slower, and each arrival alone is too noisy, or must not be seen alone.
    """

    Config: ClassVar[type[StrategyConfig]] = FedBuffConfig
    config: FedBuffConfig

    @property
    def discounts(self) -> bool:
        """Unless s = 1."""
        return not discount_of(self.config.staleness_discount).constant

    def discount(self, staleness: int) -> float:
        """Return s(δ)."""
        return discount_of(self.config.staleness_discount)(staleness)

    def periods(self, times: Times) -> Times:
        """Aggregations per contribution: expected where the times of all tasks are known, else observed so far."""
        counting = self.ledger.counting
        m, number = min(self.config.buffer_size, len(counting)), min(self.total, HORIZON)

        def play(task_time: TaskTime) -> np.ndarray:
            return participation_counts(
                lambda i, task: task_time(counting[i].client, task), len(counting), m, number
            )

        counts = self.pace.foresee(play)
        if counts is None:
            return super().periods(times)
        return np.asarray(number / np.maximum(counts, 1))  # one that never contributes has any weight
