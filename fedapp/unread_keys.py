"""Which keys of the run config a run reads, so that a value given for another can be named.

One config swaps the strategy, so keys of other methods are allowed in it. A value counts as given if it isn't the
default: with ``flwr run`` nothing else is known, and the config.toml of an earlier run holds every key.
"""

from collections.abc import Callable
from dataclasses import dataclass

from fedapp.config import RunConfig, Value, defaults
from fedapp.data import Dataset
from strategies import FederatedStrategy


@dataclass(frozen=True)
class Setting:
    """What decides which keys are read: the config as given, the strategy made from it, and the dataset."""

    config: RunConfig
    strategy: FederatedStrategy
    dataset: Dataset


def _where(name: str, *values: Value) -> Callable[[Setting], bool]:
    return lambda setting: getattr(setting.config, name) in values


def _weights_count(setting: Setting) -> bool:
    config, strategy = setting.config, setting.strategy
    if strategy.config.client_weights != config.client_weights:
        return False  # the strategy demands others
    evaluated = config.client_evaluation or config.record_divergence
    return (
        config.participation != "paired" or strategy.graph is not None or evaluated
    )  # a pair counts half each


def _rows_are_split(setting: Setting) -> bool:
    dataset = setting.dataset
    return setting.config.test_on == "unseen-clients" or dataset.num_train == len(dataset.y)


def _work_is_counted(setting: Setting) -> bool:
    """Tell whether local-epochs says how many, or is 0 for work that is in steps."""
    kind = setting.config.step_heterogeneity.partition(":")[0]
    return setting.config.local_epochs == 0 or kind not in ("list", "range", "uniform")


def _has_graph(setting: Setting) -> bool:
    return setting.strategy.graph is not None


# Read by every run.
ALWAYS = frozenset({
    "strategy", "num-server-rounds", "time-budget", "round-timeout", "min-clients", "client-evaluation",
    "server-lr", "server-optimizer", "clock", "dataset", "data-path", "normalize", "test-on", "partitioner",
    "min-samples", "model", "init", "local-steps", "step-heterogeneity", "normalize-steps", "batch-size", "lr",
    "lr-schedule", "momentum", "l2", "clip-norm", "update-norm-bound", "dp", "seed", "eval-every", "checkpoint-every",
    "resume", "record-divergence", "server-device", "client-device", "client-threads", "results-dir", "run-name",
    "tracker",
})  # fmt: skip

# Read by the strategies whose Config has a field of that name.
OWN = frozenset({
    "participation", "fraction-train", "aggregation-rule", "faulty-clients", "proximal-mu", "perturbation-beta",
    "neighbour-memory", "aggregation-weights", "fedfix-interval", "buffer-size",
})  # fmt: skip

# Read only where this holds.
CONDITIONS: dict[str, Callable[[Setting], bool]] = {
    "client-weights": _weights_count,
    "message-floor": _has_graph,
    "neighbours": _has_graph,
    "message-epsilon": _has_graph,
    "message-delta": lambda setting: _has_graph(setting) and setting.config.message_epsilon > 0,
    "neighbour-memory": lambda setting: setting.config.perturbation_beta < 1,
    "time-scenario": lambda setting: (
        setting.config.clock == "virtual" or setting.config.step_heterogeneity == "speed"
    ),
    "test-fraction": _rows_are_split,
    "class-imbalance": _where("partitioner", "label-quantity-skew"),
    "data-imbalance": _where("partitioner", "label-quantity-skew", "dirichlet"),
    "dirichlet-alpha": _where("partitioner", "dirichlet"),
    "local-epochs": _work_is_counted,
    "faulty-clients": lambda setting: setting.config.aggregation_rule != "mean",
    "dp-clipping-norm": _where("dp", "central", "local"),
    "dp-noise-multiplier": _where("dp", "central", "local"),
    "dp-delta": _where("dp", "central", "local"),
}


def unread_keys(setting: Setting) -> dict[str, Value]:
    """Return the keys that are given and that the run doesn't read, with their values, in the schema's order."""

    def is_read(key: str) -> bool:
        own = key not in OWN or hasattr(setting.strategy.config, key.replace("-", "_"))
        return own and (key not in CONDITIONS or CONDITIONS[key](setting))

    values = setting.config.flat()
    return {key: value for key, value in values.items() if value != defaults()[key] and not is_read(key)}
