"""Who may still answer, of asynchronous methods that wait for an answer of every client."""

from collections.abc import Callable, Sequence

import numpy as np

from strategies.clients.member import Member
from strategies.core.run_state import RunState
from strategies.events.tasks import TaskLedger
from strategies.timing.availability import NEVER
from strategies.timing.scheduler import Times


class Answers:
    """Tells which clients may still answer, and whether all have answered once.

    Clients that will never be available again, or never for as long as a task takes, are not waited for. A client
    that is dropped after several failures isn't, either.

    Parameters
    ----------
    cycles : callable
        Returns the expected cycle times (n,) of clients, infinite for one that is never done with a task.
    """

    def __init__(
        self, run: RunState, ledger: TaskLedger, cycles: Callable[[Sequence[Member]], Times]
    ) -> None:
        self._run, self._ledger, self._cycles = run, ledger, cycles

    def may_come(self, member: Member) -> bool:
        """Return False for a client that is never available again, or never for as long as a task takes."""
        pace = self._run.pace
        if pace.always or member.waiting or self._ledger.busy(member):
            return True
        if pace.comes(member.client, pace.now()) == NEVER:
            return False
        return bool(np.isfinite(self._cycles([member])[0]))

    def first_are_there(self) -> bool:
        """Return True once all clients have answered that still may; log once that the model waits for others."""
        if self._run.aggregations:
            return True
        # A client may have answered and still wait: safeguards may hold its contribution back.
        counting, waits = self._ledger.counting, {c.client.index for c in self._ledger.buffer}
        if any(member.client.index not in waits and self.may_come(member) for member in counting):
            self._run.warn_once(
                "no model is made until all %d clients that count have answered once", len(counting)
            )
            return False
        return True
