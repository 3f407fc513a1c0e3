"""FLGo's algorithms (``flgo.algorithm``): servers and clients, in PyTorch and float64.

A round is ``Server.iterate`` with the problem's participants. Without rounds each arrival is the reply of a client
to the model that it was sent, which ``Server.package_handler`` takes. ``aggregation_option`` is the problem's weights
for the algorithms that read it. FedAsync's clients have no proximal term, which is the paper's option II.
"""

import importlib
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from ..problem import Arrival, Problem, Vector, load

NAME, PACKAGES = "FLGo", ("flgo",)

# By the problem's name: the algorithm's module, and a function from the problem's parameters to the algorithm's, in
# the order of ``init_algo_para``.
ALGORITHMS: dict[str, tuple[str, Callable[[Mapping[str, Any]], list[Any]]]] = {
    "fedavg": ("fedavg", lambda q: []),
    "fedprox": ("fedprox", lambda q: [q["alpha"]]),
    "fednova": ("fednova", lambda q: []),
    "scaffold": ("scaffold", lambda q: [1.0]),
    "feddyn": ("feddyn", lambda q: [q["alpha"]]),
    "mifa": ("mifa", lambda q: []),
    "ditto": ("ditto", lambda q: [q["lambda"]]),
    "fedbuff": ("fedbuff", lambda q: [q["m"] / 5, q["server_lr"]]),
    "fedasync": ("fedasync", lambda q: [q["alpha"], 0.0, "poly", 10, 6, q["a"]]),
    "fedavgm": ("fedavgm", lambda q: [q["beta"]]),
    "qfedavg": ("qfedavg", lambda q: [q["q"]]),
}

# The benchmark's configuration, a module that FLGo copies into its benchmark.
CONFIG = """
from {module} import model_of, rows_of

train_data, test_data = rows_of({method!r}), rows_of({method!r})

def get_model():
    return model_of({method!r})
"""


def implementations() -> dict[str, Callable[[Problem], "FlgoRounds"]]:
    """Return the class that runs each problem, by the problem's name."""
    return {name: FlgoArrivals if name in ("fedbuff", "fedasync") else FlgoRounds for name in ALGORITHMS}


class FlgoRounds:
    """An algorithm, round by round."""

    def __init__(self, problem: Problem) -> None:
        self.problem, self.who = problem, list[int]()
        with TemporaryDirectory() as folder, working_in(folder):
            self.server = prepared(problem)
        self.server.sample = lambda: list(self.who)
        self.server.aggregation_option = "uniform" if np.ptp(problem.importance) == 0 else "normalized"
        simulator, ids = self.server.gv.simulator, [client.id for client in self.server.clients]
        simulator.set_variable(ids, "working_amount", list(problem.local_steps))

    def step(self, number: int, who: Sequence[Any]) -> Vector:
        """Return the model after a round, and the clients' own where the problem has them."""
        self.who = list(who)
        self.server.gv.clock.step()
        self.server.iterate()
        self.server.current_round += 1
        model = vector(self.server.model)
        if self.problem.returns == "global":
            return model
        return np.stack([model, *(vector(client.model) for client in self.server.clients)])


class FlgoArrivals(FlgoRounds):
    """An asynchronous algorithm, arrival by arrival."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self.models = [self.server.model]

    def step(self, number: int, who: Sequence[Arrival]) -> Vector:
        """Return the model after the arrivals of a step."""
        import copy

        for client, staleness in who:
            sent = copy.deepcopy(self.models[-1 - staleness])
            sent._round = number - staleness
            reply = self.server.clients[client].reply({"model": sent})["model"]
            reply._round = number - staleness
            self.server.package_handler({"model": [reply], "__cid": [client]})
        self.server.current_round += 1
        self.models.append(self.server.model)
        return vector(self.server.model)


def prepared(problem: Problem) -> Any:
    """Return the server of a task that is made in the working directory."""
    import flgo
    from flgo.benchmark.toolkits.cv.classification import FromDatasetPipe

    # PyTorch calls this method since a version after FLGo's last release; without it the first client fails.
    FromDatasetPipe.TaskDataset.__getitems__ = lambda self, places: [self[place] for place in places]
    Path("config.py").write_text(CONFIG.format(module=__name__, method=problem.method), "utf-8")
    name = f"kit_{problem.method}"
    flgo.gen_benchmark_from_file(name, "config.py", ".")
    benchmark: Any = importlib.import_module(name)
    benchmark.visualize = lambda *_: None
    flgo.gen_task_by_(benchmark, divider([len(client) for client in problem.clients]), "task")
    algorithm, parameters = ALGORITHMS[problem.method]
    options = {
        "num_rounds": len(problem.steps),
        "proportion": 1.0,
        "num_steps": max(problem.local_steps),
        "batch_size": -1,
        "learning_rate": problem.lr,
        "learning_rate_decay": 1.0,
        "momentum": problem.momentum,
        "weight_decay": 0.0,
        "algo_para": parameters(problem.parameters),
        "train_holdout": 0.0,
        "eval_interval": -1,
        "log_level": "ERROR",
        "no_tqdm": True,
    }
    return flgo.init("task", importlib.import_module(f"flgo.algorithm.{algorithm}"), options)


def divider(sizes: Sequence[int]) -> Any:
    """Return a partitioner that gives each client as many consecutive rows as ``sizes`` says."""
    from flgo.benchmark.partition import BasicPartitioner

    class Stretches(BasicPartitioner):  # type: ignore[misc]
        def __init__(self) -> None:
            self.num_clients = len(sizes)

        def __call__(self, data: Any) -> list[list[int]]:
            ends = np.cumsum(sizes).tolist()
            return [list(range(end - size, end)) for end, size in zip(ends, sizes, strict=True)]

    return Stretches()


@contextmanager
def working_in(folder: str) -> Iterator[None]:
    """Work in a folder, from which modules can be imported, too; nothing up to an error is logged."""
    before, disabled = Path.cwd(), logging.root.manager.disable
    os.chdir(folder)
    sys.path.insert(0, folder)
    logging.disable(logging.ERROR)
    try:
        yield
    finally:
        logging.disable(disabled)
        sys.path.remove(folder)
        os.chdir(before)


def rows_of(method: str) -> Any:
    """Return all clients' rows, for the configuration."""
    import torch
    from torch.utils.data import TensorDataset

    clients = load(method).clients
    x, y = (np.concatenate([getattr(client, name) for client in clients]) for name in ("x", "y"))
    return TensorDataset(torch.tensor(x), torch.tensor(y))


def model_of(method: str) -> Any:
    """Return the initial model, for the configuration."""
    import torch

    problem = load(method)
    inputs = problem.clients[0].x.shape[1]
    model = torch.nn.Linear(inputs, len(problem.initial) // (inputs + 1), dtype=torch.float64)
    torch.nn.utils.vector_to_parameters(torch.tensor(problem.initial), model.parameters())
    return model


def vector(model: Any) -> Vector:
    """Return a model as a vector (D,)."""
    return np.concatenate([value.detach().numpy().ravel() for value in model.parameters()])
