"""Repeat a finished run from its config, to see every global and local model; the folder holds the last one alone.

A run with a given seed and config has one result on every engine; the repeated run's final model is compared with the
recorded one.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import safetensors.torch
import torch
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from torch import Tensor

from fedapp import client_app, server
from fedapp.config import ConfigError
from fedapp.engine.sequential import SequentialGrid
from fedapp.federation import to_state
from fedapp.server import Experiment
from strategies import Progress
from strategies.flower import messages
from studies.theory.constants import Array
from studies.theory.problems import Problem

# Largest relative distance to the recorded model: the same run on another machine may sum in another order.
_TOLERANCE = 1e-3


@dataclass(frozen=True)
class Replay:
    """The models and gradients of a repeated run.

    Attributes
    ----------
    models : array (T + 1, D)
        The global model at the start and after every aggregation, in float64.
    gradient2 : float
        Largest ‖∇f_i‖² where a client took its first gradient of a task, and where it would have taken its next.
    drift2 : float
        Largest ‖w_{t,E}^i − w̄_t‖².
    """

    models: Array
    gradient2: float
    drift2: float


class _Witness:
    """Stands between the engine and the ClientApp, and measures every training task."""

    def __init__(self, problem: Problem, names: tuple[str, ...], beta: float) -> None:
        self.problem, self.names, self.beta = problem, names, beta
        self.gradient2 = self.drift2 = 0.0

    def __call__(self, message: Message, context: Context) -> Message:
        training = message.metadata.message_type == messages.TRAIN
        sent = self._models(message) if training else {}
        reply = client_app.app(message, context)
        if training and reply.has_content():
            client = int(message.content.config_records[messages.CONFIG][messages.CLIENT])  # type: ignore[arg-type]
            local = self._models(reply)[messages.ARRAYS]
            start, u = sent[messages.ARRAYS], sent.get(messages.NEIGHBOURS)
            for w in (start, local):
                point = w if u is None else self.beta * w + (1 - self.beta) * u
                square = float(np.sum(self.problem.client_gradient(client, point) ** 2))
                self.gradient2 = max(self.gradient2, square)
            self.drift2 = max(self.drift2, float(np.sum((local - start) ** 2)))
        return reply

    def _models(self, message: Message) -> dict[str, Array]:
        return {
            key: flat_model(to_state(record, torch.device("cpu")), self.names)
            for key, record in message.content.array_records.items()
        }


def replay(experiment: Experiment, problem: Problem, run_dir: Path, note: Callable[[int], None]) -> Replay:
    """Repeat a run in this process.

    Parameters
    ----------
    experiment : Experiment
        The experiment of the run's config.
    problem : Problem
        The clients' losses, for their gradients.
    run_dir : Path
        Holds ``model.safetensors``.
    note : callable
        Called with the number of every aggregation that is done.

    Raises
    ------
    ConfigError
        If the result isn't the recorded one: other data, other code, or clients that failed.
    """
    names = tuple(name for name, _ in experiment.model.named_parameters())
    models: list[Array] = []

    def observe(progress: Progress) -> None:
        # If a run ends between two evaluations, its last model is reported twice.
        models[progress.aggregation :] = [flat_model(to_state(progress.arrays, torch.device("cpu")), names)]
        note(progress.aggregation)

    config = experiment.config
    on_client_model = _Witness(problem, names, config.perturbation_beta)
    grid = SequentialGrid(_as_app(on_client_model), experiment.num_clients)
    strategy = experiment.strategy
    strategy.run_options.observer = observe
    strategy.start(
        grid,
        experiment.initial_arrays(),
        num_rounds=config.num_server_rounds,
        timeout=config.round_timeout,
        train_config=server.task_config(experiment),
    )
    recorded = flat_model(safetensors.torch.load_file(run_dir / "model.safetensors"), names)
    difference = np.linalg.norm(models[-1] - recorded) if models[-1].shape == recorded.shape else np.inf
    if not difference <= _TOLERANCE * (1 + np.linalg.norm(recorded)):
        raise ConfigError(
            f"{run_dir}: repeating the run gives another model (distance {difference:.3g}): its data or the code has "
            "changed since, or clients failed"
        )
    return Replay(np.stack(models), on_client_model.gradient2, on_client_model.drift2)


def flat_model(state: dict[str, Tensor], names: tuple[str, ...]) -> Array:
    """Put parameters one after the other, shape (D,)."""
    return np.concatenate([state[name].detach().double().numpy().ravel() for name in names])


def _as_app(handler: Callable[[Message, Context], Message]) -> ClientApp:
    class Witnessed(ClientApp):
        def __call__(self, message: Message, context: Context) -> Message:
            return handler(message, context)

    return Witnessed()
