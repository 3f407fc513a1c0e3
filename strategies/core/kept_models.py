"""What clients keep for themselves, such as a model of their own, in the checkpoint of a simulation.

Flower keeps a client's ``context.state`` as long as a run lasts. A simulated run that is resumed begins with new
clients, so its server asks for what they keep when a checkpoint is written, and hands it back before the first
round. Devices are never asked: what they keep stays where it is.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.serverapp import Grid
from numpy.typing import NDArray

from strategies.clients.roster import Client
from strategies.core.run_state import RunState
from strategies.flower import messages
from strategies.flower.arrays import Layout, unpack
from strategies.flower.exchange import exchange
from strategies.flower.grids import DEPLOYMENT, engine_of

_STATE, _CLIENTS = "personal", "personal-clients"  # under which a strategy's state holds it


@dataclass(frozen=True, eq=False)
class Kept:
    """Models (M, D) that clients keep, in the narrowest dtype that holds them exactly, and the clients' indices."""

    models: NDArray[Any]
    clients: Sequence[int]

    @classmethod
    def asked(
        cls, grid: Grid, clients: Sequence[Client], layout: Layout, timeout: float, number: int
    ) -> tuple["Kept", str]:
        """Return the models that clients keep for run ``number``, and why a client's couldn't be got; "" if all were.

        The replies are waited for even if the run is told to stop, as a part of the models is no state.
        """
        replies = exchange(grid, [_request(client, timeout, number) for client in clients], timeout)
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

    def hand_back(
        self, grid: Grid, clients: Sequence[Client], layout: Layout, timeout: float, number: int
    ) -> str:
        """Send clients their models; return why a client refused its model, "" if none did."""
        rows = {index: row for row, index in enumerate(self.clients)}
        requests = [
            _request(
                client,
                timeout,
                number,
                layout.to_record(np.asarray(self.models[rows[client.index]], np.float64)),
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
        """Return the models in a strategy's state; None if it has none."""
        return cls(state[_STATE], state[_CLIENTS]) if state.get(_CLIENTS) else None


class KeptByClients:
    """The models that clients keep, as a part of a strategy's state; a resumed simulation hands them back.

    Parameters
    ----------
    layout : callable
        Returns the layout of the model that each client keeps.
    number : callable
        Returns the run's number, under which clients keep their models.
    """

    def __init__(self, run: RunState, layout: Callable[[], Layout], number: Callable[[], int]) -> None:
        self._run, self._layout, self._number = run, layout, number
        self._kept: Kept | None = None

    @property
    def on_devices(self) -> bool:
        """Whether clients are devices, which are never asked."""
        return self._run.grid is not None and engine_of(self._run.grid) == DEPLOYMENT

    def state(self) -> dict[str, Any]:
        """Return what the clients of a simulation keep; {} on devices."""
        run = self._run
        if run.grid is None or self.on_devices:
            return {}
        kept, silent = Kept.asked(run.grid, run.clients, self._layout(), run.timeout, self._number())
        if silent:
            run.warn_once(
                "clients don't say what they keep (%s): a run that goes on begins their own models anew",
                silent,
            )
        return kept.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take what clients kept from a state, until they are connected."""
        self._kept = Kept.restored(state)

    def hand_back(self, clients: Sequence[Client]) -> None:
        """Return to the clients of a resumed run what they kept, once they are connected."""
        kept, self._kept, run = self._kept, None, self._run
        if kept is None or run.grid is None:
            return
        if silent := kept.hand_back(run.grid, clients, self._layout(), run.timeout, self._number()):
            run.warn_once("clients don't take back what they kept (%s): it begins anew", silent)


def _request(client: Client, timeout: float, number: int, arrays: ArrayRecord | None = None) -> Message:
    config = ConfigRecord({messages.CLIENT: client.index, messages.KEPT_FOR: number})
    return messages.request(messages.ASK_KEPT, client.node_id, config, ttl=timeout, arrays=arrays)


def _reason_against(reply: Message | None) -> str:
    if reply is None:
        return messages.NO_REPLY
    return messages.reason_of(reply) if reply.has_error() else ""


def _flat(arrays: ArrayRecord, layout: Layout) -> NDArray[Any]:
    """Flatten a record of the layout as it is: a model that has diverged is kept, too."""
    return np.concatenate([unpack(arrays[name]).ravel().astype(layout.narrow) for name in layout.names])
