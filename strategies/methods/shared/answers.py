"""Who may still answer, of asynchronous methods that wait for an answer of every client."""

from collections.abc import Callable, Sequence

import numpy as np

from strategies.clients.client_state import ClientState
from strategies.clients.client_statistics import LOST_IN_A_ROW
from strategies.core.run_state import RunState
from strategies.events.tasks import TaskTable
from strategies.timing.availability import NEVER
from strategies.timing.scheduler import Times


class Answers:
    """Tells which clients may still answer, and whether all have answered once.

    Clients that will never be available again, or never for as long as a task takes, are not waited for. A client
    that is dropped after several failures isn't, either, nor one that lost ``LOST_IN_A_ROW`` tasks.

    Parameters
    ----------
    cycles : callable
        Returns the expected cycle times (n,) of clients, infinite for one that is never done with a task.
    """

    def __init__(
        self, run: RunState, task_table: TaskTable, cycles: Callable[[Sequence[ClientState]], Times]
    ) -> None:
        self._run, self._task_table, self._cycles = run, task_table, cycles

    def may_come(self, member: ClientState) -> bool:
        """Return False for a client that is never available again, or never for as long as a task takes."""
        scheduler, task = self._run.scheduler, self._task_table.tasks.get(member.task)
        # A task whose client goes before its end is no answer, however long the client is at work on it.
        if scheduler.always or member.waiting or (task is not None and not task.dropped_out):
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
        return bool(np.isfinite(self._cycles([member])[0]))

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
