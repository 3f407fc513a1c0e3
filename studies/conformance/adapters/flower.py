"""Flower's own strategies (``flwr.serverapp.strategy``): servers alone, with clients that train as the kit says.

Flower's own code runs a round: ``configure_train`` makes the messages to the nodes of its grid, the round's
participants, and ``aggregate_train`` takes the replies. FedProx's server only sends ``proximal-mu``; the kit's client
adds the proximal term. To QFedAvg a client reports the loss of the model that it was sent. FedAdagrad has no keyword
for β₁, so its attribute is set. Flower makes messages only in a process that has declared itself the server; outside
of a ServerApp ``strategies`` of this repository does so.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ..problem import Problem, Vector

NAME, PACKAGES = "Flower", ("flwr", "fedapp")

ALL = {"fraction_evaluate": 0.0, "min_train_nodes": 1, "min_available_nodes": 1}

# By the problem's name: the strategy's class, and a function from the problem's parameters to the class's keywords.
STRATEGIES: dict[str, tuple[str, Callable[[Mapping[str, Any]], dict[str, Any]]]] = {
    "fedavg": ("FedAvg", lambda q: {}),
    "fedprox": ("FedProx", lambda q: {"proximal_mu": q["alpha"]}),
    "fedavgm": (
        "FedAvgM",
        lambda q: {"server_learning_rate": q["server_lr"], "server_momentum": q["beta"]},
    ),
    "qfedavg": ("QFedAvg", lambda q: {"client_learning_rate": 1 / q["L"], "q": q["q"]}),
    "fedadagrad": ("FedAdagrad", lambda q: {"eta": q["server_lr"], "tau": q["tau"]}),
    "fedadam": ("FedAdam", lambda q: adaptive(q)),
    "fedyogi": ("FedYogi", lambda q: adaptive(q)),
}


def adaptive(q: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keywords of FedAdam and FedYogi."""
    return {"eta": q["server_lr"], "beta_1": q["beta_1"], "beta_2": q["beta_2"], "tau": q["tau"]}


def implementations() -> dict[str, Callable[[Problem], "FlowerServer"]]:
    """Return the class that runs each problem, by the problem's name."""
    return dict.fromkeys(STRATEGIES, FlowerServer)


class Present:
    """The only part of a Grid that a strategy uses here: the nodes that are there."""

    nodes: Sequence[int] = ()

    def get_node_ids(self) -> Sequence[int]:
        """Return the ids of the nodes that are there."""
        return self.nodes


class FlowerServer:
    """A strategy of Flower's, round by round."""

    def __init__(self, problem: Problem) -> None:
        from flwr.app import Array, ArrayRecord
        from flwr.serverapp import strategy

        from strategies.flower.internals import be_the_server

        be_the_server()
        name, keywords = STRATEGIES[problem.method]
        self.problem, self.grid = problem, Present()
        self.strategy = getattr(strategy, name)(**ALL, **keywords(problem.parameters))
        if "beta_1" in problem.parameters:
            self.strategy.beta_1 = problem.parameters["beta_1"]
        self.arrays = ArrayRecord({"w": Array(problem.initial)})

    def step(self, number: int, who: Sequence[int]) -> Vector:
        """Return the model after a round."""
        from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

        self.grid.nodes = [client + 1 for client in who]
        messages = self.strategy.configure_train(number, self.arrays, ConfigRecord(), self.grid)
        replies = []
        for message in messages:
            client = message.metadata.dst_node_id - 1
            sent = message.content["arrays"]["w"].numpy()
            local = self.trained(client, sent, message.content["config"].get("proximal-mu", 0.0))
            rows = self.problem.clients[client]
            metrics = MetricRecord({"num-examples": len(rows), "train_loss": rows.loss(sent)})
            content = RecordDict({"arrays": ArrayRecord({"w": Array(local)}), "metrics": metrics})
            replies.append(Message(content, reply_to=message))
        self.arrays = self.strategy.aggregate_train(number, replies)[0]
        return np.asarray(self.arrays["w"].numpy())

    def trained(self, client: int, sent: Vector, mu: float) -> Vector:
        """Return a client's local model, with the proximal term that the server asks for."""
        gradient = self.problem.clients[client].gradient
        return self.problem.train(client, sent, lambda w: gradient(w) + mu * (w - sent))
