"""The graph of the clients that are there: the handshake for their directions, and what follows from them.

Used by the spectral method and by any strategy whose clients are weighted by ``adjacency``.
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
    """Directions of the clients, and their graph; a client that sends no valid direction takes no part.

    Parameters
    ----------
    floor : float
        ε, the least misalignment: clients with equal data have none, and its logarithm is infinite.
    neighbours : int
        Edges kept to each client's most similar ones; 0: all.
    guarded : bool
        Take no two clients as more alike than the median pair is: otherwise copies of one device, whose
        misalignment is 0, outweigh the others. As half of all pairs are then tied by the most that there is, no
        client weighs more than 2/C, and k of them no more than 2k/C, whatever they send (with all edges kept).

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
        self._asked: Counter[int] = Counter()  # how often, by client index
        self._mods: dict[int, str] = {}  # what a mod in front of a client's app says against the request
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
        """Ask the clients that are new for their directions; return those that are in the graph.

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
        """Work the graph out for clients, by index, with these directions (C, d), unit vectors."""
        self.clients, self.directions = tuple(clients), vectors
        self.misalignment = graph.misalignment(vectors)
        floor = max(self.floor, self._usual_misalignment()) if self.guarded else self.floor
        floor = min(floor, float(np.nextafter(1.0, 0.0)))  # the median pair may be opposite to each other
        self.adjacency = graph.sparsify(graph.adjacency(self.misalignment, floor), self.neighbours)

    def _usual_misalignment(self) -> float:
        """Return that of the median pair."""
        pairs = self.misalignment[np.triu_indices(len(self.clients), 1)]
        return float(np.median(pairs)) if len(pairs) else 0.0

    def weights(self, clients: Sequence[Client]) -> Vector:
        """Return p_i of some of the graph's clients, summing to 1 over them."""
        share = dict(zip(self.clients, graph.client_weights(self.adjacency), strict=True))
        chosen = np.array([share[client.index] for client in clients])
        return chosen / chosen.sum() if chosen.sum() > 0 else np.full(len(chosen), 1 / len(chosen))

    def state(self) -> dict[str, Any]:
        """Return what was learned from whom, for a run that goes on: the same nodes aren't asked again.

        In files directions are ``messages``, the paper's word, which earlier runs have written.
        """
        known, asked = list(self._known.values()), [list(each) for each in self._asked.items()]
        return {"graph-nodes": list(self._known), "graph-messages": np.array(known), "graph-asked": asked}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take up the directions of an earlier run."""
        vectors = np.array(state["graph-messages"])
        self._known = dict(zip(state["graph-nodes"], vectors, strict=True))
        asked = state.get("graph-asked", [(0, 1)])  # an earlier version didn't count, and asked each once
        self._asked = Counter({int(index): int(times) for index, times in asked})

    def most_asked(self) -> int:
        """Return how often a client has been asked at most: again as another node, or as it was silent before."""
        return max(self._asked.values(), default=0)

    def snapshot(self) -> dict[str, np.ndarray]:
        """Return the graph's arrays by the names they have in graph.npz, the Laplacian's eigenvalues among them."""
        return {
            "clients": np.array(self.clients),
            "messages": self.directions,
            "misalignment": self.misalignment,
            "adjacency": self.adjacency,
            "eigenvalues": graph.eigenvalues(graph.laplacian(self.adjacency)),
        }

    def _take(self, replies: Sequence[tuple[Client, Message | None]]) -> None:
        """Keep the valid directions, those of the shape that most have (the graph's, once there is one)."""
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
        """Say why none of them sent any."""
        if not clients or any(client.node_id not in self._mods for client in clients):
            return "the log names the reasons"
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
