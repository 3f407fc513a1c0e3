"""This repository's strategies: server and clients, in a Grid in memory.

Whole runs of ``strategies`` in virtual time. The clients are the ClientApp of ``fedapp``, in PyTorch and float32,
each with a file of its own rows. To QFedAvg they report the loss of the model that they were sent, beside the mean
over the local steps. The hook ``select`` returns a round's participants; arrivals follow from the task times.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from ..problem import Problem, Vector

NAME, PACKAGES = "fedapp", ("fedapp",)
TOLERANCE = 1e-6  # float32

# A reply's metric: the loss of the model that the client was sent.
SENT_LOSS = "sent-loss"

Keywords = Callable[[Mapping[str, Any]], dict[str, Any]]

# By the problem's name: a function from the problem's parameters to the strategy's keywords.
KEYWORDS: dict[str, Keywords] = {
    "fedavg": lambda q: {},
    "fedprox": lambda q: {"proximal_mu": q["alpha"]},
    "spectral": lambda q: {"perturbation_beta": q["beta"]},
    "fednova": lambda q: {},
    "scaffold": lambda q: {},
    "feddyn": lambda q: {"feddyn_alpha": q["alpha"]},
    "mifa": lambda q: {},
    "ditto": lambda q: {"ditto_lambda": q["lambda"]},
    "fedamp": lambda q: {
        "proximal_mu": q["mu"],
        "fedamp_sigma": q["sigma"],
        "fedamp_alpha": q["alpha_k"] * q["C"] / q["sigma"],
    },
    "async-fedavg": lambda q: {},
    "fedfix": lambda q: {"fedfix_interval": q["interval"]},
    "fedbuff": lambda q: {
        "buffer_size": q["m"],
        "aggregation_weights": "identical",
        "staleness_discount": "polynomial:0.5",
    },
    "async-spectral": lambda q: {
        "buffer_size": q["m"],
        "perturbation_beta": q["beta"],
        "staleness_discount": f"polynomial:{q['a']}",
    },
    "fedasync": lambda q: {"mixing_alpha": q["alpha"], "staleness_discount": f"polynomial:{q['a']}"},
    "delay-adaptive": lambda q: {"aggregation_weights": "identical"},
    "ringmaster": lambda q: {"delay_threshold": q["R"]},
    "rennala": lambda q: {"buffer_size": q["B"]},
    "malenia": lambda q: {"buffer_size": q["S"]},
    "ca2fl": lambda q: {"buffer_size": q["m"]},
    "ace": lambda q: {},
    "fadas": lambda q: {"buffer_size": q["m"]},
    "fedavgm": lambda q: {"server_optimizer": "momentum"},
    "diloco": lambda q: {"server_optimizer": "nesterov"},
    "fedadagrad": lambda q: {"server_optimizer": "adagrad"},
    "fedadam": lambda q: {"server_optimizer": "adam"},
    "fedyogi": lambda q: {"server_optimizer": "yogi"},
    "fedexp": lambda q: {"server_optimizer": "fedexp"},
    "qfedavg": lambda q: {
        "client_learning_rate": 1 / q["L"],
        "q": q["q"],
        "train_loss_key": SENT_LOSS,
    },
    "fedvarp": lambda q: {"stale_weight": 1.0},
    "fedstale": lambda q: {"stale_weight": q["beta"]},
    "fedau": lambda q: {"participation_cutoff": q["K"]},
    "fedawe": lambda q: {},
    "aced": lambda q: {"cache_age": q["tau"]},
    "ringleader": lambda q: {},
    "area": lambda q: {"buffer_size": q["m"]},
    "fedcompass": lambda q: {
        "min_local_steps": q["Q_min"],
        "max_local_steps": q["Q_max"],
        "group_slack": q["lambda"],
        "staleness_discount": "polynomial:0.5",
    },
}

# The strategy of a problem that isn't called as its strategy.
BY_KEYWORD = dict.fromkeys(("fedavgm", "diloco", "fedadagrad", "fedadam", "fedyogi", "fedexp"), "fedavg") | {
    "fedvarp": "fedstale"
}


def implementations() -> dict[str, Callable[[Problem], "Run"]]:
    """Return the class that runs each problem, by the problem's name."""
    return dict.fromkeys(KEYWORDS, Run)


class Run:
    """A whole run, made at once; each step returns one of its models.

    Parameters
    ----------
    keywords : mapping, optional
        Keywords of the strategy that replace the problem's, for tests that the kit notices another setting.
    """

    def __init__(self, problem: Problem, keywords: Mapping[str, Any] | None = None) -> None:
        with TemporaryDirectory() as folder:
            self.models = trajectory(problem, Path(folder), keywords or {})

    def step(self, number: int, who: Sequence[Any]) -> Vector:
        """Return the model after a step."""
        return self.models[number - 1]


def trajectory(problem: Problem, folder: Path, others: Mapping[str, Any]) -> list[Vector]:
    """Run a problem's method; return its models."""
    from flwr.app import Array, ArrayRecord, Context, Message

    from fedapp import client_app
    from strategies import REGISTRY, QFedAvg, VirtualClock
    from strategies.testing import MemoryGrid

    C = len(problem.clients)
    name = BY_KEYWORD.get(problem.method, problem.method)
    kind: Any = QFedAvg if name == "qfedavg" else REGISTRY[name]
    keywords = {
        **KEYWORDS[problem.method]({**problem.parameters, "C": C}),
        "server_lr": problem.parameters.get("server_lr", 1.0),
        "fraction_evaluate": 0.0,
        "eval_every": 1,
        "min_clients": C,
    }
    if "client_weights" not in others and problem.method not in ("spectral", "async-spectral"):
        keywords["client_weights"] = "uniform" if np.ptp(problem.importance) == 0 else "samples"
    if problem.task_seconds:
        times = folder / "times.csv"
        times.write_text("".join(f"{i},{seconds!r}\n" for i, seconds in enumerate(problem.task_seconds)))
        keywords["time_scenario"] = f"trace:{times}"
    else:
        kind = listing(kind, problem.steps)
    strategy = kind(clock=VirtualClock(), **{**keywords, **others})
    files = [folder / f"{i}.npz" for i in range(C)]
    for file, client in zip(files, problem.clients, strict=True):
        np.savez(file, x_train=client.x.astype(np.float32), y_train=client.y)

    def answer(message: Message, context: Context) -> Message:
        reply = client_app.app(message, context)
        if message.metadata.message_type.startswith("train") and problem.method == "qfedavg":
            rows = problem.clients[context.node_id - 1]
            reply.content.metric_records["metrics"][SENT_LOSS] = rows.loss(flat(message.content["arrays"]))
        return reply

    grid = MemoryGrid(answer, [{"data-path": str(file)} for file in files], range(1, C + 1))
    models: list[Vector] = []

    def look(number: int, arrays: ArrayRecord) -> None:
        if number:
            models.append(told(problem, strategy, grid, flat(arrays)))

    classes = len(problem.initial) // (problem.clients[0].x.shape[1] + 1)
    matrix = problem.initial[:-classes].reshape(classes, -1).astype(np.float32)
    names, record = task_record(problem, files[0])
    initial = dict(zip(names, [matrix, problem.initial[-classes:].astype(np.float32)], strict=True))
    with quick():
        strategy.start(
            grid,
            ArrayRecord({name: Array(values) for name, values in initial.items()}),
            num_rounds=len(problem.steps),
            timeout=60,
            train_config=record,
            evaluate_fn=look,
        )
    return models


def task_record(problem: Problem, file: Path) -> tuple[list[str], Any]:
    """Return the names of the model's arrays, and the ConfigRecord of every message to a client."""
    from flwr.app import ConfigRecord

    from fedapp import federation
    from fedapp.config import RunConfig

    config = RunConfig.load(
        {
            "dataset": "npz",
            "data-path": str(file),
            "model": "logistic",
            "batch-size": 0,
            "local-epochs": 0,
            "local-steps": max(problem.local_steps),
            "step-heterogeneity": f"list:{','.join(map(str, problem.local_steps))}",
            "lr": problem.lr,
            "momentum": problem.momentum,
        }
    )
    dataset = federation.dataset_of(config, len(problem.clients))
    model = federation.model_of(config, dataset.kind, dataset.input_shape, dataset.num_outputs)
    values = {key: value for key, value in config.flat().items() if key != "proximal-mu"}
    names = list(federation.initial_arrays(model))
    return names, ConfigRecord({**values, **federation.schema_fields(dataset)})


def told(problem: Problem, strategy: Any, grid: Any, model: Vector) -> Vector:
    """Return a step's model (D,), or the global and personal models (1 + C, D), as the problem's ``returns`` says."""
    if problem.returns == "global":
        return model
    if strategy.capabilities.clients_keep_models:
        from fedapp.client.kept import RECORD

        own = [flat(grid.contexts[i + 1].state[RECORD]) for i in range(len(problem.clients))]
    else:
        own = [strategy.personal_model(client) for client in strategy.session.clients]
    return np.stack([model, *own])


def flat(arrays: Any) -> Vector:
    """Return a model's arrays as a vector (D,)."""
    return np.concatenate([array.numpy().ravel() for array in arrays.values()]).astype(np.float64)


def listing(kind: Any, rounds: Sequence[Sequence[int]]) -> type:
    """Return a strategy's class whose rounds have the participants of a list."""

    class Listed(kind):  # type: ignore[misc]
        def select(self, clients: Sequence[Any], rng: Any) -> tuple[Sequence[Any], Sequence[float]]:
            chosen = [client for client in clients if client.index in rounds[self.session.aggregations]]
            p = np.array([self.session.client_weights()[client.index] for client in chosen])
            return chosen, (p / p.sum()).tolist()

    return Listed


@contextmanager
def quick() -> Iterator[None]:
    """Look for nodes at once, not every tenth of a second."""
    from strategies.flower import exchange

    before, exchange.NODE_POLL = exchange.NODE_POLL, 0.001
    try:
        yield
    finally:
        exchange.NODE_POLL = before
