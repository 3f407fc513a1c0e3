"""The events of an asynchronous run, one after the other, in virtual and in real time.

In virtual time the next event is the one that is due next in the queue; the clock jumps there, and the loop waits for
the reply that is due, however long that takes in real seconds. In real time the loop polls for replies, and a task
whose deadline has passed is given up.
"""

import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from flwr.app import Message

from strategies.clock import RESOLUTION
from strategies.events.tasks import AvailabilityChanged, Recheck, Retry, Task, TaskTable
from strategies.flower.errors import RunError
from strategies.flower.exchange import MessageClient
from strategies.flower.grids import Work
from strategies.timing.availability import NEVER
from strategies.timing.scheduler import Scheduler

log = logging.getLogger("flwr.strategies")

REFRESH_EVERY = 5.0  # real seconds between two looks at who is connected
SHORTEST_POLL, LONGEST_POLL = 0.005, 0.5  # real seconds between two looks for replies


class Arrival(NamedTuple):
    """The reply to a task; None if it is certain that no reply comes."""

    task: Task
    reply: Message | Work | None


class HoldExpired(NamedTuple):
    """The replies that were held back are to be aggregated."""


class IntervalElapsed(NamedTuple):
    """An interval between two aggregations is over."""


class RefreshClients(NamedTuple):
    """The connected clients are to be looked up."""


Event = Arrival | Retry | AvailabilityChanged | Recheck | HoldExpired | IntervalElapsed | RefreshClients


def checked_interval(name: str, interval: float | None) -> float | None:
    """Return seconds between two aggregations; raise RunError, with their name, unless they tell two times apart."""
    if interval is not None and not RESOLUTION <= interval < math.inf:
        raise RunError(
            f"{name} = {interval:g}: must be seconds >= {RESOLUTION:g}, or None where ready says when"
        )
    return interval


@dataclass(frozen=True)
class EventStream:
    """The events of a run; each must be handled before the next is requested.

    Attributes
    ----------
    interval : callable
        Returns the seconds between two aggregations, where time says when there is one; else None.
    """

    scheduler: Scheduler
    task_table: TaskTable
    message_client: MessageClient
    interval: Callable[[], float | None]

    def __iter__(self) -> Iterator[Event]:
        """Yield events until the time budget is spent.

        Raises
        ------
        RunError
            In virtual time, if nothing can ever happen again.
        """
        return self._in_real_time() if self.scheduler.real_time else self._in_virtual_time()

    def _in_virtual_time(self) -> Iterator[Event]:
        scheduler, task_table, message_client = self.scheduler, self.task_table, self.message_client
        clock, queue = scheduler.clock, task_table.queue
        while True:
            length = self.interval()
            due, tick = queue.next_due(), scheduler.tick(length)
            now = min(due, tick)
            if now == NEVER or (due == NEVER and not task_table.buffer):
                self._end_without_clients()
                return
            if scheduler.over(now):
                return
            if length is not None and due > tick + RESOLUTION:
                clock.wait_until(max(tick, scheduler.now()))  # an event within RESOLUTION may have been later
                scheduler.count_interval(length)
                if task_table.buffer:
                    yield IntervalElapsed()
                else:  # nothing can come before the next event
                    scheduler.pass_over(length, due)
                continue
            due, item = queue.pop()
            match item:
                case HoldExpired() if not task_table.held_replies:
                    continue
                case str() if (task := task_table.tasks.get(item)) is not None:
                    reply = None if task.lost else message_client.wait(task.message_id)
                    if message_client.should_stop():
                        return
                    # In a resumed run, work that was held back was due before now.
                    clock.wait_until(max(due, scheduler.now()))
                    yield Arrival(task, reply)
                case Retry() | AvailabilityChanged() | Recheck() | HoldExpired():
                    clock.wait_until(due)
                    yield item

    def _end_without_clients(self) -> None:
        """Log that no client comes any more; raise RunError unless clients have gone away by their availability."""
        if not self.scheduler.comes_and_goes:
            raise RunError("no client is left: each was lost or failed; the log names the reasons")
        waiting = len(self.task_table.buffer) + len(self.task_table.held_replies)
        who = "nobody else comes any more" if waiting else "nobody will be there any more"
        log.warning("%s, from %g s on: the run ends", who, self.scheduler.now())

    def _in_real_time(self) -> Iterator[Event]:
        scheduler, task_table = self.scheduler, self.task_table
        clock, queue, looked = scheduler.clock, task_table.queue, scheduler.now()
        while not scheduler.over(clock.now()):
            came = self._arrived()
            for task, reply in came:
                if task.message_id in task_table.tasks:  # a reply may come twice
                    yield Arrival(task, reply)
            now = clock.now()
            while queue.next_due() <= now:
                _, item = queue.pop()
                if not isinstance(item, str):
                    yield item
                elif (late := task_table.tasks.get(item)) is not None:
                    yield Arrival(late, None)
            length = self.interval()
            if length is not None and scheduler.tick(length) <= now:
                scheduler.count_interval(length)
                yield IntervalElapsed()
            if clock.now() - looked > REFRESH_EVERY:
                looked = clock.now()
                yield RefreshClients()
            if not came:
                everybody = task_table.members.values()
                fastest = float(scheduler.times(everybody, everybody).min(initial=LONGEST_POLL / 0.05))
                pause = min(max(0.05 * fastest, SHORTEST_POLL), LONGEST_POLL)
                clock.wait_until(min(now + pause, scheduler.tick(self.interval()), queue.next_due()))

    def _arrived(self) -> list[tuple[Task, Message]]:
        """Return the replies that have come, with their tasks, in client order."""
        tasks = self.task_table.tasks
        replies = self.message_client.poll([name for name, task in tasks.items() if not task.lost])
        asked = ((tasks.get(reply.metadata.reply_to_message_id), reply) for reply in replies)
        came = [(task, reply) for task, reply in asked if task is not None]
        return sorted(came, key=lambda pair: pair[0].member.client.index)
