"""Who may still answer, of asynchronous methods that wait for an answer of every client."""

import logging

import numpy as np

from strategies.clients.client_state import ClientState
from strategies.clients.client_statistics import LOST_IN_A_ROW
from strategies.core.reply_timeouts import ReplyTimeouts
from strategies.events.session import EventSession
from strategies.timing.availability import NEVER

log = logging.getLogger("flwr.strategies")


class Answers:
    """Tells which clients may still answer, and whether all have answered once.

    Clients that will never be available again, or never for as long as a task takes, are not waited for. A client
    that is dropped after several failures isn't, either, nor one that lost ``LOST_IN_A_ROW`` tasks. In real time with
    safeguards an answer is awaited as long as a round would wait (strategies/core/reply_timeouts.py), with M the
    seconds in which half of the clients answer in the mean, once half of them have answered.

    Parameters
    ----------
    session : EventSession
        The run.
    """

    def __init__(self, session: EventSession) -> None:
        self._run, self._task_table = session.run, session.task_table
        self._contribution_weights = session.contribution_weights
        self._timeouts = ReplyTimeouts()
        self._given_up: set[str] = set()  # the tasks that aren't waited for any more, by message id
        # By client index, the task and the clock time at which the method is asked whether it is overdue.
        self._wakes: dict[int, tuple[str, float]] = {}

    def note(self, index: int) -> None:
        """Note a client's answer, for how long its later ones are awaited."""
        member = self._task_table.members[index]
        if self._contribution_weights.bounds_time and (half := self._task_table.half_time()) is not None:
            self._timeouts.answered(index, member.latest)
            self._timeouts.spend(index, member.latest, half)

    def _is_overdue(self, member: ClientState) -> bool:
        """Return True if a client's answer isn't waited for any more; else have the method asked when it isn't."""
        task = self._task_table.tasks.get(member.task)
        if task is None or not self._contribution_weights.bounds_time:
            return False
        if (half := self._task_table.half_time()) is None:
            return False
        if task.message_id in self._given_up:
            return True
        now, limit = self._run.scheduler.now(), self._timeouts.limit(member.client.index, half)
        if now < (due := task.sent + limit.seconds):
            # Once for each task: the method may ask for many clients at every arrival.
            if self._wakes.get(member.client.index) != (task.message_id, due):
                self._wakes[member.client.index] = task.message_id, due
                self._task_table.wake(due)
            return False
        self._given_up.add(task.message_id)
        self._timeouts.missed(member.client.index, self._run.aggregations)
        self._timeouts.spend(member.client.index, now - task.sent, half)
        log.warning(
            "%s isn't waited for any more after %.3g s: %s", member.client, now - task.sent, limit.why
        )
        return True

    def may_come(self, member: ClientState, *, again: bool = False) -> bool:
        """Return False for a client that is never there for as long as a task takes, or isn't waited for any more.

        Parameters
        ----------
        again : bool
            Whether another answer is meant than one that is there and waits.
        """
        scheduler, task = self._run.scheduler, self._task_table.tasks.get(member.task)
        waits = member.waiting > 0 and not again
        if not waits and self._is_overdue(member):
            return False
        # A task whose client goes before its end is no answer, however long the client is at work on it.
        if scheduler.always or waits or (task is not None and not task.dropped_out):
            return True
        # Such as a client that never gets a place while it is there for long enough.
        if member.lost > LOST_IN_A_ROW:
            self._run.warn_once(
                "%s isn't waited for any more: it went away before each of its last %d tasks was done",
                member.client,
                LOST_IN_A_ROW,
            )
            return False
        if scheduler.next_available(member.client, scheduler.now()) == NEVER:
            return False
        return bool(np.isfinite(self._contribution_weights.cycles([member])[0]))

    def all_answered_once(self) -> bool:
        """Return True once all clients have answered that still may; log once that the model waits for others."""
        if self._run.aggregations:
            return True
        # A client may have answered and still wait: safeguards may hold its contribution back.
        counting, waits = self._task_table.active_clients, {c.client.index for c in self._task_table.buffer}
        if any(member.client.index not in waits and self.may_come(member) for member in counting):
            self._run.warn_once(
                "no model is made until all %d clients that count have answered once", len(counting)
            )
            return False
        return True
