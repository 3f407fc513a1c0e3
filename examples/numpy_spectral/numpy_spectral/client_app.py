"""The clients: Flower's, with two handlers more, and the neighbours' average u in the local step."""

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from numpy_spectral import task

app = ClientApp()


@app.query("describe")
def describe(msg: Message, context: Context) -> Message:
    """Say who this is, so that runs can be repeated, and how much it counts before it has trained."""
    partition_id, num_partitions = (int(context.node_config[k]) for k in ("partition-id", "num-partitions"))
    number = len(task.load_data(partition_id)[1])
    metrics = {"partition-id": partition_id, "num-partitions": num_partitions, "num-examples": number}
    return Message(content=RecordDict({"metrics": MetricRecord(metrics)}), reply_to=msg)


@app.query("direction")
def direction(msg: Message, context: Context) -> Message:
    """Say where in the graph of clients this one is."""
    x, *_ = task.load_data(int(context.node_config["partition-id"]))
    record = ArrayRecord({"direction": Array(task.direction(x))})
    return Message(content=RecordDict({"direction": record}), reply_to=msg)


@app.train()
def train(msg: Message, context: Context) -> Message:
    """Train the model on local data."""
    (w,) = msg.content["arrays"].to_numpy_ndarrays()
    beta, u, applied = msg.content["config"].get("strategies.beta", 1.0), w, ConfigRecord()
    if beta < 1:
        (u,) = msg.content["neighbours"].to_numpy_ndarrays()
        applied = ConfigRecord({"strategies.beta": beta, "records": ["neighbours"]})
    x, y, _, _ = task.load_data(int(context.node_config["partition-id"]))
    steps, lr = int(context.run_config["local-steps"]), float(context.run_config["lr"])
    w = task.train(w, u, beta, x, y, steps, lr)
    metrics = MetricRecord({"train_loss": task.loss_of(w, x, y), "num-examples": len(y)})
    content = {"arrays": ArrayRecord([w]), "metrics": metrics, "strategies.applied": applied}
    return Message(content=RecordDict(content), reply_to=msg)


@app.evaluate()
def evaluate(msg: Message, context: Context) -> Message:
    """Evaluate the model on local data."""
    (w,) = msg.content["arrays"].to_numpy_ndarrays()
    _, _, x, y = task.load_data(int(context.node_config["partition-id"]))
    accuracy = float(np.mean((task.predict(w, x) > 0.5) == y))
    metrics = {"eval_loss": task.loss_of(w, x, y), "eval_acc": accuracy, "num-examples": len(y)}
    return Message(content=RecordDict({"metrics": MetricRecord(metrics)}), reply_to=msg)
