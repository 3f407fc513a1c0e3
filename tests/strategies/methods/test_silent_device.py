"""Methods that wait for an answer of every client, and a device that never answers, on a clock that jumps."""

from types import SimpleNamespace

import pytest

from strategies import ACE, ACED, Malenia, Ringleader, clock
from strategies.clock import WallClock


@pytest.fixture(autouse=True)
def passes_at_once(monkeypatch):
    """Let the machine's clock jump to the end of every sleep."""
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += max(seconds, 1e-3)

    monkeypatch.setattr(clock, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))


@pytest.mark.parametrize("kind", [ACE, ACED, Ringleader, Malenia])
def test_a_silent_device_is_counted_out_as_in_rounds(kind, federation, model, train_config, caplog):
    grid, times = federation([0.0] * 5, [1] * 5), []
    for index in range(5):
        grid.node(index).delay = 1.0 if index < 4 else float("inf")
    strategy = kind(
        clock=WallClock(),
        fraction_evaluate=0.0,
        eval_every=1,
        observer=lambda progress: times.append(progress.time),
    )
    strategy.start(grid, model(1.0), num_rounds=20, timeout=3600.0, train_config=train_config(1, 0.1))
    assert 59.0 < times[1] < 65.0  # the first answer is awaited a minute, as a round awaits it
    assert times[20] < times[1] + 40.0
    assert "isn't waited for any more after 6" in caplog.text
    assert "s: a round waits 10 times as long as half of the clients took" in caplog.text


def test_without_safeguards_it_is_waited_for(federation, model, train_config):
    grid, times = federation([0.0] * 5, [1] * 5), []
    for index in range(5):
        grid.node(index).delay = 1.0 if index < 4 else float("inf")
    strategy = Ringleader(
        clock=WallClock(),
        safeguards="off",
        fraction_evaluate=0.0,
        time_budget=300.0,
        observer=lambda progress: times.append(progress.time),
    )
    strategy.start(grid, model(1.0), num_rounds=20, timeout=3600.0, train_config=train_config(1, 0.1))
    assert len(times) == 1  # the initial model's
