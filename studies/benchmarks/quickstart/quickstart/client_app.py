"""The ClientApp: trains the model that it gets on its part of the data."""

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from quickstart import task

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train for one epoch."""
    config, node = context.run_config, context.node_config
    model = task.make_model(config["model"])
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    loader = task.load_data(
        config["data"], node["partition-id"], node["num-partitions"], config["batch-size"]
    )
    loss = task.train(model, loader, config["lr"])
    metrics = MetricRecord({"train_loss": loss, "num-examples": len(loader.dataset)})
    content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics})
    return Message(content=content, reply_to=message)
