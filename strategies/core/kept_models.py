"""What clients keep for themselves, such as a model of their own, in the checkpoint of a simulation.

Flower keeps a client's ``context.state`` as long as a run lasts. A simulated run that is resumed begins with new
clients, so its server asks for what they keep when a checkpoint is written, and hands it back before the first
round. Devices are never asked: what they keep stays where it is.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message
from numpy.typing import NDArray

from strategies.clients.roster import Client
from strategies.core.run_state import RunState
from strategies.flower import messages
from strategies.flower.arrays import Layout, unpack
from strategies.flower.exchange import exchange
from strategies.flower.grids import DEPLOYMENT, engine_of

_STATE, _CLIENTS = "personal", "personal-clients"  # under which a strategy's state holds it


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
        # Models (D,) of a state by client index, until clients are connected.
        self._kept: dict[int, NDArray[Any]] = {}

    @property
    def on_devices(self) -> bool:
        """Whether clients are devices, which are never asked."""
        return self._run.grid is not None and engine_of(self._run.grid) == DEPLOYMENT

    def state(self) -> dict[str, Any]:
        """Return what the clients of a simulation keep, in the narrowest dtype that holds it exactly; {} on devices.

        The replies are waited for even if the run is told to stop, as a part of the models is no state.
        """
        run = self._run
        if run.grid is None or self.on_devices:
            return {}
        requests, layout = [self._request(client) for client in run.clients], self._layout()
        replies = exchange(run.grid, requests, run.timeout)
        found: dict[int, NDArray[Any]] = {}
        silent = ""
        for client in run.clients:
            reply = replies.get(client.node_id)
            if reason := _reason_against(reply):
                silent = reason
            elif reply is not None and (arrays := messages.arrays_of(reply)) is not None:
                found[client.index] = _flat(arrays, layout)
        if silent:
            run.warn_once(
                "clients don't say what they keep (%s): a run that goes on begins their own models anew",
                silent,
            )
        empty = np.empty((0, layout.size), layout.narrow)
        return {_STATE: np.stack(list(found.values())) if found else empty, _CLIENTS: list(found)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take what clients kept from a state, until they are connected."""
        self._kept = dict(zip(state.get(_CLIENTS, ()), state.get(_STATE, ()), strict=True))

    def hand_back(self, clients: Sequence[Client]) -> None:
        """Return to the clients of a resumed run what they kept, once they are connected."""
        kept, self._kept, run = self._kept, {}, self._run
        if not kept or run.grid is None:
            return
        records = {
            index: self._layout().to_record(np.asarray(model, np.float64)) for index, model in kept.items()
        }
        asked = [client for client in clients if client.index in records]
        replies = exchange(run.grid, [self._request(c, records[c.index]) for c in asked], run.timeout)
        reasons = [_reason_against(replies.get(client.node_id)) for client in asked]
        if silent := next(filter(None, reasons), ""):
            run.warn_once("clients don't take back what they kept (%s): it begins anew", silent)

    def _request(self, client: Client, arrays: ArrayRecord | None = None) -> Message:
        config = ConfigRecord({messages.CLIENT: client.index, messages.KEPT_FOR: self._number()})
        ttl = self._run.timeout
        return messages.request(messages.ASK_KEPT, client.node_id, config, ttl=ttl, arrays=arrays)


def _reason_against(reply: Message | None) -> str:
    if reply is None:
        return messages.NO_REPLY
    return messages.reason_of(reply) if reply.has_error() else ""


def _flat(arrays: ArrayRecord, layout: Layout) -> NDArray[Any]:
    """Flatten a record of the layout as it is: a model that has diverged is kept, too."""
    return np.concatenate([unpack(arrays[name]).ravel().astype(layout.narrow) for name in layout.names])
