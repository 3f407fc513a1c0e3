"""A ClientApp as Flower's users write it, without ``query.describe``; its module has no other."""

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    """Add the number of the partition, of which the client has as many examples and one more."""
    partition = int(context.node_config["partition-id"])
    arrays = {
        name: Array(array.numpy() + np.float32(partition))
        for name, array in message.content["arrays"].items()
    }
    metrics = MetricRecord({"num-examples": 1 + partition})
    return Message(RecordDict({"arrays": ArrayRecord(arrays), "metrics": metrics}), reply_to=message)
