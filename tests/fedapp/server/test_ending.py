"""How a ServerApp ends: told to stop it leaves a complete record, and what a user can mend is one line."""

import json
import logging
import signal
import threading
from typing import Any

import pytest
from flwr.app import Context, RecordDict

from fedapp.config import ConfigError
from fedapp.server import Observer
from fedapp.server.ending import ToldToStop, one_line_errors, told_to_stop
from fedapp.server.record import Entry
from fedapp.server_app import app
from strategies import RunError
from tests.fedapp.server.conftest import NAMES, Devices


@pytest.fixture
def flowers_handlers():
    """Handlers as Flower's, which end the process; here they note that they were called."""
    called: list[int] = []

    def handle(number: int, frame: Any) -> None:
        called.append(number)
        raise SystemExit(0)

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    yield called
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def flower_log():
    """Flower's logger, as it was afterwards."""
    logger = logging.getLogger("flwr")
    before = list(logger.filters)
    yield logger
    logger.filters[:] = before


class Sends(Observer):
    """Sends this process a signal after the second aggregation."""

    def __init__(self, number: int) -> None:
        self.number = number

    def record(self, entry: Entry) -> None:
        if entry.progress.aggregation == 2:
            signal.raise_signal(self.number)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, "stopped"), (signal.SIGTERM, "interrupted")])
def test_told_to_stop_a_run_is_recorded_before_flower_ends_the_process(
    number, status, go, flowers_handlers, tmp_path
):
    with pytest.raises(SystemExit), told_to_stop():
        go(observers=[Sends(number)], num_server_rounds=9)
    assert flowers_handlers == [number]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["status"], summary["aggregations"]) == (status, 2)
    assert "process" not in summary
    assert (tmp_path / "run" / "metrics.jsonl").read_text().count("\n") == 3
    assert (tmp_path / "run" / "model.safetensors").exists()


def test_a_second_signal_is_flowers(flowers_handlers):
    def stopped_twice() -> None:
        with told_to_stop():
            try:
                signal.raise_signal(signal.SIGINT)
            except ToldToStop:
                signal.raise_signal(signal.SIGTERM)  # while the record is finished

    with pytest.raises(SystemExit):
        stopped_twice()
    assert flowers_handlers == [signal.SIGTERM]


def test_afterwards_and_in_other_threads_signals_are_as_before(flowers_handlers):
    def handlers() -> list[Any]:
        return [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]

    before, inside = handlers(), []

    def work() -> None:
        with told_to_stop():
            inside.append(handlers())

    with told_to_stop():
        assert handlers() != before
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert handlers() == before == inside[0]


def as_flower_does(logger: logging.Logger, block: Any) -> None:
    """Do what flwr-serverapp does with an app's exception: log it with its traceback, and that there was one."""
    try:
        block()
    except Exception as error:
        logger.error("%s raised an exception", "ServerApp", exc_info=error)
        logger.error("Exit Code: 201\nAn unhandled exception occurred in the ServerApp.")
        raise


def test_what_a_user_can_mend_is_one_line_and_the_run_fails(flower_log, caplog):
    def fails() -> None:
        with one_line_errors():
            raise ConfigError("num-server-rounds = 0: must be a whole number >= 1")

    with caplog.at_level(logging.INFO, "flwr"), pytest.raises(RunError, match=r"^num-server-rounds = 0: "):
        as_flower_does(flower_log, fails)
    assert caplog.messages == ["num-server-rounds = 0: must be a whole number >= 1"]
    assert caplog.records[0].exc_info is None
    assert (caplog.records[0].name, caplog.records[0].levelname) == ("flwr.fedapp", "ERROR")


def test_two_mistakes_are_two_lines_and_a_bug_has_its_traceback(flower_log, caplog):
    with pytest.raises(RunError), one_line_errors():
        raise ConfigError("one\ntwo")
    assert caplog.messages == ["one", "two"]

    def bug() -> None:
        with one_line_errors():
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        as_flower_does(flower_log, bug)
    assert caplog.records[-1].exc_info is not None
    assert caplog.records[-1].exc_info[0] is ZeroDivisionError


def context(**values: Any) -> Context:
    return Context(1, 1, {}, RecordDict(), {name.replace("_", "-"): value for name, value in values.items()})


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"lr": -1.0}, "lr = -1.0: must be a number > 0"),
        ({"min_clients": 4, "round_timeout": 0.01}, "3 of 4 clients connected within 0.01 s"),
    ],
)
def test_the_serverapp_says_it_in_one_line(values, line, flower_log, caplog, tmp_path):
    with pytest.raises(RunError):
        as_flower_does(flower_log, lambda: app(Devices(NAMES), context(results_dir=str(tmp_path), **values)))
    (record,) = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert record.getMessage().startswith(line)
    assert list(tmp_path.iterdir()) == []


def test_the_serverapp_says_how_many_clients_it_waits_for(monkeypatch, flower_log, caplog, tmp_path):
    monkeypatch.setattr("fedapp.server.progress.EVERY", 0.0)
    caplog.set_level(logging.INFO, "flwr.fedapp")
    with pytest.raises(RunError):
        app(Devices(NAMES), context(min_clients=4, round_timeout=0.2, num_server_rounds=7))
    assert "progress: aggregation 0 of 7, 0 of 3 devices at work" in caplog.messages
