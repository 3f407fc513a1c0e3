"""The stability monitor alone, on sequences of models and of losses made by hand; and one run that diverges."""

import logging
from collections.abc import Iterable

import numpy as np
import pytest

from strategies import FedBuff, FedFix
from strategies.core.config import AsynchronousConfig, SynchronousConfig
from strategies.core.stability import ENTRIES, StabilityMonitor, keys_that_help
from strategies.flower.errors import DivergedError

RNG = np.random.default_rng(0)
START, END, ACROSS = RNG.normal(size=(3, 50))


def told(models: Iterable[np.ndarray], losses: Iterable[float] = (), part: float = 1.0) -> str:
    monitor = StabilityMonitor(lambda: "try less")
    for model in models:
        monitor.note_model(model, part)
    for loss in losses:
        monitor.evaluated(loss)
    return monitor.warning


def converging(number: int = 60) -> list[np.ndarray]:
    return [END + 0.8**k * (START - END) for k in range(number)]


def noise(number: int, size: float) -> list[np.ndarray]:
    return [END + size * RNG.normal(size=50) for _ in range(number)]


STABLE = {
    "straight to the end": converging(),
    "to the end, where rounding is all that moves": converging(400),
    "noise at a plateau": converging(20) + noise(60, 0.1),
    "a short swing that dies out": [END + (-0.9) ** k * (START - END) for k in range(60)],
    "along a valley": [np.sqrt(k) * END + 0.1 * (-1) ** k * ACROSS for k in range(100)],
    "a random walk": list(np.cumsum(RNG.normal(size=(80, 50)), axis=0)),
    "at rest, and then on": [START] * 10 + converging(),
}
UNSTABLE = {
    "grows on one side": [START + 1.3**k * END for k in range(30)],
    "grows from side to side": [END + (-1.2) ** k * START for k in range(30)],
    "grows slowly, in a wave": [1.1**k * np.cos(k * 1.2) * END for k in range(60)],
    "swings": [END + (-1) ** k * START for k in range(30)],
    "swings in a wave": [np.cos(k * np.pi / 2) * END + 1e-3 * ACROSS * k for k in range(30)],
}


@pytest.mark.parametrize("models", STABLE.values(), ids=STABLE)
def test_a_model_that_learns_or_rests_is_stable(models):
    assert told(models) == ""


@pytest.mark.parametrize("models", UNSTABLE.values(), ids=UNSTABLE)
def test_one_that_swings_or_grows_is_said_to_once(models, caplog):
    with caplog.at_level(logging.WARNING, "flwr.strategies"):
        warning = told(models)
    assert warning.endswith("the steps are too large; try less")
    assert [record.getMessage() for record in caplog.records] == [warning]
    # Between two of these models others come that count a quarter of a sweep each.
    assert told((model for model in models for _ in range(4)), part=0.25) == warning


def test_a_large_model_is_looked_at_in_part():
    large = [np.resize(model, 3 * ENTRIES + 1) for model in UNSTABLE["swings"]]
    assert "swings" in told(large)


# Of a run on digits: FedFix, ten clients with two classes each, local momentum; it came to an accuracy of 0.91.
FEW_CLIENTS = [
    2.3,
    2.29,
    1.72,
    2.27,
    2.38,
    1.61,
    1.36,
    2.12,
    1.45,
    1.99,
    1.02,
    1.35,
    1.11,
    1.32,
    0.83,
    0.61,
    0.4,
]
LEARNS = [2.3, 1.9, 1.2, 0.8, 0.6, 0.5, 0.45, 0.4, 0.4, 0.4]


@pytest.mark.parametrize(
    ("losses", "warns"),
    [
        (LEARNS, False),
        ([*LEARNS, 0.6, 0.4, 0.7, 0.4, 0.6, 0.4], False),  # noise at a plateau
        ([*LEARNS, 0.5, 0.7, 1.0, 1.5, 2.0, 2.2], False),  # overfits
        ([*LEARNS, 2.0], False),  # once
        ([*LEARNS, 2.0, 0.5, 1.9, 0.5, 2.1], True),
        (FEW_CLIENTS, False),
        ([*FEW_CLIENTS, *[1.6, 0.4] * 4], True),  # as before, but nothing more is learnt
        ([2.3, 2.31, 2.3, 2.32, 2.29, 2.33, 2.3], False),  # nothing is learnt
        ([2.3, 1.5, float("inf"), float("nan"), float("inf")], False),  # no swing: the run ends as diverged
        ([-1.0, -2.0, -3.0], False),
    ],
)
def test_losses(losses, warns):
    assert bool(told([], losses)) == warns


def test_it_names_the_keys_that_the_strategy_has():
    assert keys_that_help(SynchronousConfig(), has_rounds=True) == "what helps is a smaller lr"
    assert keys_that_help(SynchronousConfig(server_lr=2.0), has_rounds=True) == (
        "what helps is a smaller lr or a smaller server_lr than 2"
    )
    assert keys_that_help(FedBuff.Config(server_lr=1.0), has_rounds=False) == (
        "what helps is a smaller lr or a smaller server_lr than 1 (0: the method's own) or a larger buffer_size"
    )
    assert "server_lr" not in keys_that_help(AsynchronousConfig(), has_rounds=False)


@pytest.mark.parametrize(("server_lr", "warns"), [(1.0, True), (0.0, False)])
def test_fedfix_with_the_papers_step_is_said_to_diverge(
    server_lr, warns, federation, model, train_config, caplog
):
    strategy = FedFix(fedfix_interval=0.05, server_lr=server_lr, fraction_evaluate=0.0)
    rest = {"num_rounds": 200, "train_config": train_config(1, 0.9)}
    if warns:
        with pytest.raises(DivergedError):
            strategy.start(federation([3.0] * 3, [1] * 3), model(1.0), **rest)
    else:
        strategy.start(federation([3.0] * 3, [1] * 3), model(1.0), **rest)
    assert ("server_lr than 1 (0: the method's own)" in strategy.session.reporter.stability.warning) == warns
    assert caplog.text.count("the steps are too large; what helps") == warns


def test_a_run_that_goes_on_is_compared_with_its_beginning():
    plateau = noise(40, 0.1)
    for goes_on, warns in ((True, False), (False, True)):
        monitor, rest = StabilityMonitor(str), StabilityMonitor(str)
        for model in converging(20):
            monitor.note_model(model, 1.0)
        for loss in LEARNS:
            monitor.evaluated(loss)
        if goes_on:
            rest.restore(monitor.state())
        for model in plateau:
            rest.note_model(model, 1.0)
        for loss in (0.4, 0.7, 0.8, 0.7):
            rest.evaluated(loss)
        assert bool(rest.warning) == warns
    rest.restore(rest.state())
    assert rest.warning


@pytest.mark.parametrize("part", [1.0, 0.25])
@pytest.mark.parametrize("models", [*STABLE.values(), *UNSTABLE.values()], ids=[*STABLE, *UNSTABLE])
def test_a_run_resumed_after_each_aggregation_is_warned_as_one_that_goes_on(models, part):
    losses = [*LEARNS, 0.4, 0.7, 0.8, 0.7, 0.4, 0.9]
    monitor, resumed = StabilityMonitor(str), StabilityMonitor(str)
    for number, model in enumerate(models):
        for each in (monitor, resumed):
            each.note_model(model, part)
            each.evaluated(losses[number % len(losses)])
        restored = StabilityMonitor(str)
        restored.restore(resumed.state())
        resumed = restored
        assert resumed.warning == monitor.warning
