"""The step of the global model alone: which step size it takes, and which models can't be trained on."""

import logging
from types import SimpleNamespace

import numpy as np
import pytest

from strategies import DivergedError
from strategies.core.server_step import ServerStep
from strategies.updates.server_optimizer import make_optimizer
from tests.strategies.parts import run_of

MODEL, UPDATE = np.array([1.0, -2.0]), np.array([0.5, 1.0])


def step(optimizer: str = "sgd", lr: float = 0.0, own: float = 1.0) -> ServerStep:
    run = run_of(layout=SimpleNamespace(overflows=lambda w: False))
    return ServerStep(run, make_optimizer(optimizer, 1.0), lr, lambda: own, stale=False)


@pytest.mark.parametrize(("lr", "own", "used"), [(0.5, 1.0, 0.5), (0.0, 0.25, 0.25), (0.0, 1.0, 1.0)])
def test_the_step_size_is_the_given_one_or_the_methods(lr, own, used):
    part = step(lr=lr, own=own)
    part.note_nonzero(UPDATE)
    assert part.apply(MODEL, UPDATE).tolist() == (MODEL + used * UPDATE).tolist()


def test_an_optimizers_usual_step_size_comes_before_the_methods():
    adaptive, given = step("adam", own=7.0), step("adam", lr=0.1)
    usual = adaptive.optimizer.usual_lr
    assert usual
    one = adaptive.apply(MODEL, UPDATE) - MODEL
    other = given.apply(MODEL, UPDATE) - MODEL
    assert one / usual == pytest.approx(other / 0.1, rel=1e-12)


def test_what_the_next_step_rests_on_is_saved_and_restored():
    whole, again = step("momentum", 0.5), step("momentum", 0.5)
    first = whole.apply(MODEL, UPDATE)
    again.restore(whole.state())
    assert again.apply(first, UPDATE).tolist() == whole.apply(first, UPDATE).tolist()


def test_squares_reach_the_optimizer():
    part = step("fedexp")
    part.apply(MODEL, UPDATE, squares=10.0)
    assert part.optimizer.squares == 10.0


def test_a_first_aggregation_that_moves_nothing_is_warned_of_once(caplog):
    part = step()
    with caplog.at_level(logging.WARNING, "flwr"):
        part.apply(MODEL, part.note_nonzero(np.zeros(2)))
        part._run.aggregations = 1
        part.apply(MODEL, part.note_nonzero(np.zeros(2)))
    assert len(caplog.records) == 1
    part.note_nonzero(UPDATE)
    assert part._run.any_nonzero_update


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e200])
def test_a_model_that_cannot_be_trained_on_ends_the_run(bad):
    part = step()
    assert part.validated(MODEL) is MODEL
    with pytest.raises(DivergedError, match="aggregation 1 made a model"):
        part.validated(np.array([1.0, bad]))
