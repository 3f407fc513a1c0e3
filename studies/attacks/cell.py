"""One run of the study: a method, with or without safeguards, under an attack; and its final accuracy."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass

import torch

from fedapp import federation, server
from fedapp.api.values import load_config
from fedapp.logs import shown_from
from fedapp.server.evaluation import Evaluation
from strategies import RunError
from studies.attacks.hostile import ATTACKS, FROM, HONEST, STRONGER, TARGET, HostileGrid, patched
from studies.attacks.problem import divided, keys_of, normalised, pictures, plain

ROUNDS = 20
FOREVER = 1e9  # seconds: clients in this process always answer

# Keys of all runs. Task times are those of F80: the slowest client takes about five times as long as the fastest.
BASE: Mapping[str, object] = {
    "lr": 0.3,
    "batch_size": 16,
    "local_epochs": 0,
    "local_steps": 10,
    "client_records": "never",
    "server_device": "cpu",
    "client_device": "cpu",
}


@dataclass(frozen=True)
class Method:
    """A strategy, and the keys of the run config that it is run with, by the number of clients C.

    Attributes
    ----------
    aggregations : callable
        Returns the number of rounds or aggregations, given C: about ``ROUNDS`` x C contributions of clients.
    with_rule : callable
        Returns the keys that replace these under a robust rule, given C and the number of hostile clients.
    """

    strategy: str
    keys: Callable[[int], Mapping[str, object]] = lambda _: {}
    aggregations: Callable[[int], int] = lambda _: ROUNDS
    with_rule: Callable[[int, int], Mapping[str, object]] = lambda *_: {}


def buffer_size(num_clients: int) -> int:
    """Return m of FedBuff: 2 of 5 clients, 3 of 10."""
    return max(2, 3 * num_clients // 10)


def _buffer_for_rule(num_clients: int, hostile: int) -> dict[str, object]:
    """Return FedBuff's keys with a trimmed mean, which needs 2 f + 1 contributions that count alike."""
    m = 2 * hostile + 1
    return {
        "aggregation_weights": "identical",
        "buffer_size": m,
        "server_lr": m / num_clients,
        "num_server_rounds": round(ROUNDS * num_clients / m),
    }


METHODS: Mapping[str, Method] = {
    "fedavg": Method("fedavg"),
    "fedavg, momentum": Method("fedavg", lambda _: {"server_optimizer": "momentum", "server_lr": 0.3}),
    "fedavg, adam": Method("fedavg", lambda _: {"server_optimizer": "adam", "server_lr": 0.03}),
    "fedprox": Method("fedprox", lambda _: {"proximal_mu": 0.1}),
    "fednova": Method("fednova"),
    "scaffold": Method("scaffold"),
    "feddyn": Method("feddyn", lambda _: {"feddyn_alpha": 0.1}),
    "async-fedavg": Method(
        "async-fedavg",
        lambda c: {"server_lr": 1 / c},
        lambda c: ROUNDS * c,
        lambda *_: {"aggregation_weights": "identical"},
    ),
    "fedfix": Method(
        "fedfix", lambda c: {"fedfix_interval": 0.5, "server_lr": 0.6}, lambda c: round(1.4 * ROUNDS)
    ),
    "fedbuff": Method(
        "fedbuff",
        lambda c: {"buffer_size": buffer_size(c), "server_lr": buffer_size(c) / c},
        lambda c: round(ROUNDS * c / buffer_size(c)),
        _buffer_for_rule,
    ),
}


# The protection of a run. The robust rule needs clients that count alike.
OFF, ON, RULE = "off", "on", "trimmed-mean"
MODES = (OFF, ON, RULE)
TAKES_RULE = ("fedavg", "fedavg, momentum", "fedavg, adam", "fedprox", "async-fedavg", "fedbuff")


@dataclass(frozen=True, order=True)
class Cell:
    """A cell of the table, of one seed; without an attack all clients are honest.

    Attributes
    ----------
    division : str
        Division of the rows over clients (studies/attacks/problem.py).
    clients, hostile : int
        C, and how many of them are hostile. They are the fastest.
    method, mode, attack : str
        One of ``METHODS``, of ``MODES`` and of ``ATTACKS``; no attack is ``HONEST``.
    statistics : bool
        Whether the model has running statistics.
    """

    division: str
    clients: int
    hostile: int
    method: str
    mode: str
    attack: str
    statistics: bool
    seed: int

    @property
    def name(self) -> str:
        """All fields, in one line."""
        return "/".join(map(str, astuple(self)))

    def keys(self) -> dict[str, object]:
        """Return the run's keys, all but those of the data."""
        method = METHODS[self.method]
        rule = {
            "aggregation_rule": RULE,
            "faulty_clients": self.hostile,
            "client_weights": "uniform",
            **method.with_rule(self.clients, self.hostile),
        }
        return {
            **BASE,
            **keys_of(self.division),
            **method.keys(self.clients),
            "num_server_rounds": method.aggregations(self.clients),
            **(rule if self.mode == RULE else {}),
            "model": normalised if self.statistics else plain,
            "strategy": method.strategy,
            "safeguards": OFF if self.mode == OFF else ON,
            "eval_every": 10**6,
            "seed": self.seed,
        }


@dataclass(frozen=True)
class Outcome:
    """Of a run's final model the parts of test rows, 0 if the run has failed, or the model isn't finite.

    Attributes
    ----------
    accuracy : float
        Of all rows, those with the right class.
    backdoor : float
        Of the rows of other classes than a backdoor's, those that its patch puts into its class.
    one_class : float
        Of the rows of the class that is called another one, those with the right class.
    """

    accuracy: float = 0.0
    backdoor: float = 0.0
    one_class: float = 0.0


def accuracy(cell: Cell, data_path: str) -> float:
    """Return the final accuracy on the test rows; 0 if the run has failed, or its model isn't finite."""
    return outcome(cell, data_path).accuracy


def outcome(cell: Cell, data_path: str) -> Outcome:
    """Return what a run's final model does."""
    dataset = divided(pictures(data_path), cell.division, cell.clients)
    with shown_from(logging.CRITICAL):
        federation.renew()
        config = load_config({**cell.keys(), "dataset": dataset})
        experiment = server.prepare(config, cell.clients)
        hostile = () if cell.attack == HONEST else range(cell.hostile)
        grid = HostileGrid(cell.clients, {**ATTACKS, **STRONGER}.get(cell.attack), hostile, cell.seed)
        try:
            result = experiment.strategy.start(
                grid,
                experiment.initial_arrays(),
                num_rounds=config.num_server_rounds,
                timeout=FOREVER,
                train_config=server.task_config(experiment),
            )
        except RunError:
            return Outcome()
        finally:
            grid.trainer.close()
        found = Evaluation(experiment, by_client="never")(config.num_server_rounds, result.arrays)
    x, y = federation.to_tensors(
        experiment.dataset, experiment.partition.test_indices, config.normalize, experiment.device
    )
    state, model = federation.to_state(result.arrays, experiment.device), experiment.scored_model.eval()

    def classes(inputs: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            outputs: torch.Tensor = torch.func.functional_call(model, dict(state), (inputs,))
        return outputs.argmax(dim=1)

    with_patch, truth = x[y != TARGET].clone(), y == FROM
    patched(with_patch)[:] = 1.0
    return Outcome(
        float(found["accuracy"]),  # type: ignore[arg-type]
        float((classes(with_patch) == TARGET).float().mean()),
        float((classes(x[truth]) == FROM).float().mean()),
    )
