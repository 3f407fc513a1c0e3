"""Who counts where a method corrects who takes part more often: on devices also who is away, for a while.

The ``availability`` of a simulation leaves clients connected. A device is away when its node isn't: what the method
remembers of it then goes on counting with its p_i, as otherwise those who happen to be there would have the model to
themselves. So it is with clients whose work has counted before, and for ``ABSENCE`` rounds in a row.
"""

import logging
from collections.abc import Sequence

import numpy as np
from flwr.app import ConfigRecord, MetricRecord
from flwr.serverapp import Grid

from strategies.clients.roster import Client
from strategies.core.lifecycle import State
from strategies.events.tasks import ABSENT
from strategies.rounds.strategy import SynchronousStrategy

log = logging.getLogger("flwr.strategies")

# Rounds in a row that a client may be away and count. One that is gone for good would push the model for ever, by
# what it last wanted of another one; a device that sleeps, or is charged once a day, is back before.
ABSENCE = 100

_COUNTING = "counting"  # in a state


class CountsAway(SynchronousStrategy):
    """Rounds of a method for which clients go on counting that have taken part and are away.

    Not where clients are weighed by a graph (``adjacency``), which is one of those that are there.
    """

    # By index: who counts and isn't there, and since which round.
    _away: dict[int, tuple[Client, int]]

    @property
    def _counting(self) -> Sequence[Client]:
        if not self._away or self.graph is not None:
            return self.clients
        away = [client for client, _ in self._away.values()]
        return sorted([*self.clients, *away], key=lambda client: client.index)

    def _take_part(self, grid: Grid, config: ConfigRecord, *, wait: bool = True) -> list[Client]:
        clients = super()._take_part(grid, config, wait=wait)
        if clients and self.graph is None:  # with no client the run is stopped
            self._look_who_is_away(clients)
        return clients

    def _look_who_is_away(self, clients: Sequence[Client]) -> None:
        """Note who of those that counted isn't among the clients, and let those go that have been away for long."""
        here, number = {client.index for client in clients}, self.aggregations + 1
        known = {client.index: (client, number) for client in self.clients} | self._away
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
        return {index for index, account in self.accounts.items() if account.accepted}

    def reset(self) -> None:
        """Forget who was away."""
        super().reset()
        self._away = {}

    def state(self) -> State:
        """Add whose work has counted: index, size (not a number: it hasn't told) and, if away, since which round."""
        since, counted = {index: first for index, (_, first) in self._away.items()}, self._have_counted()
        rows = [
            (
                client.index,
                np.nan if client.num_examples is None else client.num_examples,
                since.get(client.index, 0),
            )
            for client in self._counting
            if client.index in counted
        ]
        return super().state() | {_COUNTING: np.array(rows, dtype=np.float64).reshape(-1, 3)}

    def restore(self, state: State) -> None:
        """Take them for away, until it is seen who is there."""
        super().restore(state)
        first = state["aggregations"] + 1
        self._away = {}
        for index, size, since in np.asarray(state.get(_COUNTING, np.empty((0, 3)))).tolist():
            told = None if np.isnan(size) else size
            self._away[int(index)] = Client(ABSENT, int(index), told, MetricRecord()), int(since) or first
