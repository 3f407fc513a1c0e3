"""The similarity graph of the connected clients, built from the directions that clients send in a handshake.

The spectral method uses the graph, and so does any strategy with ``client_weights = "adjacency"``.
Source: Buttaci 2024, algorithm 2, lines 1-8; the maths is in strategies/clients/graph.py.
"""

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

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


class ClientGraph:
    """Directions of the clients, and their graph; a client that sends no valid direction is excluded from the run.

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
    directions : Matrix
        (C, d), unit vectors.
    misalignment, adjacency : Matrix
        (C, C).
    """

    def __init__(self, floor: float = graph.FLOOR, neighbours: int = 0, *, guarded: bool = False) -> None:
        if not 0 < floor < 1:
            raise ValueError(f"message_floor = {floor}: must be between 0 and 1")
        if neighbours < 0:
            raise ValueError(f"neighbours = {neighbours}: must be 0 (all) or more")
        self.floor = floor
        self.neighbours = neighbours
        self.guarded = guarded
        self.reset()

    def reset(self) -> None:
        """Forget the clients of an earlier run."""
        self._known: dict[int, Vector] = {}  # by node id
        self._silent: set[int] = set()
        self._asked: Counter[int] = Counter()  # number of requests, by client index
        self._mods: dict[int, str] = {}  # error of a mod that refuses the request, by node id
        self._nodes: tuple[int, ...] = ()
        self.clients: tuple[int, ...] = ()
        self.directions = self.misalignment = self.adjacency = np.empty((0, 0))

    def refresh(
        self,
        grid: Grid,
        clients: Sequence[Client],
        config: ConfigRecord,
        timeout: float,
        stopped: Callable[[], bool] = never,
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
            requests = [
                messages.request(
                    messages.ASK_DIRECTION,
                    client.node_id,
                    ConfigRecord({**config, messages.CLIENT: client.index}),
                    ttl=timeout,
                )
                for client in new
            ]
            replies = exchange(grid, requests, timeout, stopped)
            if stopped():
                return []
            self._take([(client, replies.get(client.node_id)) for client in new])
        members = [client for client in clients if client.node_id in self._known]
        if not members:
            raise RunError(f"no client sent a direction to place it in the graph; {self._why(clients)}")
        if tuple(client.node_id for client in members) != self._nodes:
            self._nodes = tuple(client.node_id for client in members)
            vectors = np.stack([self._known[client.node_id] for client in members])
            self.build([client.index for client in members], vectors)
            log.info(
                "graph of %d clients, homogeneity %.4f%s",
                len(members),
                graph.homogeneity(self.adjacency),
                "; no two count as more alike than the median pair (safeguards)" if self.guarded else "",
            )
        return members

    def build(self, clients: Sequence[int], vectors: graph.Matrix) -> None:
        """Compute the graph of clients, given by index, from their directions (C, d), unit vectors."""
        self.clients, self.directions = tuple(clients), vectors
        self.misalignment = graph.misalignment(vectors)
        floor = max(self.floor, self._usual_misalignment()) if self.guarded else self.floor
        floor = min(floor, float(np.nextafter(1.0, 0.0)))  # the median pair may be opposite to each other
        self.adjacency = graph.sparsify(graph.adjacency(self.misalignment, floor), self.neighbours)

    def _usual_misalignment(self) -> float:
        """Return the misalignment of the median pair of clients."""
        pairs = self.misalignment[np.triu_indices(len(self.clients), 1)]
        return float(np.median(pairs)) if len(pairs) else 0.0

    def weights(self, clients: Sequence[Client]) -> Vector:
        """Return the weights p_i (n,) of n clients, normalised to sum to 1; 0 for a client that isn't in the graph.

        Without rounds a client may count for a while after its node, and with it its place in the graph, is gone.
        """
        share = dict(zip(self.clients, graph.client_weights(self.adjacency), strict=True))
        chosen = np.array([share.get(client.index, 0.0) for client in clients])
        return chosen / chosen.sum() if chosen.sum() > 0 else np.full(len(chosen), 1 / len(chosen))

    def state(self) -> dict[str, Any]:
        """Return the directions by node and the number of requests, so that a resumed run asks no node again.

        The state calls directions ``messages``, the paper's word, as earlier versions did.
        """
        known, asked = list(self._known.values()), [list(each) for each in self._asked.items()]
        return {"graph-nodes": list(self._known), "graph-messages": np.array(known), "graph-asked": asked}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take up the directions of an earlier run."""
        vectors = np.array(state["graph-messages"])
        self._known = dict(zip(state["graph-nodes"], vectors, strict=True))
        asked = state.get("graph-asked", [(0, 1)])  # an earlier version asked once, and saved no count
        self._asked = Counter({int(index): int(times) for index, times in asked})

    def most_asked(self) -> int:
        """Return the largest number of requests to one client; a new node, or one without a reply, is asked again."""
        return max(self._asked.values(), default=0)

    def snapshot(self) -> dict[str, np.ndarray]:
        """Return the graph's arrays by their names in graph.npz, with the eigenvalues of the Laplacian."""
        return {
            "clients": np.array(self.clients),
            "messages": self.directions,
            "misalignment": self.misalignment,
            "adjacency": self.adjacency,
            "eigenvalues": graph.eigenvalues(graph.laplacian(self.adjacency)),
        }

    def _take(self, replies: Sequence[tuple[Client, Message | None]]) -> None:
        """Keep the valid directions of the most frequent length, or of the graph's length once there is a graph."""
        read: dict[int, Vector | ValueError] = {}
        for client, reply in replies:
            if reply is not None and reply.has_error() and reply.error.code == MOD_FAILED:
                self._mods[client.node_id] = messages.reason_of(reply)
            try:
                read[client.node_id] = self._read(reply)
            except ValueError as error:
                read[client.node_id] = error
        sizes = Counter(len(m) for m in (self._known or read).values() if isinstance(m, np.ndarray))
        size = sizes.most_common(1)[0][0] if sizes else 0
        for client, _ in replies:
            m = read[client.node_id]
            if isinstance(m, np.ndarray) and len(m) != size:
                m = ValueError(
                    f"its direction must be a finite vector of shape ({size},), not zero; it has shape {m.shape}"
                )
            if isinstance(m, np.ndarray):
                self._known[client.node_id] = m
            else:
                self._silent.add(client.node_id)
                log.warning("client %s takes no part: %s", client.located, m, extra=client.fields)

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

    def _read(self, reply: Message | None) -> Vector:
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
