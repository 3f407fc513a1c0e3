"""The clients, as Flower's quickstart for NumPy has them."""

import numpy as np
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from own_scheme import task

app = ClientApp()


@app.train()
def train(msg: Message, context: Context) -> Message:
    """Train the model on local data."""
    (w,) = msg.content["arrays"].to_numpy_ndarrays()
    x, y, _, _ = task.load_data(int(context.node_config["partition-id"]))
    w = task.train(w, x, y, int(context.run_config["local-steps"]), float(context.run_config["lr"]))
    metrics = MetricRecord({"num-examples": len(y)})
    content = RecordDict({"arrays": ArrayRecord([w]), "metrics": metrics})
    return Message(content=content, reply_to=msg)


@app.evaluate()
def evaluate(msg: Message, context: Context) -> Message:
    """Evaluate the model on local data."""
    (w,) = msg.content["arrays"].to_numpy_ndarrays()
    _, _, x, y = task.load_data(int(context.node_config["partition-id"]))
    accuracy = float(np.mean((task.predict(w, x) > 0.5) == y))
    metrics = MetricRecord({"eval_acc": accuracy, "num-examples": len(y)})
    return Message(content=RecordDict({"metrics": metrics}), reply_to=msg)
