"""The app's ClientApp on a device that is broken or lies; the node config's `fault` says how."""

import time
from pathlib import Path

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message
from flwr.clientapp import ClientApp

from fedapp.client_app import app as honest
from strategies.flower.packing import unpack_arrays

app = ClientApp(mods=[unpack_arrays])  # so that what it spoils is the model's arrays


@app.query("describe")
def describe(message: Message, context: Context) -> Message:
    """Answer honestly."""
    return honest(message, context)


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train, then spoil the reply."""
    fault = context.node_config.get("fault")
    if fault == "always-fails":
        raise RuntimeError("this device is broken")
    began = time.monotonic()
    reply = honest(message, context)
    if fault == "slow":
        time.sleep(50 * (time.monotonic() - began))
    if str(fault).startswith("waits-for:"):
        while not Path(str(fault).removeprefix("waits-for:")).exists():
            time.sleep(0.2)
    if fault == "hangs":
        time.sleep(3600)
    if fault == "old-task":
        _answer_the_first(message, reply, context)
    if fault == "large":
        noise = np.random.default_rng(0).integers(256, size=48 << 20).astype(np.uint8)
        reply.content["more"] = ArrayRecord({"noise": Array(noise)})
    spoil = {
        "nan": lambda values: values * np.nan,
        "wrong-shape": lambda values: values[:1],
        "1e30": lambda values: np.full_like(values, 1e30),
    }.get(str(fault))
    if spoil:
        sent = reply.content.array_records["arrays"]
        reply.content["arrays"] = ArrayRecord({name: Array(spoil(a.numpy())) for name, a in sent.items()})
    return reply


def _answer_the_first(message: Message, reply: Message, context: Context) -> None:
    """Say that the reply is to the first message of the run."""
    first = context.state.config_records.setdefault(
        "first", ConfigRecord({"message-id": message.metadata.message_id})
    )
    reply.metadata.__dict__["_reply_to_message_id"] = first["message-id"]
