"""How often each client contributes to a buffer of m: the shares that time-based weights are divided by.

A client waits in the buffer until the buffer is full, so its cycle is longer than its task time, and the share has no
closed form. In virtual time the schedule depends on the task times alone: it is simulated beforehand, for the run's
maximum number of aggregations, at most 20,000, which gives the shares; if a time budget ends the run earlier, the
actual shares differ slightly. In real time the shares are those observed so far.
"""

from collections.abc import Callable, Sequence

import numpy as np

from strategies.clients.client_state import ClientState
from strategies.timing.availability import NEVER
from strategies.timing.event_queue import EventQueue
from strategies.timing.scheduler import Schedule, Scheduler, TaskEnd, Times

# Number of aggregations that are simulated; longer runs use their shares, too.
HORIZON = 20_000
IN_VAIN = 100  # lost tasks per client in a row, after which the simulation stops: no task will succeed


def counts_of(
    predict: Callable[[int, int, float], TaskEnd],
    next_available: Callable[[int, float], float],
    num_clients: int,
    buffer_size: int,
    num_aggregations: int,
) -> tuple[np.ndarray, int]:
    """Simulate the schedule of clients that come and go; return the counts (C,) and the number of aggregations.

    The number of aggregations is below ``num_aggregations`` if contributions stop.
    ``predict(i, k, t)`` is the end and the outcome of task k of client i that begins at t, and
    ``next_available(i, t)`` the first time from t on at which client i is available.
    """
    queue, tasks = EventQueue(), np.zeros(num_clients, dtype=np.int64)
    counts = np.zeros(num_clients, dtype=np.int64)
    arrived: list[int] = []
    done, in_vain, most = 0, 0, IN_VAIN * num_clients

    def hand_out(client: int, now: float) -> None:
        if (begins := next_available(client, now)) == NEVER:
            return
        tasks[client] += 1
        due, lost = predict(client, int(tasks[client]), begins)
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


class BufferSchedule:
    """The schedule of a run's buffer, simulated anew only when other clients count or tasks get other loads."""

    def __init__(self) -> None:
        self._of: tuple[Sequence[int], int, int] | None = None  # clients, m and aggregations of the periods
        self._contribution_periods: Times | None = None

    def contribution_periods(
        self, scheduler: Scheduler, members: Sequence[ClientState], buffer_size: int, num_aggregations: int
    ) -> Times | None:
        """Return P_i (n,), aggregations per contribution of n clients; None if task times aren't known beforehand."""
        of = [member.client.index for member in members], buffer_size, num_aggregations
        if of != self._of or scheduler.uses_device_profiles:  # task times may follow from clients' sizes
            self._of = of
            self._contribution_periods = _played(scheduler, members, buffer_size, num_aggregations)
        return None if self._contribution_periods is None else self._contribution_periods.copy()


def _played(
    scheduler: Scheduler, members: Sequence[ClientState], buffer_size: int, num_aggregations: int
) -> Times | None:
    """Return P_i (n,) of a schedule of ``num_aggregations``; None if it isn't known beforehand."""
    m, number = min(buffer_size, len(members)), min(num_aggregations, HORIZON)

    def simulate(schedule: Schedule) -> tuple[np.ndarray, int]:
        return counts_of(
            lambda i, task, when: schedule.predict(members[i].client, task, when),
            lambda i, when: schedule.next_available(members[i].client, when),
            len(members),
            m,
            number,
        )

    if (played := scheduler.simulate_schedule(simulate)) is None:
        return None
    counts, done = played
    if scheduler.always:  # a client that never contributes may have any weight
        return np.asarray(number / np.maximum(counts, 1))
    return np.where(counts > 0, max(done, 1) / np.maximum(counts, 1), np.inf)
