"""The global model on the test rows, and in a simulation on every client's own.

Clients one by one are scored on the rows that they train on; with ``test-on = own`` on those that they don't: the
losses that they train on are then told where the strategy needs them, without rounds, for the objective it minimises.
"""

import logging
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, MetricRecord
from torch import Tensor

from fedapp import federation
from fedapp.data.partition import OWN, UNSEEN
from fedapp.server.experiment import Experiment
from fedapp.training.evaluation import Metric, Score, chosen_metrics, evaluate
from fedapp.training.losses import loss_of
from strategies.flower import messages

log = logging.getLogger("flwr.fedapp")


# Rows of all clients times parameters, up to which their evaluation is cheap: a few hundredths of a second.
CHEAP = 5e8


def when_by_client(
    experiment: Experiment, *, has_rounds: bool, on_devices: bool, watched: Collection[str] = ()
) -> str:
    """Return when clients are evaluated one by one on the server: ``always``, ``last`` or ``never``.

    ``watched`` are the metrics that each evaluation must have, as they may end the run.
    """
    asked = experiment.config.client_records
    if on_devices:
        if asked in ("always", "last") and not experiment.config.client_evaluation:
            log.warning(
                "client-records = %r: the server has none of the clients' data; client-evaluation = true has them "
                "evaluate themselves",
                asked,
            )
        return "never"
    if asked != "auto":
        return asked
    if experiment.config.test_on == OWN:  # what is scored anyway
        return "always"
    parameters = sum(each.numel() for each in experiment.model.parameters())
    is_cheap = len(experiment.partition.client_indices) * parameters <= CHEAP
    asks_server = not experiment.config.client_evaluation
    if not has_rounds or is_cheap or (asks_server and any(name.startswith("client-") for name in watched)):
        return "always"
    log.info(
        "client-records = auto: clients are evaluated one by one in the last round only, as it takes long"
    )
    return "last"


class Evaluation:
    """Scores the global model for a strategy's ``evaluate_fn``.

    Parameters
    ----------
    by_client : str
        When to tell the metrics of every client on its own rows, such as f_i(w): ``always``, ``last``, ``never``. All
        their data must be here.
    objective : bool
        Whether the f_i(w) that clients train on are needed, also where they are scored on other rows.
    """

    def __init__(self, experiment: Experiment, *, by_client: str, objective: bool = True) -> None:
        self.experiment = experiment
        self.objective = objective
        self.by_client = by_client
        self.loss = loss_of(experiment.config.loss)
        self._test: tuple[Tensor, Tensor] | None = None
        self._metrics: tuple[Metric, ...] = ()

    def __call__(self, server_round: int, arrays: ArrayRecord) -> MetricRecord:
        """Return loss and metrics; over unseen clients also the spread of theirs."""
        experiment, partition, config = self.experiment, self.experiment.partition, self.experiment.config
        if self._test is None:
            self._test = federation.to_tensors(
                experiment.dataset, partition.test_indices, config.normalize, experiment.device
            )
            self._metrics = chosen_metrics(config.metrics, config.loss, self._test[1])
        state = federation.to_state(arrays, experiment.device)
        score = evaluate(experiment.scored_model, state, *self._test, self.loss, self._metrics)
        metrics = MetricRecord({"loss": score.loss, **score.values()})
        if config.test_on == UNSEEN:
            by_client = score.by_client(partition.test_offsets)
            for metric in self._metrics:
                known = by_client[metric.name][np.isfinite(by_client[metric.name])]
                metrics[f"{metric.name}-std"] = float(known.std()) if known.size else float("nan")
        last = self.by_client == "last" and server_round == config.num_server_rounds
        if self.by_client == "always" or last:
            own = config.test_on == OWN
            each = {
                name: f"{messages.PER_CLIENT}{name}" for name in ("loss", *(m.name for m in self._metrics))
            }
            losses = {"loss": messages.CLIENT_LOSSES}
            if self.objective or not own:
                called = losses if own else each | losses
                metrics.update(_told(self._of_training(arrays), partition.client_offsets, called))
            if own:
                metrics.update(_told(score, partition.test_offsets, each))
        return metrics

    def _of_training(self, arrays: ArrayRecord) -> Score:
        experiment = self.experiment
        training = federation.training_tensors(
            experiment.config, experiment.num_clients, experiment.device, experiment.dataset.moments
        )
        state = federation.to_state(arrays, experiment.device)
        return evaluate(experiment.scored_model, state, *training, self.loss, self._metrics)


def _told(score: Score, offsets: np.ndarray, called: Mapping[str, str]) -> dict[str, Any]:
    """Return a score of every client in lists, by what they are ``called``, and which clients have none.

    A metric that no client has is NaN for all.
    """
    values = score.by_client(offsets)
    without = {
        f"{messages.WITHOUT}{key}": score.undefined(name, values, offsets) for name, key in called.items()
    }
    return {
        **{key: values[name].tolist() for name, key in called.items()},
        **{key: clients for key, clients in without.items() if 0 < len(clients) < len(offsets) - 1},
    }
