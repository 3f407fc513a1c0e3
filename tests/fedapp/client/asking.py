"""Messages in, replies out."""

from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict

from fedapp.client.handlers import CANNOT_TAKE_PART
from fedapp.client_app import app
from fedapp.server import Experiment, task_config
from strategies.flower import messages
from strategies.flower.simulated import SimulatedContext

CLIENTS = 5


NODE = {"partition-id": 2, "num-partitions": CLIENTS}


# What the strategies add to a request, by the names in these tests.
OWN = {
    "client": messages.CLIENT,
    "task": messages.TASK,
    "alpha": messages.ALPHA,
    "beta": messages.BETA,
}


def request_for(
    kind: str,
    experiment: Experiment,
    *,
    config: Any = None,
    neighbours: ArrayRecord | None = None,
    **fields: Any,
) -> Message:
    """Build a request as the strategies do."""
    record = ConfigRecord(
        {
            **task_config(experiment),
            messages.SERVER_ROUND: 1,
            messages.CLIENT: 2,
            messages.TASK: 1,
            **{OWN.get(name, name.replace("_", "-")): value for name, value in fields.items()},
            **(config or {}),
        }
    )
    queried = kind in (messages.DESCRIBE, messages.ASK_DIRECTION)
    arrays = None if queried else experiment.initial_arrays()
    extra_vectors = {} if neighbours is None else {messages.NEIGHBOURS: neighbours}
    return messages.request(kind, 7, record, ttl=60.0, arrays=arrays, extra_records=extra_vectors)


def context_of(node_config: dict[str, Any] = NODE) -> Context:
    """Return the context of a device with data of its own, or of a simulated client with a part of common data."""
    kind = Context if "data-path" in node_config else SimulatedContext
    return kind(run_id=2, node_id=7, node_config=node_config, state=RecordDict(), run_config={})


def ask(kind: str, experiment: Experiment, node_config: dict[str, Any] = NODE, **given: Any) -> Message:
    """Send the app one request as the strategies do, and return its reply."""
    return app(request_for(kind, experiment, **given), context_of(node_config))


def trained(reply: Message) -> dict[str, np.ndarray]:
    assert reply.has_content(), reply.error.reason
    return {name: array.numpy() for name, array in reply.content.array_records[messages.ARRAYS].items()}


def same(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> bool:
    return list(one) == list(other) and all(one[name].tobytes() == other[name].tobytes() for name in one)


def reason(reply: Message) -> str:
    assert reply.has_error()
    assert reply.error.code == CANNOT_TAKE_PART
    assert "\n" not in reply.error.reason
    assert "Traceback" not in reply.error.reason
    return reply.error.reason
