"""APPFL's aggregators (``appfl.algorithm.aggregator``), with clients that train as the kit says.

FedProx's client is tested, too: ``FedProxTrainer``, in PyTorch. Three settings differ from APPFL's defaults, so that
its formulas are the papers': the factor 1/``num_clients`` is 1 for FedAsync and 1/m for FedBuff, and FedBuff is sent
changes of models (``gradient_based``). ``get_parameters`` is given the client's id, by which APPFL counts staleness.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ..problem import Arrival, Problem, Vector

NAME, PACKAGES = "APPFL", ("appfl",)

Settings = Callable[[Mapping[str, Any]], dict[str, Any]]


def adaptive(q: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of FedAdagrad, FedAdam and FedYogi."""
    return {
        "server_learning_rate": q["server_lr"],
        "server_momentum_param_1": q["beta_1"],
        "server_momentum_param_2": q["beta_2"],
        "server_adapt_param": q["tau"],
    }


# By the problem's name: the aggregator's class, and a function from the problem's parameters to its settings.
AGGREGATORS: dict[str, tuple[str, Settings]] = {
    "fedavg": ("FedAvgAggregator", lambda q: {}),
    "fedprox": ("FedAvgAggregator", lambda q: {}),
    "fedavgm": ("FedAvgMAggregator", lambda q: {"server_momentum_param_1": q["beta"]}),
    "fedadagrad": ("FedAdagradAggregator", adaptive),
    "fedadam": ("FedAdamAggregator", adaptive),
    "fedyogi": ("FedYogiAggregator", adaptive),
    "fedasync": (
        "FedAsyncAggregator",
        lambda q: {
            "alpha": q["alpha"],
            "staleness_fn": "polynomial",
            "staleness_fn_kwargs": {"a": q["a"]},
            "num_clients": 1,
        },
    ),
    "fedbuff": (
        "FedBuffAggregator",
        lambda q: {
            "alpha": q["server_lr"],
            "K": q["m"],
            "staleness_fn": "polynomial",
            "staleness_fn_kwargs": {"a": 0.5},
            "num_clients": q["m"],
            "gradient_based": True,
        },
    ),
}


def implementations() -> dict[str, Callable[[Problem], "AppflServer"]]:
    """Return the class that runs each problem, by the problem's name."""
    rounds = {name: AppflServer for name in AGGREGATORS if name not in ("fedprox", "fedasync", "fedbuff")}
    return {**rounds, "fedprox": AppflProx, "fedasync": AppflArrivals, "fedbuff": AppflArrivals}


class AppflServer:
    """An aggregator, round by round."""

    def __init__(self, problem: Problem) -> None:
        import torch
        from appfl.algorithm import aggregator
        from omegaconf import OmegaConf

        self.problem = problem
        name, settings = AGGREGATORS[problem.method]
        told = {"client_weights_mode": "sample_size", **settings(problem.parameters)}
        if problem.task_seconds:
            del told["client_weights_mode"]
        self.model = linear(problem)
        self.aggregator = getattr(aggregator, name)(self.model, OmegaConf.create(told))
        for client, rows in enumerate(problem.clients):
            self.aggregator.set_client_sample_size(client, len(rows))
        self.tensor = torch.tensor
        self.global_model = problem.initial

    def step(self, number: int, who: Sequence[Any]) -> Vector:
        """Return the model after a round."""
        models = {client: self.state(self.trained(client)) for client in who}
        self.global_model = vector(self.aggregator.aggregate(models))
        return self.global_model

    def trained(self, client: int) -> Vector:
        """Return a client's local model."""
        return self.problem.train(client, self.global_model)

    def state(self, w: Vector) -> dict[str, Any]:
        """Return a vector (D,) as a state dict."""
        classes = self.model.out_features
        return {
            "weight": self.tensor(w[:-classes].reshape(classes, -1)),
            "bias": self.tensor(w[-classes:].copy()),
        }


class AppflProx(AppflServer):
    """FedAvg's aggregator, with FedProx's trainers."""

    def trained(self, client: int) -> Vector:
        """Return the local model of APPFL's own client."""
        import torch
        from appfl.algorithm.trainer import FedProxTrainer
        from omegaconf import OmegaConf
        from torch.utils.data import TensorDataset

        problem, rows = self.problem, self.problem.clients[client]
        told = {
            "mode": "step",
            "num_local_steps": problem.local_steps[client],
            "train_batch_size": len(rows),
            "optim": "SGD",
            "optim_args": {"lr": problem.lr, "momentum": problem.momentum},
            "mu": problem.parameters["alpha"],
            "do_validation": False,
        }
        trainer = FedProxTrainer(
            model=linear(problem),
            loss_fn=torch.nn.CrossEntropyLoss(),
            metric=lambda labels, outputs: 0.0,
            train_dataset=TensorDataset(torch.tensor(rows.x), torch.tensor(rows.y)),
            train_configs=OmegaConf.create(told),
            logger=Silent(),
        )
        trainer.load_parameters(self.state(self.global_model))
        trainer.train()
        local = trainer.get_parameters()
        return vector(local[0] if isinstance(local, tuple) else local)  # a tuple has metrics beside the model


class AppflArrivals(AppflServer):
    """An asynchronous aggregator, arrival by arrival."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self.models = [problem.initial]
        for client in range(len(problem.clients)):
            self.aggregator.get_parameters(client_id=client)

    def step(self, number: int, who: Sequence[Arrival]) -> Vector:
        """Return the model after the arrivals of a step, whose clients are then sent it."""
        changes = self.aggregator.aggregator_configs.get("gradient_based", False)
        for client, staleness in who:
            sent = self.models[-1 - staleness]
            local = self.problem.train(client, sent)
            state = self.aggregator.aggregate(client, self.state(sent - local if changes else local))
        self.models.append(vector(state))
        for client, _ in who:
            self.aggregator.get_parameters(client_id=client)
        return self.models[-1]


class Silent:
    """A logger that says nothing."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *values: None


def linear(problem: Problem) -> Any:
    """Return the problem's model in PyTorch, in float64."""
    import torch

    inputs = problem.clients[0].x.shape[1]
    model = torch.nn.Linear(inputs, len(problem.initial) // (inputs + 1), dtype=torch.float64)
    torch.nn.utils.vector_to_parameters(torch.tensor(problem.initial), model.parameters())
    return model


def vector(state: Mapping[str, Any]) -> Vector:
    """Return a state dict as a vector (D,)."""
    return np.concatenate([state[name].detach().numpy().ravel() for name in ("weight", "bias")])
