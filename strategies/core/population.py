"""The population of a run: which clients count, those that are away included, and their importances p_i."""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, MetricRecord
from flwr.serverapp import Grid

from strategies.clients.by_index import INDEX, ByIndex
from strategies.clients.client_graph import ClientGraph
from strategies.clients.client_statistics import ClientStatistics
from strategies.clients.roster import ABSENT, Client, Roster
from strategies.clients.weights import Weights
from strategies.core.run_state import RunState
from strategies.updates.safeguards import Safeguards

log = logging.getLogger("flwr.strategies")

# The most rounds in a row that a client may be away and count. The last update of a client that is gone for good
# would be applied forever; a device that sleeps, or is charged once a day, is back before.
ABSENCE = 100

_COUNTING = "counting"  # in a state


# Beside these there is `adjacency`, which needs a graph: strategies/clients/client_graph.py.
IMPORTANCES = ("samples", "uniform")


def importances(kind: str, num_examples: Sequence[float] | Weights) -> Weights:
    """Return the importances p_i, shape (C,), summing to 1.

    Parameters
    ----------
    kind : str
        ``samples`` (n_i / Σ n) or ``uniform`` (1 / C).
    num_examples : sequence of int
        n_i, number of samples of each client.
    """
    if kind == "uniform":
        return np.full(len(num_examples), 1 / len(num_examples))
    if kind == "samples":
        sizes = np.asarray(num_examples, dtype=np.float64)
        if not (total := sizes.sum()) > 0:
            raise ValueError("client_weights = 'samples': no client has any samples")
        return np.asarray(sizes / total, dtype=np.float64)
    raise ValueError(f"client_weights = {kind!r}: allowed are {', '.join(IMPORTANCES)}")


class AbsentClients:
    """Clients that go on counting while they are away, where a method corrects for uneven participation.

    The ``availability`` of a simulation leaves clients connected; a device is away when its node isn't connected.
    What the method remembers of an absent client goes on counting with its p_i: otherwise the clients that happen to
    be present would have the model to themselves. A client counts while it is away if its work has counted before,
    for ``ABSENCE`` rounds in a row. With a graph of clients no absent client counts.
    """

    def __init__(self, run: RunState, client_stats: ClientStatistics) -> None:
        self._run, self._client_stats = run, client_stats
        # By index: who counts and isn't there, and since which round.
        self._absent: dict[int, tuple[Client, int]] = {}

    def active_clients(self, clients: Sequence[Client]) -> Sequence[Client]:
        """Return the clients that count, by index: those that are connected, and those that count while away."""
        if not self._absent:
            return clients
        absent = [client for client, _ in self._absent.values()]
        return sorted([*clients, *absent], key=lambda client: client.index)

    def refresh(self, clients: Sequence[Client]) -> None:
        """Note which clients have counted and are away now, and drop those that have been away for too long."""
        here, number = {client.index for client in clients}, self._run.aggregations + 1
        known = {client.index: (client, number) for client in self._run.clients} | self._absent
        counted = self._have_counted()
        gone = {i: known[i] for i in (known.keys() - here) & counted}
        self._absent = {i: (client, since) for i, (client, since) in gone.items() if number - since < ABSENCE}
        for index in sorted(gone.keys() - self._absent.keys()):
            client = gone[index][0]
            log.warning(
                "%s has been away for %d rounds: it doesn't count until it is back",
                client,
                ABSENCE,
                extra=client.fields,
            )

    def _have_counted(self) -> set[int]:
        return {index for index, account in self._client_stats.items() if account.accepted}

    def state(self) -> dict[str, Any]:
        """Return rows of the clients that have counted: index, size (NaN: unknown), first round away or 0."""
        since, counted = {index: first for index, (_, first) in self._absent.items()}, self._have_counted()
        clients = [client for client in self.active_clients(self._run.clients) if client.index in counted]
        # A size that isn't known, None, is NaN in float64.
        rows = [(client.index, client.num_examples, since.get(client.index, 0)) for client in clients]
        return {_COUNTING: np.array(rows, dtype=np.float64).reshape(-1, 3)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take the clients of a state as away, until they are seen connected."""
        first = state["aggregations"] + 1
        self._absent = {}
        for index, size, since in np.asarray(state.get(_COUNTING, np.empty((0, 3)))).tolist():
            client = Client(ABSENT, int(index), None if np.isnan(size) else size, MetricRecord())
            self._absent[client.index] = client, int(since) or first


class Population:
    """The clients of a run.

    Parameters
    ----------
    kind : str
        The kind of importance: ``samples``, ``uniform`` or ``adjacency``.
    graph : ClientGraph, optional
        The graph of clients, with importance ``adjacency``.
    absent : AbsentClients, optional
        The clients that count while they are away, where a method corrects for participation.

    Attributes
    ----------
    listeners : list of callable
        Called with the connected clients each time before requests are made.
    """

    def __init__(
        self,
        run: RunState,
        roster: Roster,
        safeguards: Safeguards,
        kind: str,
        graph: ClientGraph | None = None,
        absent: AbsentClients | None = None,
    ) -> None:
        self._run, self.roster, self.safeguards = run, roster, safeguards
        self.kind, self.graph, self.absent = kind, graph, absent
        self.listeners: list[Callable[[Sequence[Client]], None]] = []

    def refresh(self, grid: Grid, config: ConfigRecord, *, wait: bool = True) -> ByIndex[Client]:
        """Return the connected clients (of a graph: its own). Without ``wait`` new clients join when they answer."""
        run = self._run
        clients = self.roster.refresh(grid, config) if wait else self.roster.poll(grid, config)
        if self.graph is not None and clients:
            self.graph.guarded = self.safeguards.active
            own = self.graph.refresh(grid, clients, config, run.timeout, run.should_stop)
            clients = ByIndex(own)
        run.scheduler.register_clients(clients)
        if clients:  # with no client the run is stopped
            if self.absent is not None:
                self.absent.refresh(clients)
            for listener in self.listeners:
                listener(clients)
        return clients

    def come(self, before: ByIndex[Client], clients: ByIndex[Client]) -> list[tuple[Client, bool]]:
        """Return the clients that weren't connected before as this node, and whether another node was in their place.

        ``before`` are the connected clients of the last call, or at the start, and ``clients`` those of now.
        """
        changed = self.roster.take_changed()
        if changed is None or self.graph is not None:  # the clients of a graph aren't all that are connected
            nodes, indices = {client.node_id for client in before}, set(map(INDEX, before))
            new = [client for client in clients if client.node_id not in nodes]
            return [(client, client.index in indices) for client in new]
        came = []
        for index in sorted(changed):
            (_, was), (_, client) = before.find(index), clients.find(index)
            if client is not None and (was is None or was.node_id != client.node_id):
                came.append((client, was is not None))
        return came

    @property
    def active_clients(self) -> Sequence[Client]:
        """The clients that count now: those that are there, and with ``absent`` some that aren't."""
        clients = self._run.clients
        return clients if self.absent is None else self.absent.active_clients(clients)

    @property
    def version(self) -> object:
        """What p_i depend on beside which clients count, and their sizes: the state of the graph."""
        return None if self.graph is None else self.graph.version

    def client_weights(self) -> dict[int, float]:
        """Return p_i of the clients that count now, by index."""
        if not (clients := self.active_clients):
            return {}
        return dict(zip((c.index for c in clients), self.client_weights_of(clients).tolist(), strict=True))

    def client_weights_of(self, clients: Sequence[Client]) -> Weights:
        """Return p_i (n,) of some clients, with sum 1."""
        if self.graph is not None:
            return self.graph.weights(clients)
        # Sizes may come with the replies: a client that hasn't told its own counts as the mean of the others.
        sizes = [client.num_examples for client in clients]
        if not any(sizes):
            return importances("uniform", [1] * len(clients))
        return self.by_size(clients, sizes, unknown_as_mean=True)

    @property
    def follows_from_sizes(self) -> bool:
        """Whether p_i follow from the clients' sizes alone, where all are known: without a graph and safeguards."""
        return self.graph is None and not self.safeguards.active

    def client_weights_of_sizes(self, sizes: Weights) -> Weights:
        """Return p_i (n,) by the sizes n_i (n,), where they follow from the sizes alone."""
        return importances(self.kind if sizes.any() else "uniform", sizes)

    def by_size(
        self, clients: Sequence[Client], sizes: Sequence[float | None], *, unknown_as_mean: bool = False
    ) -> Weights:
        """Return p_i (n,) of clients by their sizes; one that is unknown, None, counts 0, or as the mean."""
        known = [size or 0 for size in sizes]
        if self.kind == "samples":
            known = list(self.safeguards.sizes(clients, known, self.active_clients))
            if unknown_as_mean and None in sizes:
                mean = sum(known) / sum(size > 0 for size in known)
                known = [mean if said is None else size for said, size in zip(sizes, known, strict=True)]
        return importances(self.kind, known)
