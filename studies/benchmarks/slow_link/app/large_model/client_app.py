"""The ClientApp: adds its own numbers to the model that it gets."""

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from large_model.model import ADAPTERS, added, pattern
from strategies import cache_frozen_parameters, compress_updates, unpack_arrays

EXAMPLES = 10  # of each client, so that the mean is plain

app = ClientApp(mods=[unpack_arrays, compress_updates, cache_frozen_parameters])


@app.query("describe")
def describe(message: Message, context: Context) -> Message:
    """Tell which client this is."""
    node = context.node_config
    metrics = MetricRecord(
        {
            "partition-id": int(node["partition-id"]),
            "num-partitions": int(node["num-partitions"]),
            "num-examples": EXAMPLES,
        }
    )
    return Message(RecordDict({"metrics": metrics}), reply_to=message)


@app.train()
def train(message: Message, context: Context) -> Message:
    """Add the client's numbers; with adapters, to them alone."""
    model = message.content.array_records["arrays"]
    values = pattern(int(context.node_config["partition-id"]))
    names = [ADAPTERS] if ADAPTERS in model else list(model)
    arrays = ArrayRecord({name: added(model.pop(name), values) for name in names})
    metrics = MetricRecord({"num-examples": EXAMPLES})
    return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)
