"""What clients keep for themselves, such as a model of their own, in the checkpoint of a simulation.

Flower keeps a client's ``context.state`` as long as a run lasts. A simulated run that is resumed begins with new
clients, so its server asks for what they keep when a checkpoint is written, and hands it back before the first
round. Devices are never asked: what they keep stays where it is.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.serverapp import Grid
from numpy.typing import NDArray

from strategies.clients.roster import Client
from strategies.flower import messages
from strategies.flower.arrays import Layout, unpack
from strategies.flower.exchange import exchange

_STATE, _CLIENTS = "personal", "personal-clients"  # under which a strategy's state holds it


@dataclass(frozen=True, eq=False)
class Kept:
    """Models (M, D) of clients, in the narrowest dtype that holds them exactly, and whose they are, by index."""

    models: NDArray[Any]
    clients: Sequence[int]

    @classmethod
    def asked(
        cls, grid: Grid, clients: Sequence[Client], layout: Layout, timeout: float
    ) -> tuple["Kept", str]:
        """Ask clients; return what they keep, and why a client can't say, "" if all can.

        It is waited for also when the run is told to stop: half a state is none.
        """
        replies = exchange(grid, [_request(client, timeout) for client in clients], timeout)
        found: dict[int, NDArray[Any]] = {}
        silent = ""
        for client in clients:
            reply = replies.get(client.node_id)
            if reason := _reason_against(reply):
                silent = reason
            elif reply is not None and (arrays := messages.arrays_of(reply)) is not None:
                found[client.index] = _flat(arrays, layout)
        empty = np.empty((0, layout.size), layout.narrow)
        return cls(np.stack(list(found.values())) if found else empty, list(found)), silent

    def hand_back(self, grid: Grid, clients: Sequence[Client], layout: Layout, timeout: float) -> str:
        """Give clients what is theirs; return why one doesn't take it, "" if all do."""
        rows = {index: row for row, index in enumerate(self.clients)}
        requests = [
            _request(
                client, timeout, layout.to_record(np.asarray(self.models[rows[client.index]], np.float64))
            )
            for client in clients
            if client.index in rows
        ]
        replies = exchange(grid, requests, timeout)
        reasons = [_reason_against(replies.get(request.metadata.dst_node_id)) for request in requests]
        return next(filter(None, reasons), "")

    def state(self) -> dict[str, Any]:
        """Return what a strategy adds to its ``state``."""
        return {_STATE: self.models, _CLIENTS: list(self.clients)}

    @classmethod
    def restored(cls, state: Mapping[str, Any]) -> "Kept | None":
        """Return what such a state holds; None if it holds none."""
        return cls(state[_STATE], state[_CLIENTS]) if state.get(_CLIENTS) else None


def _request(client: Client, timeout: float, arrays: ArrayRecord | None = None) -> Message:
    config = ConfigRecord({messages.CLIENT: client.index})
    return messages.request(messages.ASK_KEPT, client.node_id, config, ttl=timeout, arrays=arrays)


def _reason_against(reply: Message | None) -> str:
    if reply is None:
        return messages.NO_REPLY
    return messages.reason_of(reply) if reply.has_error() else ""


def _flat(arrays: ArrayRecord, layout: Layout) -> NDArray[Any]:
    """Flatten a record of the layout as it is: a model that has diverged is kept, too."""
    return np.concatenate([unpack(arrays[name]).ravel().astype(layout.narrow) for name in layout.names])
