"""Stock Flower, as its PyTorch quickstart has its users write an app; nothing of ours but the model and ``simulate``.

A ClientApp that builds an nn.Module, loads its partition into a DataLoader, trains with torch.optim.SGD; FedAvg from
flwr.serverapp.strategy; Flower's Simulation Runtime on Ray with one CPU per client. Kinder than the quickstart in two
ways: the data are plain tensors rather than pictures that are transformed on their way, and there is no evaluation on
the clients, which would be a second exchange in every round.
"""

import random  # noqa: TID251

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

from fedapp.models import build_model
from strategies import simulate
from studies.benchmarks.job import Job, Log, accuracy, load_rows

client_app = ClientApp()
_dataset: TensorDataset | None = None  # loaded once in each of Ray's processes


def load_data(path: str, partition_id: int, num_partitions: int, batch_size: int) -> DataLoader:
    """Return a client's partition."""
    global _dataset
    if _dataset is None:
        _dataset = TensorDataset(*load_rows(path, "train"))
    first, last = (len(_dataset) * number // num_partitions for number in (partition_id, partition_id + 1))
    return DataLoader(Subset(_dataset, range(first, last)), batch_size=batch_size, shuffle=True)


def make_model(name: str, seed: int) -> nn.Module:
    """Return the initial model."""
    return build_model(name, kind="image", input_shape=(1, 28, 28), num_classes=10, seed=seed)


def train_fn(model: nn.Module, loader: DataLoader, lr: float) -> float:
    """Train for one epoch; return the mean loss of the batches."""
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    model.train()
    running_loss = 0.0
    for images, labels in loader:
        optimizer.zero_grad()
        loss = criterion(model(images), labels)
        loss.backward()
        optimizer.step()
        running_loss += loss.item()
    return running_loss / len(loader)


@client_app.train()
def train(message: Message, context: Context) -> Message:
    """Train the model on local data."""
    config = message.content["config"]
    model = make_model(config["model"], config["seed"])
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    loader = load_data(
        config["data"],
        context.node_config["partition-id"],
        context.node_config["num-partitions"],
        config["batch-size"],
    )
    loss = train_fn(model, loader, config["lr"])
    metrics = MetricRecord({"train_loss": loss, "num-examples": len(loader.dataset)})
    content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics})
    return Message(content=content, reply_to=message)


def make_server(job: Job, log: Log) -> ServerApp:
    """Return the ServerApp of a job, which writes a log."""
    random.seed(job.seed)  # FedAvg draws participants from the global generator
    x_test, y_test = load_rows(job.data, "test")
    server_app = ServerApp()

    @server_app.main()
    def main(grid: Grid, context: Context) -> None:
        model = make_model(job.model, job.seed)

        def global_evaluate(server_round: int, arrays: ArrayRecord) -> None:
            if job.evaluates(server_round):
                model.load_state_dict(arrays.to_torch_state_dict())
                log.accuracy[server_round] = accuracy(model, x_test, y_test)
            log.mark()

        strategy = FedAvg(
            fraction_train=job.participants / job.num_clients,
            fraction_evaluate=0.0,
            min_available_nodes=job.num_clients,
        )
        config = {
            "data": job.data,
            "model": job.model,
            "seed": job.seed,
            "batch-size": job.batch_size,
            "lr": job.lr,
        }
        strategy.start(
            grid=grid,
            initial_arrays=ArrayRecord(model.state_dict()),
            num_rounds=job.rounds,
            train_config=ConfigRecord(config),
            evaluate_fn=global_evaluate,
        )

    return server_app


def run(job: Job) -> Log:
    """Run a job on Ray."""
    log = Log()
    run_simulation(
        make_server(job, log),
        client_app,
        num_supernodes=job.num_clients,
        backend_config={"client_resources": {"num_cpus": 1, "num_gpus": 0.0}},
    )
    return log


def run_in_processes(job: Job) -> Log:
    """Run a job in worker processes instead: the same ClientApp, the same ServerApp."""
    log = Log()
    simulate(client_app, make_server(job, log), job.num_clients)
    return log
