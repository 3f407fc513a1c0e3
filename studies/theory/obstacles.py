"""The assumptions of all bounds, as conditions on a run and its config.

A key of the run config that is in neither table here breaks the assumptions if the run reads it and its value isn't
the default. So a new key is refused until its effect on the bounds is known.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np

from fedapp import federation, server
from fedapp.config import ConfigError, RunConfig, Setting, Value, in_keys
from fedapp.config.run_config import key_of
from fedapp.data import Dataset
from fedapp.report.files import read_summary
from strategies.timing.time_scenario import TimeScenario

CONVEX_MODELS = ("logistic", "perceptron")
SYNCHRONOUS = ("fedavg", "fedprox", "spectral")
ASYNCHRONOUS = ("async-fedavg", "fedfix")

# Keys that may have any value: the problem, its constants, the bounds and the repeated run take them into account, or
# they change no model.
ANY_VALUE = frozenset(
    [
        "client-weights",
        "proximal-mu",
        "perturbation-beta",
        "neighbour-memory",
        "message-floor",
        "neighbours",
        "message-epsilon",
        "message-delta",
        "fedfix-interval",
        "time-scenario",
        "task-work",
        "dataset",
        "data-path",
        "input-column",
        "label-column",
        "group-column",
        "normalize",
        "test-fraction",
        "test-on",
        "partitioner",
        "class-imbalance",
        "data-imbalance",
        "min-samples",
        "dirichlet-alpha",
        "similarity",
        "classes-per-client",
        "init",
        "metrics",
        "local-epochs",
        "local-steps",
        "fine-tune-epochs",
        "normalize-steps",
        "batch-size",
        "lr",
        "l2",
        "num-server-rounds",
        "time-budget",
        "round-timeout",
        "min-clients",
        "client-evaluation",
        "client-records",
        "figures",
        "seed",
        "eval-every",
        "checkpoint-every",
        "resume",
        "record-divergence",
        "server-device",
        "client-device",
        "tf32",
        "client-threads",
        "engine",
        "results-dir",
        "tracker",
        "log-format",
        "metrics-port",
        "metrics-host",
        "run-name",
    ]
)

_AS_PLANNED = "every client must take part as planned"
_SAME_STEPS = "all clients must do the same number of steps"

# For each other key the values that the theorems cover, and the reason why any other value breaks an assumption.
DEMANDS: dict[str, tuple[tuple[Value, ...], str]] = {
    "model": (CONVEX_MODELS, f"its loss isn't convex; {' and '.join(CONVEX_MODELS)} are"),
    "strategy": (SYNCHRONOUS + ASYNCHRONOUS, "no theorem is about it"),
    "loss": (("cross-entropy",), "the theorems' problems here are of cross-entropy"),
    "augment": (("none",), "images changed at random are other data than the problem's"),
    "optimizer": (("sgd",), "must be sgd"),
    "momentum": ((0,), "the theorems are about steps without"),
    "clip-norm": ((0,), "a clipped gradient is biased"),
    "safeguards": (("auto", "off"), "a bounded update is biased"),
    "update-norm-bound": ((0,), "a shortened update is biased"),
    "aggregation-rule": (("mean",), "must be mean"),
    "dp": (("none",), "its clipping is biased"),
    "dp-noise": (("auto", "seed"), "its noise can't be repeated"),
    "compression": (("none",), "the theorems are about updates as they are; must be none"),
    "lr-schedule": (("constant",), "must be constant"),
    "participation": (("full",), "all clients must take part"),
    "stragglers": ((0,), _SAME_STEPS),
    "round-deadline": ((0,), "a round must wait for all clients"),
    "over-select": ((0,), "a round must wait for all clients"),
    "step-heterogeneity": (("none",), _SAME_STEPS),
    "concurrency": ((0,), "all clients must be at work"),
    "availability": (("always",), "all clients must be there"),
    "task-failure": ((0,), _AS_PLANNED),
    "server-optimizer": (("sgd",), "must be sgd"),
    "server-lr": ((0, 1), f"must be 1, but for {' and '.join(ASYNCHRONOUS)}"),
    "clock": (("auto", "virtual"), "the run can't be repeated"),
    "aggregation-weights": (("time-based",), "must be time-based, by task times that are known"),
}


def obstacles(config: RunConfig, num_clients: int) -> list[str]:
    """Return the assumptions of all bounds that a config breaks.

    Raises
    ------
    ConfigError
        If a part of it can't be made any more, such as a trace of task times.
    """
    usual = type(config).defaults()
    found = {}
    for key, value in config.flat().items():
        allowed, why = DEMANDS.get(key, ((usual[key],), f"the theorems are about runs with {usual[key]!r}"))
        free = key in ANY_VALUE or (key == "server-lr" and config.strategy not in SYNCHRONOUS)
        if not free and value not in allowed:
            found[key] = f"{key} = {value!r}: {why}"
    try:
        read = _read_keys(config, num_clients, list(found))
        return [found[key] for key in read] + _changing_times(config, num_clients)
    except ValueError as error:
        raise ConfigError(in_keys(error, type(config))) from None


def failures(run_dir: Path) -> list[str]:
    """Return why a run's record has nothing to compare with the bounds, or clients that failed."""
    summary = read_summary(run_dir)
    status, failed = summary.get("status"), summary.get("failures", 0)
    problems = [f"status = {status!r}: the run must be finished"] if status != "finished" else []
    if summary.get("aggregations") == 0:
        problems.append("aggregations = 0: the run ended before its first new model")
    return problems + ([f"failures = {failed}: {_AS_PLANNED}"] if failed else [])


def uneven_work(config: RunConfig, sizes: np.ndarray) -> list[str]:
    """Return why epochs break the assumptions, for clients of these sizes (C,)."""
    found = []
    batch = config.batch_size
    if config.local_epochs and 0 < batch < sizes.max():
        found.append(
            f"local-epochs = {config.local_epochs} with batch-size = {batch}: the batches of an epoch depend on each "
            "other, so gradients aren't unbiased; local-steps draws them anew"
        )
        steps = -(-sizes // batch)
        if steps.min() < steps.max():
            found.append(
                f"clients do {steps.min()} to {steps.max()} steps an epoch: all must do the same number"
            )
    return found


class _OnceLookedAt:
    """Data that are loaded at the first access, as few readers of keys need them."""

    def __init__(self, load: Callable[[], Dataset]) -> None:
        self._load = load

    def __getattr__(self, name: str) -> Any:
        return getattr(self._load(), name)


def _read_keys(config: RunConfig, num_clients: int, keys: list[str]) -> list[str]:
    """Return those of ``keys`` that the run reads."""
    data = cast("Dataset", _OnceLookedAt(lambda: federation.dataset_of(config, num_clients)))
    setting = Setting(config, server.build_strategy(config), data, gpus=False)
    return [key for key in keys if key_of(type(config), key).readers.holds(setting, key)]


def _changing_times(config: RunConfig, num_clients: int) -> list[str]:
    """Return an obstacle if an asynchronous run's task times change: its terms need the cycle of fixed times."""
    if config.strategy not in ASYNCHRONOUS:
        return []
    times = TimeScenario(config.time_scenario, num_clients, config.seed)
    if times.devices is None and not times.law and all(min(own) == max(own) for own in times.trace):
        return []
    return [
        f"time-scenario = {config.time_scenario!r}: the asynchronous terms are of task times that are known and "
        "don't change, F0 to F99 or a trace with one time for each client"
    ]
