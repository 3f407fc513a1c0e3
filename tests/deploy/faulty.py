"""The app's ClientApp on a device that is broken or lies; the node config's `fault` says how."""

import time
from pathlib import Path

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from fedapp.client_app import app as honest
from strategies.flower import messages
from strategies.flower.packing import unpack_arrays

ADDED = 2**-6

app = ClientApp(mods=[unpack_arrays])  # so that what it spoils is the model's arrays


@app.query("describe")
def describe(message: Message, context: Context) -> Message:
    """Answer honestly."""
    reply = honest(message, context)
    fault = str(context.node_config.get("fault"))
    if fault.startswith("adds:"):
        _, place, folder = fault.split(":")
        number = messages.metrics_of(reply)[messages.NUM_EXAMPLES]
        Path(folder, f"examples-{place}").write_text(str(number))
    return reply


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train, then spoil the reply."""
    fault = context.node_config.get("fault")
    if fault == "always-fails":
        raise RuntimeError("this device is broken")
    if str(fault).startswith("adds:"):  # without training, which would only take time
        return _add(message, *str(fault).split(":")[1:])
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


def _add(message: Message, place: str, folder: str) -> Message:
    """Answer with the model that was sent, plus ``ADDED`` at a place of its first array; keep the first model."""
    sent = messages.arrays_of(message)
    assert sent is not None
    values = {name: array.numpy().copy() for name, array in sent.items()}
    first = next(iter(values.values()))
    if not (kept := Path(folder, f"first-{place}.npy")).exists():
        np.save(kept, first)
    first.flat[int(place)] += ADDED
    arrays = ArrayRecord({name: Array(each) for name, each in values.items()})
    number = int(Path(folder, f"examples-{place}").read_text())
    metrics = MetricRecord({messages.NUM_EXAMPLES: number, messages.TRAIN_LOSS: 1.0})
    return Message(RecordDict({messages.ARRAYS: arrays, messages.METRICS: metrics}), reply_to=message)


def _answer_the_first(message: Message, reply: Message, context: Context) -> None:
    """Say that the reply is to the first message of the run."""
    first = context.state.config_records.setdefault(
        "first", ConfigRecord({"message-id": message.metadata.message_id})
    )
    reply.metadata.__dict__["_reply_to_message_id"] = first["message-id"]
