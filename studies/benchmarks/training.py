"""Local training on a GPU or a CPU: this app's ways beside a bare PyTorch loop, without Flower.

    python -m studies.benchmarks.training --clients 1000 --clients 10000
    python -m studies.benchmarks.training --workloads cifar10 --clients 100 --samples 400

One round each of W1, W2 and W3 (``studies/benchmarks/workloads.py``), of W3's model in batches of 20, of NIID-Bench's
LeNet (``studies/reproduce/nets.py``), of ResNet-18 on images of CIFAR-10's shape, and of logistic regression and a
perceptron of 128 on such images with 10 epochs of batches of 256, as in table 4.2 of Buttaci's master's thesis
(Politecnico di Torino). Every client trains once, on data that are already on the device; trained models come back to
the host. On a GPU, models with convolutions are also trained with PyTorch's grouped ones, in turn.
"""

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
import torch
import torch.nn.functional as F

from fedapp.models import build_model
from fedapp.training import convolutions
from fedapp.training.batches import plan_batches, task_rng
from fedapp.training.gpu import gpu
from fedapp.training.rule import LocalRule
from fedapp.training.task import LocalTask
from fedapp.training.trainer import Trainer, way_of
from strategies import streams

LR = 0.1


@dataclass(frozen=True)
class LocalWork:
    """What every client trains, and how much."""

    model: str
    shape: tuple[int, ...] = (1, 28, 28)
    batch_size: int = 64
    epochs: int = 1


WORKLOADS = {
    "W1": LocalWork("logistic"),
    "W2": LocalWork("mlp"),
    "W3": LocalWork("cnn"),
    "femnist": LocalWork("cnn", batch_size=20),
    "lenet": LocalWork("studies.reproduce.nets:lenet"),
    "resnet18": LocalWork("resnet18", (3, 32, 32)),
    "cifar10": LocalWork("logistic", (3, 32, 32), 256, 10),
    "cifar10-mlp": LocalWork("mlp", (3, 32, 32), 256, 10),
}


def tasks_of(work: LocalWork, num_clients: int, samples: int, device: torch.device) -> list[LocalTask]:
    """Return one task per client, on random images."""
    rng = streams.generator(0, "benchmark-rows")
    x = torch.from_numpy(rng.random((num_clients * samples, *work.shape), dtype=np.float32)).to(device)
    y = torch.from_numpy(rng.integers(10, size=len(x))).to(device)
    module = build_model(work.model, kind="image", input_shape=work.shape, num_classes=10).to(device)
    start = {name: value.detach() for name, value in module.named_parameters()}
    return [
        LocalTask(
            module,
            start,
            x,
            y,
            client * samples,
            plan_batches(
                samples, batch_size=work.batch_size, epochs=work.epochs, steps=0, rng=task_rng(0, client, 1)
            ),
            LR,
            LocalRule(),
        )
        for client in range(num_clients)
    ]


def bare_loop(tasks: Sequence[LocalTask]) -> None:
    """Train one client after the other with torch.optim, as one writes it."""
    for task in tasks:
        model = task.model
        model.load_state_dict(task.start)
        optimizer = torch.optim.SGD(model.parameters(), task.lr)
        for rows, _ in task.batches.ragged(task.x.device):
            optimizer.zero_grad()
            F.cross_entropy(model(task.x[task.offset + rows]), task.y[task.offset + rows]).backward()
            optimizer.step()
        {name: value.cpu() for name, value in model.state_dict().items()}


def all_of(trainer: Trainer, tasks: Sequence[LocalTask]) -> None:
    """Train all tasks, or raise what one of them raised."""
    for found in trainer.train(tasks):
        if isinstance(found, Exception):
            raise found


def seconds(work: Callable[[], object], repeats: int, device: torch.device) -> float:
    """Return the median duration of some work, after a first time that doesn't count."""
    taken = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - began)
    return median(taken[1:])


def with_grouped_convolutions(work: Callable[[], object], repeats: int, device: torch.device) -> float:
    """Return the median duration of some work whose convolutions are vmap's own: a grouped one of all clients."""
    before, convolutions.DEVICES = convolutions.DEVICES, frozenset()
    try:
        return seconds(work, repeats, device)
    finally:
        convolutions.DEVICES = before


def main() -> None:
    """Print a line of JSON for each workload and number of clients."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clients", type=int, action="append", help="1,000 and 10,000 if not given")
    parser.add_argument("--samples", type=int, default=600, help="of each client")
    parser.add_argument("--workloads", default="W1,W2,W3", help=f"of {', '.join(WORKLOADS)}")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--bare-clients", type=int, default=100, help="clients of the bare loop, scaled up")
    parser.add_argument("--tf32", action="store_true", help="as the app's key tf32, on a GPU")
    options = parser.parse_args()
    torch.set_num_threads(1)
    device = gpu(tf32=options.tf32) if torch.cuda.is_available() else torch.device("cpu")
    for name in options.workloads.split(","):
        for num_clients in options.clients or (1_000, 10_000):
            tasks = tasks_of(WORKLOADS[name], num_clients, options.samples, device)
            trainer = Trainer()
            ours = seconds(
                lambda tasks=tasks, trainer=trainer: all_of(trainer, tasks), options.repeats, device
            )
            if device.type == "cuda":
                grouped = with_grouped_convolutions(
                    lambda tasks=tasks, trainer=trainer: all_of(trainer, tasks), options.repeats, device
                )
            trainer.close()
            few = tasks[: options.bare_clients]
            bare = seconds(lambda few=few: bare_loop(few), 1, device) * len(tasks) / len(few)
            figures = {
                "workload": name,
                "clients": num_clients,
                "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
                "way": way_of(tasks[0]),
                "seconds": round(ours, 4),
                "bare loop, seconds": round(bare, 4),
                "times as fast": round(bare / ours, 2),
            }
            if device.type == "cuda":
                figures["with grouped convolutions, seconds"] = round(grouped, 4)
                figures["peak GiB"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
            print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
