"""The ClientApp: trains the model that it gets on its part of the data."""

from importlib import import_module

from flwr.app import Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train for one epoch."""
    config = context.run_config
    learner = import_module(
        f"quickstart.in_{config['library']}"
    )  # of three, so that each imports only its own
    arrays, loss, rows = learner.train(message.content["arrays"], config, context.node_config)
    metrics = MetricRecord({"train_loss": loss, "num-examples": rows})
    return Message(content=RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)
