"""What a run's differential privacy costs, and what it forbids."""

import logging

from torch import nn

from fedapp.config import ConfigError, RunConfig
from fedapp.data import Dataset
from fedapp.gaussian_mechanism import gaussian_epsilon
from fedapp.server.record import Entry, Observer
from fedapp.training.state import names_of
from strategies import FederatedStrategy

# Of the noise multiplier z: the ε that goes with less is beyond what a float holds, or as good as no privacy.
LEAST_NOISE = 1e-6

log = logging.getLogger("flwr.fedapp")


class PrivacyAccount(Observer):
    """Adds ε of the client that has sent most; of every round, whether a client took part or not.

    Where clients are placed in a graph, each request for a client's direction costs (``message-epsilon``,
    ``message-delta``) more. The two kinds are added up, ε and δ.
    """

    def __init__(self, config: RunConfig, strategy: FederatedStrategy) -> None:
        self.config = config
        self.strategy = strategy

    def measure(self, entry: Entry) -> None:
        """Add ``dp-epsilon`` at ``dp-delta``, or, with directions, at the ``dp-delta`` that is added, too."""
        config, releases = self.config, entry.progress.aggregation
        if releases and not self.strategy.has_rounds:
            releases = max(1, self.strategy.most_tasks())
        directions = 0 if self.strategy.graph is None else self.strategy.graph.most_asked()
        spent = 0.0
        if releases:
            spent = gaussian_epsilon(config.dp_noise_multiplier, config.dp_delta, releases)
        if directions:
            entry.metrics["dp-delta"] = (
                config.dp_delta if releases else 0.0
            ) + directions * config.message_delta
        if releases or directions:
            entry.metrics["dp-epsilon"] = spent + directions * config.message_epsilon


def check_privacy(config: RunConfig, strategy: FederatedStrategy) -> None:
    """Raise ConfigError if clients of a run with differential privacy would reveal more of their data than models."""
    asked = strategy.graph is not None and strategy.graph.updates is None
    if config.dp == "local" and asked and not config.message_epsilon:
        raise ConfigError(
            "message-epsilon = 0: with dp = 'local' the direction of a client's data, by which adjacency weights and "
            "the spectral method place it in the graph, would be sent as it is; allowed is a number > 0, or, with "
            "the spectral methods, graph-source = updates"
        )
    if config.dp_noise_multiplier < LEAST_NOISE:
        raise ConfigError(
            f"dp-noise-multiplier = {config.dp_noise_multiplier}: with dp = {config.dp!r} must be {LEAST_NOISE:g} or "
            "more; less noise keeps nothing private"
        )
    if config.client_evaluation:
        raise ConfigError(
            f"client-evaluation = true: with dp = {config.dp!r} clients' losses would be sent as they are; "
            "allowed is false"
        )


def check_standardized(config: RunConfig, dataset: Dataset) -> None:
    """Refuse ``normalize = "standardize"`` where it can't be, or where it tells what must not be told.

    Raises
    ------
    ConfigError, DataError
    """
    dataset.require_values()
    if config.dp == "local":
        raise ConfigError(
            "normalize = 'standardize': sums of a device's inputs leave it, and dp = 'local' lets nothing leave "
            "without noise; allowed are false, true, symmetric"
        )
    if config.dp == "central":
        log.warning(
            "dp = central: its noise doesn't cover the mean and deviation of all inputs, which every client is told "
            "(normalize = standardize)"
        )


def say_what_stays(config: RunConfig, model: nn.Module) -> None:
    """Say which arrays of a model no client's data may change."""
    if names := names_of(model).fixed:
        log.warning(
            "dp = %r: arrays that aren't trained would tell of the data, and stay as the initial model has "
            "them: %s%s",
            config.dp,
            ", ".join(names[:3]),
            f", … ({len(names)})" if len(names) > 3 else "",
        )


def say_what_is_repeated(config: RunConfig) -> None:
    """Say what the account of a run that goes on doesn't hold: in real time it does anew what no checkpoint has."""
    if config.resume and config.clock == "wall":
        log.warning(
            "dp = %r: what was sent after the checkpoint that this run goes on from isn't in dp-epsilon; it is "
            "done again, with new noise: as many aggregations as checkpoint-every was, at most, and tasks handed out "
            "since",
            config.dp,
        )
