"""The clients, as Flower's quickstart has them, with one handler more."""

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from pytorch_spectral.task import Net, load_data
from pytorch_spectral.task import test as test_fn
from pytorch_spectral.task import train as train_fn
from strategies.client import direction_of

app = ClientApp()


@app.query("direction")
def direction(msg: Message, context: Context) -> Message:
    """Say where in the graph of clients this one is."""
    data, _ = load_data(int(context.node_config["partition-id"]), int(context.node_config["num-partitions"]))
    return Message(RecordDict({"direction": ArrayRecord([direction_of(data.tensors[0])])}), reply_to=msg)


@app.train()
def train(msg: Message, context: Context) -> Message:
    """Train the model on local data."""
    torch.manual_seed(0)
    model = Net()
    model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    partition_id, num_partitions = (int(context.node_config[k]) for k in ("partition-id", "num-partitions"))
    data, _ = load_data(partition_id, num_partitions)
    config, epochs = msg.content["config"], int(context.run_config["local-epochs"])
    loss = train_fn(model, data, epochs, config["lr"], config["server-round"])
    metrics = MetricRecord({"train_loss": loss, "num-examples": len(data)})
    content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics})
    return Message(content=content, reply_to=msg)


@app.evaluate()
def evaluate(msg: Message, context: Context) -> Message:
    """Evaluate the model on local data."""
    model = Net()
    model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    partition_id, num_partitions = (int(context.node_config[k]) for k in ("partition-id", "num-partitions"))
    _, data = load_data(partition_id, num_partitions)
    loss, accuracy = test_fn(model, data)
    metrics = MetricRecord({"eval_loss": loss, "eval_acc": accuracy, "num-examples": len(data)})
    return Message(content=RecordDict({"metrics": metrics}), reply_to=msg)
