"""FLGo's asynchronous server on its virtual clock, told to compute asynchronous FedAvg.

Its clock counts whole units, and the server acts once in each. The task times of F80 are whole numbers of units of
1 / (5 (C − 1)) s, 4,995 a second with 1,000 clients: so they are exact, and an event takes 2.5 units on average. Two
things differ from the bare loop: what arrives in one unit is aggregated before any of its clients takes the new
model, and a client takes it a unit after it has answered, which its latency is shortened by.

An algorithm of FLGo's has a ``Server`` and a ``Client``, and a simulator says how long clients take: all
three are below, as ``flgo.algorithm.fedbuff`` and ``flgo.simulator.ResponsivenessExampleSimulator`` have them. It
neither validates nor logs, shows no progress bar and writes no checkpoint, and models are added in place: FLGo's own
``model + model`` builds a new one each time.
"""

import importlib
import os
import sys
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import flgo
import numpy as np
import torch
from flgo.algorithm.asyncbase import AsyncServer
from flgo.algorithm.fedbase import BasicClient
from flgo.benchmark.partition import BasicPartitioner
from flgo.benchmark.toolkits.cv.classification import FromDatasetPipe
from flgo.simulator.base import BasicSimulator
from torch.utils.data import Dataset, TensorDataset

from strategies.timing.time_scenario import TimeScenario
from studies.benchmarks.job import Job, Log, accuracy, load_rows

# The benchmark's configuration, a module of its own that FLGo copies to where it imports it from.
CONFIG = """
from pathlib import Path
from studies.benchmarks.flgo_server import model_of, rows_of
from studies.benchmarks.job import Job

job = Job.read(Path({job!r}))
train_data, test_data = rows_of(job, "train"), rows_of(job, "test")

def get_model():
    return model_of(job)
"""


def run(job: Job) -> Log:
    """Run a job."""
    with TemporaryDirectory() as folder:
        began_in = Path.cwd()
        os.chdir(folder)  # where it makes and imports the task
        sys.path.insert(0, folder)
        try:
            server = prepared(job, Path(folder))
            server.log.mark()
            server.run()
        finally:
            sys.path.remove(folder)
            os.chdir(began_in)
    return server.log


def prepared(job: Job, folder: Path) -> "FlgoServer":
    """Return the server of a task that is made in a folder, the working directory."""
    job.write(folder / "job.json")
    (folder / "config.py").write_text(CONFIG.format(job=str(folder / "job.json")), "utf-8")
    name = flgo.gen_benchmark_from_file("flgo_rows", "config.py", ".")
    # PyTorch has asked for this method since FLGo's last release, which else fails at its first client.
    FromDatasetPipe.TaskDataset.__getitems__ = lambda self, places: [self[place] for place in places]
    benchmark = importlib.import_module(name)
    benchmark.visualize = lambda *_: None  # a chart of 1,000 clients takes minutes
    flgo.gen_task_by_(benchmark, StretchOfRows(job.num_clients), "task")
    options = {
        "num_rounds": job.rounds,
        "proportion": 1.0,
        "sample": "full_available",
        "num_epochs": 1,
        "batch_size": job.batch_size,
        "learning_rate": job.lr,
        "learning_rate_decay": 1.0,
        "train_holdout": 0.0,
        "eval_interval": -1,
        "log_level": "WARNING",
        "no_tqdm": True,
        "torch_num_threads": job.threads,
    }
    server: FlgoServer = flgo.init("task", AsynchronousFedAvg, options, Simulator=FlgoTimes)
    return server


class StretchOfRows(BasicPartitioner):
    """Gives each client a stretch of the rows, as the bare loop does."""

    def __init__(self, num_clients: int) -> None:
        self.num_clients = num_clients

    def __call__(self, data: Dataset) -> list[list[int]]:
        bounds = np.linspace(0, len(data), self.num_clients + 1).round().astype(int).tolist()
        return [list(range(first, last)) for first, last in pairwise(bounds)]


class FlgoTimes(BasicSimulator):
    """The latencies of clients, in whole units of time."""

    def initialize(self) -> None:
        """Set the latencies, which stay."""
        self.set_variable(self.all_clients, "latency", [each - 1 for each in units(len(self.all_clients))])


class FlgoServer(AsyncServer):
    """Adds d_i times a client's change."""

    def initialize(self) -> None:
        """Read the job and work out the weights; FLGo calls this when clients and model are there."""
        self.log, self.job = Log(), Job.read(Path("job.json"))
        self.test_rows = load_rows(self.job.data, "test")
        sizes = np.array([client.datavol for client in self.clients])
        times = TimeScenario("F80", self.num_clients).means
        self.weights = (self.job.server_lr * (1 / times).sum() * times * sizes / sizes.sum()).tolist()

    def package_handler(self, received_packages: dict) -> bool:
        """Aggregate what arrived in a unit of time, one answer after the other."""
        for client, change in zip(received_packages["__cid"], received_packages["model"], strict=True):
            if self._if_exit():
                break
            for value, by in zip(self.model.parameters(), change.parameters(), strict=True):
                value.data.add_(by.data, alpha=self.weights[client])
            number = len(self.log.marks)  # the initial model has one
            if self.job.evaluates(number):
                self.log.accuracy[number] = accuracy(self.model, *self.test_rows)
            self.log.mark()
        return not self.is_package_empty(received_packages)

    def _if_exit(self) -> bool:
        """It counts units in which something arrived; this one counts arrivals."""
        return len(self.log.marks) > self.job.rounds


class FlgoClient(BasicClient):
    """Answers with its change."""

    def reply(self, svr_pkg: dict) -> dict:
        """Train."""
        model = self.unpack(svr_pkg)
        received = [value.detach().clone() for value in model.parameters()]
        self.train(model)
        for value, before in zip(model.parameters(), received, strict=True):
            value.data.sub_(before)
        return self.pack(model)


class AsynchronousFedAvg:
    """An algorithm in the form that FLGo expects."""

    Server, Client = FlgoServer, FlgoClient


def units(num_clients: int) -> list[int]:
    """Return the task times of F80 as whole numbers, of units of 1 / (5 (C − 1)) s."""
    times = TimeScenario("F80", num_clients).means * 5 * (num_clients - 1)
    return times.round().astype(int).tolist()


def rows_of(job: Job, part: str) -> TensorDataset:
    """Return the rows of a part, for the configuration."""
    return TensorDataset(*load_rows(job.data, part))


def model_of(job: Job) -> torch.nn.Module:
    """Return the initial model, for the configuration."""
    return job.initial_model(load_rows(job.data, "test")[0])
