"""FedBuff: a new model when m contributions have arrived.

J. Nguyen et al., "Federated learning with buffered asynchronous aggregation", AISTATS 2022; as in
Fraboni et al. 2023, section 4.5:

    identical    d_i = s(δ)/m
    time-based   d_i = s(δ) p_i / (share of the aggregations that client i contributes to)

A stale contribution may have a smaller weight, by the factor s(δ) of its staleness δ: ``polynomial:0.5`` is the
paper's s(δ) = (1 + δ)^−½; by default s(δ) is 1.

A client waits in the buffer until the buffer is full, so its cycle is longer than its task time, and the share has no
closed form. In virtual time the schedule depends on the task times alone: it is simulated beforehand, for the run's
maximum number of aggregations, at most 20,000, which gives the shares; if a time budget ends the run earlier, the
actual shares differ slightly. In real time the shares are those observed so far.

The paper's server step is 1. By default (``server_lr = 0``) it is 1/Σ d_i with s(δ) = 1, m/C for identical weights:
one contribution of every client together then moves the model as far as a round. With m = C FedBuff is exactly
synchronous FedAvg, and the step is 1.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from strategies.core.config import AsynchronousConfig, StrategyConfig
from strategies.events.event_queue import EventQueue
from strategies.methods.shared.arrivals import Buffered, BufferedConfig
from strategies.methods.shared.staleness import discount_of, discount_parameter
from strategies.timing.availability import NEVER
from strategies.timing.scheduler import Outlook, Schedule, Times

log = logging.getLogger("flwr.strategies")

# Number of aggregations that are simulated; longer runs use their shares, too.
HORIZON = 20_000
IN_VAIN = 100  # lost tasks per client in a row, after which the simulation stops: no task will succeed


@dataclass(frozen=True)
class FedBuffConfig(BufferedConfig, AsynchronousConfig):
    """Parameters of FedBuff.

    Parameters
    ----------
    staleness_discount : str
        s(δ), the factor of a contribution that is δ aggregations old: 1, (δ + 1)^−A, or 1 up to B and beyond it
        1/(A (δ − B) + 1)
    """

    staleness_discount: str = discount_parameter()


def participation_counts(
    task_time: Callable[[int, int], float], num_clients: int, buffer_size: int, num_aggregations: int
) -> np.ndarray:
    """Simulate the schedule; return the number of aggregations that each client contributes to, shape (C,).

    ``task_time(i, k)`` is the duration in seconds of task k (from 1) of client i.
    """

    def outlook(client: int, task: int, when: float) -> Outlook:
        return Outlook(when + task_time(client, task), lost=False)

    return counts_of(outlook, lambda client, when: when, num_clients, buffer_size, num_aggregations)[0]


def counts_of(
    outlook: Callable[[int, int, float], Outlook],
    comes: Callable[[int, float], float],
    num_clients: int,
    buffer_size: int,
    num_aggregations: int,
) -> tuple[np.ndarray, int]:
    """Simulate the schedule of clients that come and go; return the counts (C,) and the number of aggregations.

    The number of aggregations is below ``num_aggregations`` if contributions stop.
    ``outlook(i, k, t)`` is the end and the outcome of task k of client i that begins at t, and ``comes(i, t)`` the
    first time from t on at which client i is available.
    """
    queue, tasks = EventQueue(), np.zeros(num_clients, dtype=np.int64)
    counts = np.zeros(num_clients, dtype=np.int64)
    arrived: list[int] = []
    done, in_vain, most = 0, 0, IN_VAIN * num_clients

    def hand_out(client: int, now: float) -> None:
        if (begins := comes(client, now)) == NEVER:
            return
        tasks[client] += 1
        due, lost = outlook(client, int(tasks[client]), begins)
        queue.push(due, client, (client, lost))

    for client in range(num_clients):
        hand_out(client, 0.0)
    while done < num_aggregations and len(queue) and in_vain < most:
        now, (client, lost) = queue.pop()
        if lost:
            in_vain += 1
            hand_out(client, now)
            continue
        in_vain = 0
        arrived.append(client)
        if len(arrived) == buffer_size:
            done += 1
            for owner in sorted(arrived):
                counts[owner] += 1
                hand_out(owner, now)
            arrived.clear()
    return counts, done


class FedBuff(Buffered):
    """FedBuff (Nguyen et al. 2022, algorithm 1; time-based: Fraboni et al. 2023, section 4.5).

    Rule: the model moves by Σ d_i Δ_i, d_i = s(δ)/m, or time-based.
    Helps: where the slowest are far slower, and each arrival alone is too noisy, or must not be seen alone.
    """

    Config: ClassVar[type[StrategyConfig]] = FedBuffConfig
    config: FedBuffConfig

    def check(self, num_clients: int) -> None:
        """Refuse a buffer that would never fill, and log where FedBuff is FedAvg."""
        super().check(num_clients)
        if self.config.buffer_size == num_clients > 1:
            log.info(
                "buffer_size = %d is the number of clients: every model waits for all of them, and no work is stale, "
                "as in FedAvg",
                num_clients,
            )

    @property
    def discounts(self) -> bool:
        """Whether staleness changes the weight of a contribution: False if s(δ) = 1."""
        return not discount_of(self.config.staleness_discount).constant

    def discount(self, staleness: int) -> float:
        """Return s(δ), the factor of a contribution of staleness δ."""
        return discount_of(self.config.staleness_discount)(staleness)

    def periods(self, times: Times) -> Times:
        """Return P_i (n,), aggregations per contribution: expected if all task times are known, else observed."""
        counting = self.ledger.counting
        m, number = min(self.config.buffer_size, len(counting)), min(self.total, HORIZON)

        def play(schedule: Schedule) -> tuple[np.ndarray, int]:
            return counts_of(
                lambda i, task, when: schedule.outlook(counting[i].client, task, when),
                lambda i, when: schedule.comes(counting[i].client, when),
                len(counting),
                m,
                number,
            )

        if (played := self.pace.foresee(play)) is None:
            return super().periods(times)
        counts, done = played
        if self.pace.always:
            return np.asarray(
                number / np.maximum(counts, 1)
            )  # a client that never contributes may have any weight
        return np.where(counts > 0, max(done, 1) / np.maximum(counts, 1), np.inf)
