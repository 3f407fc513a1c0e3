"""The clients, as they are written for Flower's own FedProx: they read ``proximal-mu``."""

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from sklearn.metrics import log_loss

from sklearn_fedprox.task import CLASSES, get_model_params, load_data, make_model, set_model_params
from sklearn_fedprox.task import train as train_fn

app = ClientApp()


@app.train()
def train(msg: Message, context: Context) -> Message:
    """Train the model on local data."""
    model = make_model(float(context.run_config["lr"]))
    set_model_params(model, msg.content["arrays"].to_numpy_ndarrays())
    partition_id, num_partitions = (int(context.node_config[k]) for k in ("partition-id", "num-partitions"))
    x, y, _, _ = load_data(partition_id, num_partitions)
    mu = float(msg.content["config"].get("proximal-mu", 0.0))
    train_fn(model, x, y, int(context.run_config["local-epochs"]), mu)
    loss = log_loss(y, model.predict_proba(x), labels=CLASSES)
    metrics = MetricRecord({"train_loss": loss, "num-examples": len(y)})
    content = RecordDict({"arrays": ArrayRecord(get_model_params(model)), "metrics": metrics})
    return Message(content=content, reply_to=msg)


@app.evaluate()
def evaluate(msg: Message, context: Context) -> Message:
    """Evaluate the model on local data."""
    model = make_model(float(context.run_config["lr"]))
    set_model_params(model, msg.content["arrays"].to_numpy_ndarrays())
    partition_id, num_partitions = (int(context.node_config[k]) for k in ("partition-id", "num-partitions"))
    _, _, x, y = load_data(partition_id, num_partitions)
    loss = log_loss(y, model.predict_proba(x), labels=CLASSES)
    metrics = MetricRecord({"eval_loss": loss, "eval_acc": model.score(x, y), "num-examples": len(y)})
    return Message(content=RecordDict({"metrics": metrics}), reply_to=msg)
