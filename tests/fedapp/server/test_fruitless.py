"""A run whose clients all fail from some round on until its end has failed, and keeps what it has."""

from collections.abc import Callable
from typing import Any

import pytest
from flwr.app import ArrayRecord, Context, Message

from fedapp import client_app
from fedapp.report import read_metrics
from fedapp.server.failure import RoundsWithoutReply
from fedapp.server.record import Entry
from strategies import FedAvg, Progress, RunError
from strategies.clock import WallClock
from strategies.flower import messages
from tests.fedapp.server.conftest import NAMES, Devices
from tests.runs import summary_of


class Break(Devices):
    """Devices that raise in every task that ``breaks``, by its round or aggregation, from 1."""

    def __init__(self, breaks: Callable[[int], bool]) -> None:
        super().__init__(NAMES)

        def work(message: Message, context: Context) -> Message:
            config = message.content.config_records.get("config", {})
            if message.metadata.message_type == messages.TRAIN and breaks(int(config[messages.SERVER_ROUND])):
                raise RuntimeError("the sensor is gone")
            return client_app.app(message, context)

        self.client_app: Any = work


@pytest.mark.parametrize(("rounds", "first"), [(6, 4), (40, 37)])
def test_no_valid_reply_in_the_last_rounds_is_a_failed_run(rounds, first, go, tmp_path):
    with pytest.raises(
        RunError, match=r"^no reply was valid in the last \d of \d+ rounds; the last reason was"
    ):
        go(grid=Break(lambda number: number >= first), num_server_rounds=rounds)
    told = summary_of(tmp_path / "run")
    assert (told["status"], told["aggregations"], told["complete"]) == ("failed", rounds, False)
    assert told["reason"].startswith(
        f"no reply was valid in the last {rounds - first + 1} of {rounds} rounds"
    )
    assert (tmp_path / "run" / "model.safetensors").is_file()
    assert len(read_metrics(tmp_path / "run")) == rounds + 1


@pytest.mark.parametrize(
    ("rounds", "breaks"),
    [
        (6, lambda number: number >= 5),  # two rounds
        (40, lambda number: number >= 38),  # three, but a tenth are four
        (8, lambda number: 3 <= number <= 7),  # the last one is good
    ],
)
def test_less_than_that_is_none(rounds, breaks, go):
    assert summary_of(go(grid=Break(breaks), num_server_rounds=rounds))["status"] == "finished"


def test_the_count_goes_on_in_a_resumed_run(go, tmp_path):
    bad = Break(lambda number: number >= 3)
    assert summary_of(go(grid=bad, num_server_rounds=4, checkpoint_every=1))["status"] == "finished"
    with pytest.raises(RunError, match="in the last 3 of 5 rounds"):
        go(grid=bad, resume=str(tmp_path / "run"), num_server_rounds=5)
    with pytest.raises(RunError, match="in the last 3 of 5 rounds"):  # it isn't finished: nothing has changed
        go(grid=bad, resume=str(tmp_path / "run"), num_server_rounds=5)


def test_without_rounds_it_is_when_everybody_is_dropped(go, tmp_path, monkeypatch, caplog):
    now = WallClock.now

    def later(clock: WallClock) -> float:
        """Return a time past the budget once all are dropped."""
        dropped = sum("is dropped after" in text for text in caplog.messages)
        return now(clock) + (1e6 if dropped == len(NAMES) else 0.0)

    monkeypatch.setattr(WallClock, "now", later)
    keys = {"strategy": "async-fedavg", "clock": "wall", "time_budget": 1e5, "num_server_rounds": 10_000}
    with pytest.raises(RunError, match="every client was dropped before the end, after"):
        go(grid=Break(lambda number: number > 1), **keys)
    assert summary_of(tmp_path / "run")["status"] == "failed"
    assert (tmp_path / "run" / "model.safetensors").is_file()


def test_late_work_that_never_counts_is_one():
    observer = RoundsWithoutReply(FedAvg())

    def rounds_after(**told: int) -> int:
        metrics = {name.replace("_", "-"): value for name, value in told.items()}
        observer.measure(Entry.of(Progress(1, 0.0, ArrayRecord(), metrics, evaluated=False)))
        return int(observer.state()["rounds-without-reply"])

    assert rounds_after(participants=0, failures=0, dropped_updates=3) == 1
    assert rounds_after(participants=0, failures=0, dropped_updates=0, late_updates=3) == 1
    assert rounds_after() == 1
    assert rounds_after(participants=0, failures=1) == 2
    assert rounds_after(participants=1, failures=2) == 0
