"""The similarity graph of the connected clients: of directions that clients send in a handshake, or of last updates.

The spectral method uses the graph, and so does any strategy with ``client_weights = "adjacency"``.
Source: Buttaci 2024, algorithm 2, lines 1-8, where the directions are those of the clients' data; the maths is in
strategies/clients/graph.py.

A graph of last updates (``graph_source = "updates"`` of the spectral methods, this project's own) asks no client for
anything, and changes with every aggregation. A client whose update isn't known yet has edges of one weight to all
others, the mean of the edges between known clients (1 while fewer than two are known), so that it weighs 1/C.
"""

import logging
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from flwr.app import ConfigRecord, Message
from flwr.serverapp import Grid

from strategies.clients import graph
from strategies.clients.roster import Client
from strategies.flower import messages
from strategies.flower.arrays import Vector
from strategies.flower.errors import RunError
from strategies.flower.exchange import exchange, never
from strategies.flower.internals import MOD_FAILED

log = logging.getLogger("flwr.strategies")


class ClientGraph(ABC):
    """The graph of clients, from the misalignment of each two of them.

    Parameters
    ----------
    floor : float
        ε, the least misalignment: clients with equal data have misalignment 0, whose logarithm is infinite.
    neighbours : int
        Number of edges kept from each client to the clients most similar to it; 0 keeps all.
    guarded : bool
        Cap the similarity of two clients at the similarity of the median pair: otherwise copies of one device, whose
        misalignment is 0, outweigh the others. Half of all pairs then have the largest similarity, so that no
        client weighs more than 2/C, and k clients at most 2k/C, whatever they send (with all edges kept).

    Attributes
    ----------
    clients : tuple of int
        Indices of the C clients of the graph, ascending: the order of all arrays below.
    misalignment, adjacency : Matrix
        (C, C), at present.
    """

    #: Whether the graph follows from the directions of clients' data, which clients are asked for.
    by_data: ClassVar[bool]

    def __init__(self, floor: float = graph.FLOOR, neighbours: int = 0, *, guarded: bool = False) -> None:
        if not 0 < floor < 1:
            raise ValueError(f"message_floor = {floor}: must be between 0 and 1")
        if neighbours < 0:
            raise ValueError(f"neighbours = {neighbours}: must be 0 (all) or more")
        self.floor = floor
        self.neighbours = neighbours
        self.guarded = guarded
        self.clients: tuple[int, ...] = ()
        self._misalignment = self._adjacency = np.empty((0, 0))

    @property
    def version(self) -> tuple[tuple[int, ...], int]:
        """The graph's version: its clients, and how often their directions have changed."""
        return self.clients, 0

    @property
    def num_bytes(self) -> int:
        """The bytes of the clients' vectors of which the graph is made, where these are as long as a model."""
        return 0

    @property
    def misalignment(self) -> graph.Matrix:
        """mis(i, j) (C, C) of the clients."""
        return self._misalignment

    @property
    def adjacency(self) -> graph.Matrix:
        """A_ij (C, C) of the clients; another array whenever the graph has changed."""
        return self._adjacency

    @abstractmethod
    def refresh(
        self,
        grid: Grid,
        clients: Sequence[Client],
        config: ConfigRecord,
        timeout: float,
        should_stop: Callable[[], bool] = never,
    ) -> list[Client]:
        """Return the clients that are in the graph, of those that are connected."""

    def _of(self, misalignment: graph.Matrix) -> graph.Matrix:
        """Return A_ij (C, C)."""
        floor = self.floor
        if self.guarded and len(misalignment) > 1:  # by the misalignment of the median pair of clients
            floor = max(floor, float(np.median(misalignment[np.triu_indices(len(misalignment), 1)])))
        floor = min(floor, float(np.nextafter(1.0, 0.0)))  # the median pair may be opposite to each other
        return graph.sparsify(graph.adjacency(misalignment, floor), self.neighbours)

    def weights(self, clients: Sequence[Client]) -> Vector:
        """Return the weights p_i (n,) of n clients, normalised to sum to 1; 0 for a client that isn't in the graph.

        Without rounds a client may count for a while after its node, and with it its place in the graph, is gone.
        """
        share = dict(zip(self.clients, graph.client_weights(self.adjacency), strict=True))
        chosen = np.array([share.get(client.index, 0.0) for client in clients])
        return chosen / chosen.sum() if chosen.sum() > 0 else np.full(len(chosen), 1 / len(chosen))

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """Return what the graph is made of, for a checkpoint."""

    @abstractmethod
    def restore(self, state: Mapping[str, Any]) -> None:
        """Take up what the graph of an earlier run was made of."""

    def most_asked(self) -> int:
        """Return the largest number of requests for a direction to one client."""
        return 0

    def snapshot(self) -> dict[str, np.ndarray]:
        """Return the graph's arrays by their names in graph.npz, with the eigenvalues of the Laplacian."""
        return {
            "clients": np.array(self.clients),
            "misalignment": self.misalignment,
            "adjacency": self.adjacency,
            "eigenvalues": graph.eigenvalues(graph.laplacian(self.adjacency)),
        }


class DirectionGraph(ClientGraph):
    """The graph of the clients' data; a client that sends no valid direction is excluded from the run.

    Attributes
    ----------
    directions : Matrix
        (C, d), unit vectors.
    """

    by_data = True

    def __init__(self, floor: float = graph.FLOOR, neighbours: int = 0, *, guarded: bool = False) -> None:
        super().__init__(floor, neighbours, guarded=guarded)
        self._known: dict[int, Vector] = {}  # by node id
        self._silent: set[int] = set()
        self._asked: Counter[int] = Counter()  # number of requests, by client index
        self._mods: dict[int, str] = {}  # error of a mod that refuses the request, by node id
        self._nodes: tuple[int, ...] = ()
        self.directions = np.empty((0, 0))

    def refresh(
        self,
        grid: Grid,
        clients: Sequence[Client],
        config: ConfigRecord,
        timeout: float,
        should_stop: Callable[[], bool] = never,
    ) -> list[Client]:
        """Ask new clients for their directions; return the clients that are in the graph.

        Raises
        ------
        RunError
            If no client sent a valid direction.
        """
        new = [c for c in clients if c.node_id not in self._known and c.node_id not in self._silent]
        if new:
            self._asked.update(client.index for client in new)
            requests = [_direction_request(client, config, timeout) for client in new]
            replies = exchange(grid, requests, timeout, should_stop)
            if should_stop():
                return []
            self._take([(client, replies.get(client.node_id)) for client in new])
        members = [client for client in clients if client.node_id in self._known]
        if not members:
            raise RunError(f"no client sent a direction to place it in the graph; {self._why(clients)}")
        self._build_anew(members)
        return members

    def _build_anew(self, members: Sequence[Client]) -> None:
        """Compute the graph of clients, unless it is the present one."""
        nodes = tuple(client.node_id for client in members)
        if nodes == self._nodes:
            return
        self._nodes = nodes
        self.build([client.index for client in members], np.stack([self._known[node] for node in nodes]))
        log.info(
            "graph of %d clients, homogeneity %.4f%s",
            len(members),
            graph.homogeneity(self.adjacency),
            "; no two count as more alike than the median pair (safeguards)" if self.guarded else "",
        )

    def build(self, clients: Sequence[int], directions: graph.Matrix) -> None:
        """Compute the graph of clients, given by index, from their directions (C, d), unit vectors."""
        self.clients, self.directions = tuple(clients), directions
        self._misalignment = graph.misalignment(directions)
        self._adjacency = self._of(self._misalignment)

    def state(self) -> dict[str, Any]:
        """Return the directions by node and the number of requests, so that a resumed run asks no node again."""
        known, asked = list(self._known.values()), [list(each) for each in self._asked.items()]
        return {"graph-nodes": list(self._known), "graph-messages": np.array(known), "graph-asked": asked}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take up the directions of an earlier run."""
        vectors = np.array(state["graph-messages"])
        self._known = dict(zip(state["graph-nodes"], vectors, strict=True))
        self._asked = Counter({int(index): int(times) for index, times in state["graph-asked"]})

    def most_asked(self) -> int:
        """Return the largest number of requests to one client; a new node, or one without a reply, is asked again."""
        return max(self._asked.values(), default=0)

    def snapshot(self) -> dict[str, np.ndarray]:
        """Return the graph's arrays by their names in graph.npz: with the directions, as ``messages``."""
        return {"clients": np.array(self.clients), "messages": self.directions} | super().snapshot()

    def _take(self, replies: Sequence[tuple[Client, Message | None]]) -> None:
        """Keep the valid directions of the most frequent length, or of the graph's length once there is a graph."""
        read, faults = dict[int, Vector](), dict[int, str]()
        for client, reply in replies:
            if reply is not None and reply.has_error() and reply.error.code == MOD_FAILED:
                self._mods[client.node_id] = messages.reason_of(reply)
            try:
                read[client.node_id] = _read(reply)
            except ValueError as error:
                faults[client.node_id] = str(error)
        sizes = Counter(map(len, (self._known or read).values())).most_common(1)
        for node_id, m in read.items():
            if len(m) == sizes[0][0]:
                self._known[node_id] = m
            else:
                shape = f"of shape ({sizes[0][0]},), not zero; it has shape {m.shape}"
                faults[node_id] = f"its direction must be a finite vector {shape}"
        self._silent |= faults.keys()
        for client in [client for client, _ in replies if client.node_id in faults]:
            why = faults[client.node_id]
            log.warning("client %s takes no part: %s", client.display_name, why, extra=client.fields)

    def _why(self, clients: Sequence[Client]) -> str:
        """Return the reason why no client sent a direction."""
        if not clients or any(client.node_id not in self._mods for client in clients):
            return (
                "the log names the reasons; strategies.client.direction_of makes a ClientApp's handler of "
                "query.direction, in three lines"
            )
        return (
            f"a mod of the app doesn't let the request for it pass ({self._mods[clients[0].node_id]}); mods for one "
            "handler alone are @app.train(mods=[…])"
        )


def _direction_request(client: Client, config: ConfigRecord, timeout: float) -> Message:
    fields = ConfigRecord({**config, messages.CLIENT: client.index})
    return messages.request(messages.ASK_DIRECTION, client.node_id, fields, ttl=timeout)


def _read(reply: Message | None) -> Vector:
    """Return the direction (d,) of a reply, a unit vector; raise ValueError if the reply has none."""
    if reply is None:
        raise ValueError("it didn't answer the request for its direction")
    if reply.has_error():
        raise ValueError(messages.reason_of(reply))
    record = messages.arrays_of(reply, messages.DIRECTION)
    if record is None or len(record) != 1:
        raise ValueError(f"its reply needs a record {messages.DIRECTION!r} of one array")
    try:
        vector = np.asarray(next(iter(record.values())).numpy(), dtype=np.float64)
    except Exception as error:  # whatever bytes a client sends must not stop the server
        raise ValueError(f"its direction can't be read: {error}") from error
    largest = np.abs(vector).max(initial=0.0)
    if vector.ndim != 1 or not (np.isfinite(largest) and largest > 0):
        raise ValueError(f"its direction must be a finite vector, not zero; it has shape {vector.shape}")
    vector = vector / largest  # so that the squares neither overflow nor lose their digits
    return np.asarray(vector / np.linalg.norm(vector))
