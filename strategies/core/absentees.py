"""Clients that go on counting while they are away, where a method corrects who takes part more often.

The ``availability`` of a simulation leaves clients connected. A device is away when its node isn't: what the method
remembers of it then goes on counting with its p_i, as otherwise those who happen to be there would have the model to
themselves. So it is with clients whose work has counted before, and for ``ABSENCE`` rounds in a row.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from flwr.app import MetricRecord

from strategies.clients.accounts import Accounts
from strategies.clients.roster import ABSENT, Client
from strategies.core.run_state import RunState

log = logging.getLogger("flwr.strategies")

# Rounds in a row that a client may be away and count. One that is gone for good would push the model for ever, by
# what it last wanted of another one; a device that sleeps, or is charged once a day, is back before.
ABSENCE = 100

_COUNTING = "counting"  # in a state


class AbsentClients:
    """Clients that count and aren't there; not where clients count by a graph of those that are there."""

    def __init__(self, run: RunState, accounts: Accounts) -> None:
        self._run, self._accounts = run, accounts
        # By index: who counts and isn't there, and since which round.
        self._away: dict[int, tuple[Client, int]] = {}

    def counting(self, clients: Sequence[Client]) -> Sequence[Client]:
        """Return the clients that count, by index, where these are there."""
        if not self._away:
            return clients
        away = [client for client, _ in self._away.values()]
        return sorted([*clients, *away], key=lambda client: client.index)

    def look(self, clients: Sequence[Client]) -> None:
        """Note who of those that counted isn't among the clients, and drop those that have been away for long."""
        here, number = {client.index for client in clients}, self._run.aggregations + 1
        known = {client.index: (client, number) for client in self._run.clients} | self._away
        counted = self._have_counted()
        gone = {i: known[i] for i in (known.keys() - here) & counted}
        self._away = {i: (client, since) for i, (client, since) in gone.items() if number - since < ABSENCE}
        for index in sorted(gone.keys() - self._away.keys()):
            client = gone[index][0]
            log.warning(
                "%s has been away for %d rounds: it doesn't count until it is back",
                client,
                ABSENCE,
                extra=client.fields,
            )

    def _have_counted(self) -> set[int]:
        """Return the clients, by index, whose work has ever counted."""
        return {index for index, account in self._accounts.items() if account.accepted}

    def reset(self) -> None:
        """Forget who was away."""
        self._away = {}

    def state(self) -> dict[str, Any]:
        """Return whose work has counted: index, size (NaN: it hasn't told one) and, if away, since which round."""
        since, counted = {index: first for index, (_, first) in self._away.items()}, self._have_counted()
        rows = [
            (
                client.index,
                np.nan if client.num_examples is None else client.num_examples,
                since.get(client.index, 0),
            )
            for client in self.counting(self._run.clients)
            if client.index in counted
        ]
        return {_COUNTING: np.array(rows, dtype=np.float64).reshape(-1, 3)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take the clients of a state for away, until it is seen who is there."""
        first = state["aggregations"] + 1
        self._away = {}
        for index, size, since in np.asarray(state.get(_COUNTING, np.empty((0, 3)))).tolist():
            told = None if np.isnan(size) else size
            self._away[int(index)] = Client(ABSENT, int(index), told, MetricRecord()), int(since) or first
