"""The clients, as Flower's quickstart has them."""

import jax.numpy as jnp
import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from jax_fedbuff import task

app = ClientApp()


@app.train()
def train(msg: Message, context: Context) -> Message:
    """Train the model on local data."""
    params = {name: jnp.asarray(array.numpy()) for name, array in msg.content["arrays"].items()}
    partition_id, num_partitions = (int(context.node_config[k]) for k in ("partition-id", "num-partitions"))
    x, y, _, _ = task.load_data(partition_id, num_partitions)
    steps, lr = int(context.run_config["local-steps"]), float(context.run_config["lr"])
    params, loss = task.train(params, x, y, steps, lr)
    arrays = ArrayRecord({name: Array(np.asarray(values)) for name, values in params.items()})
    metrics = MetricRecord({"train_loss": loss, "num-examples": len(y)})
    return Message(content=RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=msg)


@app.evaluate()
def evaluate(msg: Message, context: Context) -> Message:
    """Evaluate the model on local data."""
    params = {name: jnp.asarray(array.numpy()) for name, array in msg.content["arrays"].items()}
    partition_id, num_partitions = (int(context.node_config[k]) for k in ("partition-id", "num-partitions"))
    _, _, x, y = task.load_data(partition_id, num_partitions)
    accuracy = float((task.scores(params, x).argmax(1) == y).mean())
    loss = float(task.loss_of(params, x, y))
    metrics = MetricRecord({"eval_loss": loss, "eval_acc": accuracy, "num-examples": len(y)})
    return Message(content=RecordDict({"metrics": metrics}), reply_to=msg)
