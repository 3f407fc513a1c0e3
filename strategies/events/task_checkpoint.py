"""The clients, the tasks under way and the waiting contributions in a checkpoint of the event loop."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from flwr.app import MetricRecord
from numpy.typing import NDArray

from strategies.clients.client_state import ClientState
from strategies.clients.roster import ABSENT, Client, sized
from strategies.flower.arrays import Vector
from strategies.updates.buffers import Buffers
from strategies.updates.pipeline import Contribution

# What is saved of each client, in the order of `clients`: the key of the list, and the attribute of ``ClientState``.
_CLIENTS = {
    "tasks": "tasks",
    "misses": "misses",
    "dropped": "dropped",
    "contributions": "contributions",
    "weight": "weight",
    "seconds": "seconds",
    "answers": "answers",
    "lost": "lost",
    "there-since": "since",
    "gone": "dropped_at",
}
_EXTRA_VECTOR = "sent-"  # before the names of vectors that were sent beside the model


class SentTask(NamedTuple):
    """A task as it was sent: version of its model, client index, clock seconds, extra vectors, and local steps."""

    version: int
    client: int
    sent: float
    extra_vectors: Mapping[str, Vector]
    steps: int


def clients_state(members: Sequence[ClientState]) -> dict[str, Any]:
    """Return the entries of a state for the clients."""
    columns = {key: [getattr(member, name) for member in members] for key, name in _CLIENTS.items()}
    sizes = [member.client.num_examples for member in members]
    return {"clients": [member.client.index for member in members], "num-examples": sizes, **columns}


def restored_clients(state: Mapping[str, Any], present: Mapping[int, Client]) -> Iterator[ClientState]:
    """Yield the clients of a state; one that isn't connected has the node id ``ABSENT``."""
    columns = zip(*(state[key] for key in _CLIENTS), strict=True)
    for index, size, values in zip(state["clients"], state["num-examples"], columns, strict=True):
        client = present.get(index, Client(ABSENT, index, size, MetricRecord()))
        yield ClientState(sized(client, size), **dict(zip(_CLIENTS.values(), values, strict=True)))


def tasks_state(tasks: Sequence[SentTask]) -> dict[str, Any]:
    """Return the entries of a state for the tasks under way."""
    names = tasks[0].extra_vectors if tasks else ()
    vectors = {f"{_EXTRA_VECTOR}{n}": np.array([task.extra_vectors[n] for task in tasks]) for n in names}
    steps = [task.steps for task in tasks]
    return {
        "tasks-under-way": [(task.version, task.client, task.sent) for task in tasks],
        **({"steps-under-way": steps} if any(steps) else {}),
        **vectors,
    }


def restored_tasks(state: Mapping[str, Any]) -> Iterator[SentTask]:
    """Yield the tasks of a state that were under way."""
    under_way = state["tasks-under-way"]
    steps = state.get("steps-under-way", [0] * len(under_way))
    names = [key.removeprefix(_EXTRA_VECTOR) for key in state if key.startswith(_EXTRA_VECTOR)]
    for place, (version, client, sent) in enumerate(under_way):
        vectors = {name: np.array(state[f"{_EXTRA_VECTOR}{name}"][place]) for name in names}
        yield SentTask(version, client, sent, vectors, steps[place])


def waiting_state(buffer: Sequence[Contribution]) -> dict[str, Any]:
    """Return the entries of a state for contributions that wait; {} if none does."""
    if not buffer:
        return {}
    buffer_values = [c.buffer_values for c in buffer if c.buffer_values is not None]
    return {
        # Client, version, staleness, bytes and metrics.
        "waiting": [(c.client.index, c.version, c.staleness, c.num_bytes, dict(c.metrics)) for c in buffer],
        "waiting-updates": np.array([c.update for c in buffer]),
        **({"waiting-untrained": np.array(buffer_values)} if buffer_values else {}),
    }


def restored_waiting(
    state: Mapping[str, Any], clients: Mapping[int, Client], buffers: Buffers
) -> Iterator[Contribution]:
    """Yield the contributions of a state that waited."""
    bases, buffer_values = restored_bases(state), state.get("waiting-untrained")
    for place, (index, version, staleness, num_bytes, metrics) in enumerate(state.get("waiting", ())):
        yield Contribution(
            clients[index],
            np.array(state["waiting-updates"][place]),
            bases[version],
            version,
            staleness,
            MetricRecord(metrics),
            {},
            num_bytes,
            None if buffer_values is None else np.array(buffer_values[place]),
            buffers.counter_origin(bases[version]),
        )


def restored_bases(state: Mapping[str, Any]) -> dict[int, NDArray[Any]]:
    """Return the models (D,) of a state by version."""
    return {version: np.array(base) for version, base in zip(state["versions"], state["bases"], strict=True)}
