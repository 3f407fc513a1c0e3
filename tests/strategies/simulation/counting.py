"""A ClientApp whose results can be worked out by hand, for simulations in other processes, on Ray and in this one."""

import os
import signal
import sys

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    """Add 1 / (3 + partition) to the model; count the tasks of this client in its state."""
    config, partition = message.content["config"], int(context.node_config["partition-id"])
    if config.get("crash") == partition and config["server-round"] == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if config.get("exit") == partition:
        sys.exit(3)
    if config.get("raise") == partition:
        raise RuntimeError(f"client {partition} has no data")
    if config.get("hang") == partition:
        signal.pause()
    before = context.state["count"]["tasks"] if "count" in context.state else 0
    context.state["count"] = ConfigRecord({"tasks": int(before) + 1})
    arrays = {
        name: Array(array.numpy() + np.float32(1 / (3 + partition)))
        for name, array in message.content["arrays"].items()
    }
    metrics = {"num-examples": 1 + partition, "tasks": context.state["count"]["tasks"], "pid": os.getpid()}
    content = RecordDict({"arrays": ArrayRecord(arrays), "metrics": MetricRecord(metrics)})
    return Message(content, reply_to=message)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Return the model's first value as the loss, and what the client's contexts say."""
    loss = float(message.content["arrays"]["w"].numpy().flat[0])
    told = {"factor": context.run_config.get("factor", 0), "floor": context.node_config.get("floor", 0)}
    metrics = MetricRecord({"num-examples": 1, "loss": loss, **told})
    return Message(RecordDict({"metrics": metrics}), reply_to=message)


@app.query("describe")
def describe(message: Message, context: Context) -> Message:
    """Describe the client, so that its index is its partition on any engine."""
    partition = int(context.node_config["partition-id"])
    metrics = MetricRecord({"partition-id": partition, "num-examples": 1 + partition})
    return Message(RecordDict({"metrics": metrics}), reply_to=message)


def model() -> ArrayRecord:
    """Return the model that runs begin with."""
    return ArrayRecord({"w": Array(np.zeros((7, 5), np.float32)), "b": Array(np.ones(5, np.float32))})
