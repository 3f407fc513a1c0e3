"""Which clients take part in a run, and how much each counts: p_i."""

from collections.abc import Callable, Sequence
from typing import Protocol

from flwr.app import ConfigRecord
from flwr.serverapp import Grid

from strategies.clients.client_graph import ClientGraph
from strategies.clients.roster import Client, Roster
from strategies.clients.weights import Weights, importances
from strategies.core.run_state import RunState
from strategies.updates.safeguards import Safeguards


class Absentees(Protocol):
    """Clients that go on counting while they are away (``strategies.core.absentees``)."""

    def look(self, clients: Sequence[Client]) -> None:
        """Take note of who is there."""

    def counting(self, clients: Sequence[Client]) -> Sequence[Client]:
        """Return the clients that count, by index, where these are there."""


class Population:
    """The clients of a run.

    Parameters
    ----------
    kind : str
        How much a client counts: ``samples``, ``uniform`` or ``adjacency``.
    graph : ClientGraph, optional
        Of the clients, where they count by ``adjacency``.
    away : Absentees, optional
        Where clients count that are away.

    Attributes
    ----------
    listeners : list of callable
        Told at each look which clients are there, before they are asked for anything.
    """

    def __init__(
        self,
        run: RunState,
        roster: Roster,
        safeguards: Safeguards,
        kind: str,
        graph: ClientGraph | None = None,
        away: Absentees | None = None,
    ) -> None:
        self._run, self.roster, self.safeguards = run, roster, safeguards
        self.kind, self.graph, self.away = kind, graph, away
        self.listeners: list[Callable[[Sequence[Client]], None]] = []

    def look(self, grid: Grid, config: ConfigRecord, *, wait: bool = True) -> list[Client]:
        """Look who is there; with a graph, who is in it. Without ``wait``, newcomers are in once they answer."""
        run = self._run
        clients = self.roster.refresh(grid, config) if wait else self.roster.look(grid, config)
        if self.graph is not None and clients:
            self.graph.guarded = self.safeguards.active
            clients = self.graph.refresh(grid, clients, config, run.timeout, run.stopped)
        run.pace.enrol(clients)
        if clients:  # with no client the run is stopped
            if self.away is not None:
                self.away.look(clients)
            for told in self.listeners:
                told(clients)
        return clients

    @property
    def counting(self) -> Sequence[Client]:
        """The clients that count now: those that are there, and with ``away`` some that aren't."""
        clients = self._run.clients
        return clients if self.away is None else self.away.counting(clients)

    def importance(self) -> dict[int, float]:
        """Return p_i of the clients that count now, by index."""
        if not (clients := self.counting):
            return {}
        return dict(zip((c.index for c in clients), self.importances(clients).tolist(), strict=True))

    def importances(self, clients: Sequence[Client]) -> Weights:
        """Return p_i (n,) of some clients, with sum 1."""
        if self.graph is not None:
            return self.graph.weights(clients)
        # Sizes may come with the replies: a client that hasn't told its own counts as the mean of the others.
        sizes = [client.num_examples or 0 for client in clients]
        if not any(sizes):
            return importances("uniform", [1] * len(clients))
        return self.by_size(clients, sizes, unknown_as_mean=0 in sizes)

    def by_size(
        self, clients: Sequence[Client], sizes: Sequence[float], *, unknown_as_mean: bool = False
    ) -> Weights:
        """Return p_i (n,) of clients by their sizes; a size of 0, which is unknown, counts 0, or as the mean."""
        if self.kind == "samples":
            sizes = self.safeguards.sizes(clients, sizes)
            if unknown_as_mean:
                mean = sum(sizes) / sum(size > 0 for size in sizes)
                sizes = [size or mean for size in sizes]
        return importances(self.kind, sizes)

    @property
    def sizes_are_known(self) -> bool:
        """Whether p_i are known before clients reply."""
        return self.kind != "samples" or all(client.described for client in self._run.clients)
