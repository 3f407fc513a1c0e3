"""A scheme that waits for more contributions than there are says so, and doesn't wait for ever."""

import time
from dataclasses import dataclass
from typing import Any

import pytest

from examples.own_scheme.own_scheme.scheme import Every
from strategies import (
    AsynchronousConfig,
    AsynchronousStrategy,
    FedFix,
    Rennala,
    RunError,
    VirtualClock,
    WallClock,
)
from strategies.clock import Clock
from tests.strategies.events.runs import text_of

pytestmark = pytest.mark.timeout(60)


@dataclass(frozen=True)
class ManyConfig(AsynchronousConfig):
    """After how many arrivals there is a new model, however few clients there are."""

    many: int = 5


class Many(AsynchronousStrategy):
    """The scheme that waits in vain."""

    Config = ManyConfig
    config: ManyConfig

    def ready(self, arrived: int) -> bool:
        return arrived >= self.config.many


@pytest.fixture
def go(model, train_config):
    def run(
        kind: Any, grid: Any, clock: Clock, seconds: float = 20.0, rounds: int = 3, **options: Any
    ) -> Any:
        end = time.monotonic() + seconds
        strategy = kind(
            clock=clock, fraction_evaluate=0.0, should_stop=lambda: time.monotonic() > end, **options
        )
        strategy.start(grid, model(1.0), num_rounds=rounds, train_config=train_config(1, 0.1))
        assert clock.name == "wall" or time.monotonic() < end, "the loop stalled"
        return strategy

    return run


IN_VAIN = (
    r"ready\({n}\) is False, and no client is training: {n} contributions wait, and {n} of 3 clients are active; "
    r"Many must accept len\(self.session.task_table.active_clients\) contributions"
)


@pytest.mark.parametrize("availability", ["always", "diurnal:0.5,4", "bernoulli:0.5"])
def test_in_virtual_time_the_run_ends(go, federation, availability):
    with pytest.raises(RunError, match=f"^{IN_VAIN.format(n=3)}$"):
        go(Many, federation(), VirtualClock(), availability=availability)


def test_so_it_does_when_clients_are_dropped_and_fail_again(go, federation, caplog):
    grid = federation()
    grid.spoil(2, "raise")
    with pytest.raises(RunError, match=f"^{IN_VAIN.format(n=2)}$"):
        go(Many, grid, VirtualClock(), many=3)
    assert grid.asked().count(2) == 4  # three times, and once more when it was dropped


def test_a_dropped_client_that_is_well_again_is_waited_for(go, federation):
    grid = federation()
    grid.spoil(2, "raise")
    pull = grid.pull_messages

    def pulled(ids: Any) -> Any:
        if grid.asked().count(2) == 3:
            grid.spoil(2, None)
        return pull(ids)

    grid.pull_messages = pulled
    assert go(Many, grid, VirtualClock(), many=3).session.aggregations == 3


def test_a_time_budget_ends_it_as_ever(go, federation):
    assert (
        go(
            Many, federation(), VirtualClock(), availability="diurnal:0.9,4", time_budget=9.0
        ).session.aggregations
        == 0
    )


def test_in_real_time_it_is_said_once_and_another_client_helps(go, federation, add_node, caplog, monkeypatch):
    monkeypatch.setattr("strategies.events.event_stream.REFRESH_EVERY", 0.02)
    grid = federation()
    pull = grid.pull_messages

    def pulled(ids: Any) -> Any:
        if "no client is training" in text_of(caplog) and 77 not in grid.nodes:
            add_node(grid, 0, 3, 77)
        return pull(ids)

    grid.pull_messages = pulled
    assert go(Many, grid, WallClock(), many=4).session.aggregations == 3
    assert text_of(caplog).count("3 of 3 clients are active; Many must accept") == 1
    assert text_of(caplog).count("The run waits for another client") == 1


def test_when_all_are_away_it_is_not_the_scheme_that_waits_in_vain(go, federation, quick, caplog):
    """Three of Rennala's five contributions are there when all clients go; those who come back bring the others."""
    grid = federation()
    pull, state = grid.pull_messages, {"there": True, "gone": False}

    def switch(*, there: bool) -> None:
        state["there"] = there
        for node in grid.nodes.values():
            node.present, node.transport = there, {} if there else {"train": "unavailable"}

    def pulled(ids: Any) -> Any:
        if not state["gone"] and len(grid.asked()) == 3:
            state["gone"] = True
            switch(there=False)
        text = text_of(caplog)
        if not state["there"] and text.count("is dropped after 3") == 3 and "the run waits for one" in text:
            switch(there=True)
        return pull(ids)

    grid.pull_messages = pulled
    strategy = go(Rennala, grid, WallClock(), buffer_size=5, min_clients=3, seconds=50.0)
    assert strategy.session.aggregations == 3
    assert "no client is training" not in text_of(caplog)


@pytest.mark.parametrize("clock", [VirtualClock, WallClock])
def test_the_example_is_content_with_those_who_are_left(go, federation, clock, caplog):
    grid = federation()
    grid.spoil(2, "raise")
    assert go(Every, grid, clock(), every=3).session.aggregations == 3
    assert go(Every, federation(), clock(), every=5).session.aggregations == 3
    assert "no client is training" not in text_of(caplog)


def test_a_scheme_that_never_makes_a_model_is_refused(go, federation):
    class Neither(AsynchronousStrategy):
        """Says nothing."""

    class Often(Neither):
        """Says when."""

        interval = 0.5

    grid = federation()
    for clock in (VirtualClock(), WallClock()):
        with pytest.raises(
            RunError, match=r"^Neither makes no model: it fills in neither ready nor interval$"
        ):
            go(Neither, grid, clock)
    assert grid.sent == []
    assert (
        go(Often, grid, VirtualClock()).session.aggregations
        == go(FedFix, grid, VirtualClock()).session.aggregations
        == 3
    )


def test_intervals_with_nothing_in_them_cost_nothing(go, federation):
    strategy = go(FedFix, federation(), VirtualClock(), fedfix_interval=1e-9, rounds=20)
    assert strategy.session.aggregations == 20
    assert strategy.session.scheduler.now() == pytest.approx(4.0, abs=1e-7)  # tasks of 0.2, 0.6 and 1 s


@pytest.mark.parametrize("interval", [0.0, -1, 1e-10, float("nan"), float("inf")])
@pytest.mark.parametrize("clock", [VirtualClock, WallClock])
def test_an_interval_that_is_none_is_refused(go, federation, interval, clock):
    class Mine(AsynchronousStrategy):
        pass

    Mine.interval = interval
    with pytest.raises(
        RunError, match=rf"^Mine\.interval = {interval:g}: must be seconds >= 1e-09, or None where "
    ):
        go(Mine, federation(), clock(), seconds=3.0)


def test_a_run_in_which_no_work_ever_counts_ends(go, federation):
    class Fastidious(Many):
        def is_fresh_enough(self, staleness: int) -> bool:
            return False

    with pytest.raises(
        RunError,
        match=r"^the last 601 contributions didn't count, .*: Fastidious's accept, and its is_fresh_enough",
    ):
        go(Fastidious, federation(), VirtualClock())
