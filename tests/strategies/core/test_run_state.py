"""The state of a run alone: how it begins, what a checkpoint holds, and how it ends without any client's work."""

from functools import partial
from typing import Any

import numpy as np
import pytest

from strategies import DivergedError, RunError, VirtualClock, WallClock
from strategies.core.config import FlowerOptions, SynchronousConfig
from strategies.core.run_state import RunOptions, RunState
from strategies.timing.virtual_scheduler import make_scheduler
from strategies.updates.server_optimizer import make_optimizer
from tests.strategies.parts import begun, model_of


def moved_on() -> Any:
    run = begun((), None, 1.0, 2.0)
    run.result.arrays, run.aggregations, run.evaluated = model_of(3.0, 5.0), 4, 3
    run.memory["c"] = np.array([7.0])
    run.clock.wait_until(9.0)
    return run


def test_a_run_begins_from_its_arrays_and_has_done_nothing():
    run = begun((), None, 1.0, 2.0)
    assert (run.model.tolist(), run.layout.size, run.aggregations, run.evaluated) == ([1.0, 2.0], 2, 0, 0)
    assert (run.any_nonzero_update, run.any_failure, run.model_unchanged, dict(run.memory)) == (
        False,
        False,
        False,
        {},
    )


def test_a_state_gives_model_counts_memory_and_time_back_once():
    state = moved_on().state()
    again = _resumed(state)
    assert (again.model.tolist(), again.aggregations, again.evaluated) == ([3.0, 5.0], 4, 3)
    assert (again.memory["c"].tolist(), again.scheduler.now(), again.run_id) == ([7.0], 9.0, state["run-id"])
    assert again.pop_resume_state() is None
    assert begun().run_id != state["run-id"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"strategy": "FedProx"}, "the state is that of FedProx, this is FedAvg"),
        ({"model": np.array([1.0, np.nan])}, "the model of its state isn't finite"),
        ({"model": np.zeros(3)}, "a model of 3 values, this one has 2"),
        ({"layout": [["v", [2]]]}, r"a model with the array v \(2,\) where this one has the array w \(2,\)$"),
        ({"layout": [["w", [2, 1]]]}, r"with the array w \(2, 1\) where this one has the array w \(2,\)$"),
        ({"layout": [["w", [2]], ["v", [0]]]}, r"with the array v \(0,\) where this one has no array$"),
    ],
)
def test_a_state_of_something_else_is_refused(change, said):
    state = {**moved_on().state(), **change}
    with pytest.raises(ValueError, match=said):
        _resumed(state)


def _resumed(state: Any) -> Any:
    run = begun()
    run.restore(state)
    run.begin(model_of(), run.pop_resume_state())
    return run


@pytest.mark.parametrize(
    ("engine", "clock", "kind"),
    [
        ("memory", None, VirtualClock),
        ("deployment", None, WallClock),
        ("deployment", VirtualClock(), VirtualClock),
    ],
)
def test_the_clock_follows_from_the_grid_unless_one_is_given(federation, engine, clock, kind):
    grid = federation()
    grid.engine = engine
    times = partial(make_scheduler, scenario="F0", seed=0, budget=0.0)
    run = RunState("FedAvg", SynchronousConfig(), FlowerOptions(), times, RunOptions(clock))
    run.attach_grid(grid)
    assert isinstance(run.clock, kind)
    assert run.in_real_time() == (kind is WallClock)


def test_fedexp_tells_the_mean_of_the_last_two_models():
    run, optimizer = moved_on(), make_optimizer("fedexp", 1.0)
    assert run.reported_result(make_optimizer("sgd", 1.0)) is run.result
    optimizer.step(np.array([1.0, 1.0]), np.array([2.0, 4.0]))
    assert run.reported_result(optimizer).arrays["w"].numpy().tolist() == [2.0, 3.0]


@pytest.mark.parametrize(
    ("reason", "error"),
    [
        ("", "the log names the reasons"),
        ("out of memory", "the last reason was 'out of memory'$"),
        ("its arrays hold values that aren't finite (NaN or infinity)", "the clients' steps are too large"),
    ],
)
def test_a_run_whose_clients_never_worked_ends_with_the_last_reason(reason, error):
    run = begun()
    run.check_progress(run.result.arrays)  # nothing was tried
    run.aggregations = 2
    if reason:
        run.note_failure(reason)
    with pytest.raises(RunError, match=error) as raised:
        run.check_progress(run.result.arrays)
    assert isinstance(raised.value, DivergedError) == ("finite" in reason)
    run.check_progress(model_of())  # a new model


def test_a_warning_is_logged_once_a_run(caplog):
    run = begun()
    for number in range(2):
        run.warn_once("number %d", number)
    assert [record.getMessage() for record in caplog.records] == ["number 0"]
    run.begin(model_of())
    run.warn_once("number %d", 5)
    assert caplog.records[-1].getMessage() == "number 5"
