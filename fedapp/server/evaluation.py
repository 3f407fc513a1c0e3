"""The global model on the test rows, and in a simulation on every client's own.

Clients one by one are scored on the rows that they train on; with ``test-on = own`` on those that they don't: the
losses that they train on are then told where the strategy needs them, without rounds, for the objective it minimises.
"""

import logging

import numpy as np
from flwr.app import ArrayRecord, MetricRecord
from torch import Tensor

from fedapp import federation
from fedapp.data.partition import OWN
from fedapp.server.experiment import Experiment
from fedapp.training.evaluation import Metric, chosen_metrics, evaluate
from fedapp.training.losses import loss_of
from strategies.flower import messages

log = logging.getLogger("flwr.fedapp")


# Rows of all clients times parameters, up to which their evaluation is cheap: a few hundredths of a second.
CHEAP = 5e8


def when_by_client(experiment: Experiment, *, has_rounds: bool, on_devices: bool) -> str:
    """Return when clients are evaluated one by one on the server: ``always``, ``last`` or ``never``."""
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
    if not has_rounds or len(experiment.partition.client_indices) * parameters <= CHEAP:
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
        if config.test_on == "unseen-clients":
            by_client = score.by_client(partition.test_offsets)
            for metric in self._metrics:
                known = by_client[metric.name][np.isfinite(by_client[metric.name])]
                metrics[f"{metric.name}-std"] = float(known.std())
        last = self.by_client == "last" and server_round == config.num_server_rounds
        if self.by_client == "always" or last:
            own = config.test_on == OWN
            trained = self._of_clients(arrays) if self.objective or not own else {}
            for name, values in trained.items():
                key = messages.CLIENT_LOSSES if name == "loss" else f"{messages.PER_CLIENT}{name}"
                metrics[key] = values.tolist()
            if own:
                for name, values in score.by_client(partition.test_offsets).items():
                    metrics[f"{messages.PER_CLIENT}{name}"] = values.tolist()
        return metrics

    def _of_clients(self, arrays: ArrayRecord) -> dict[str, np.ndarray]:
        experiment, partition = self.experiment, self.experiment.partition
        training = federation.training_tensors(
            experiment.config, experiment.num_clients, experiment.device, experiment.dataset.moments
        )
        state = federation.to_state(arrays, experiment.device)
        score = evaluate(experiment.scored_model, state, *training, self.loss, self._metrics)
        return score.by_client(partition.client_offsets)
