"""The log as JSON: one object a line, with who and when, whatever is said."""

import json
import logging
from datetime import datetime
from typing import Any

import pytest
from flwr.app import Message

from fedapp.server.logs import LOGGERS, logging_as
from strategies.roster import Client
from tests.fedapp.watch.conftest import Devices

LOG = logging.getLogger("flwr.fedapp")


def objects(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in capsys.readouterr().err.splitlines()]


def test_a_line_says_when_where_what_and_of_whom(capsys: pytest.CaptureFixture[str]) -> None:
    client = Client(2**63 + 5, 1, 40, None, "oslo")  # type: ignore[arg-type]
    with logging_as("json") as lines:
        assert lines is not None
        LOG.info("before the run has a name")
        lines.run, lines.aggregation = "run-1", lambda: 7
        logging.getLogger("flwr.strategies").warning("%s is late", client, extra=client.fields)
        LOG.error("done", extra={"aggregation": 9})
    first, second, third = objects(capsys)
    assert set(first) == {"time", "level", "logger", "message"}
    assert datetime.fromisoformat(first["time"]).utcoffset() is not None
    assert first["time"].endswith("+00:00")
    del second["time"]
    assert second == {
        "level": "WARNING", "logger": "flwr.strategies", "message": "client 1 (oslo) is late", "run": "run-1",
        "aggregation": 7, "client": 1, "device": "oslo", "node": "9223372036854775813",
    }  # fmt: skip
    assert (third["aggregation"], third["level"]) == (9, "ERROR")


def test_nothing_that_is_said_breaks_a_line_or_steers_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with logging_as("json"):
        LOG.warning("a\x1b[2J\nb\u2028c %s", "x" * 10**6)
        try:
            raise ValueError("first\x07\nsecond")
        except ValueError:
            LOG.exception("failed")
    text = capsys.readouterr().err
    assert text.count("\n") == 2
    assert text.replace("\n", "").isprintable()
    first, second = map(json.loads, text.splitlines())
    assert first["message"].startswith("a\ufffd[2J\ufffdb\ufffdc xxx")
    assert len(first["message"]) == 4000
    assert second["traceback"][-2:] == ["ValueError: first\ufffd", "second"]


@pytest.mark.parametrize("given", ["text", None, "JSON", 1])
def test_otherwise_all_is_as_always(given: object, capsys: pytest.CaptureFixture[str]) -> None:
    with logging_as(given) as lines:
        assert lines is None
        LOG.warning("plain")
    assert "{" not in capsys.readouterr().err


def test_it_ends_with_its_block_and_one_is_enough(capsys: pytest.CaptureFixture[str]) -> None:
    before = [(list(log.handlers), log.propagate) for log in map(logging.getLogger, LOGGERS)]
    with logging_as("json") as outer, logging_as("json") as inner:
        assert outer is inner
        LOG.info("once")
    assert len(objects(capsys)) == 1
    assert [(list(log.handlers), log.propagate) for log in map(logging.getLogger, LOGGERS)] == before


def test_a_whole_run_in_json(go: Any, capsys: pytest.CaptureFixture[str]) -> None:
    class Deaf(Devices):
        def push_messages(self, messages: Any) -> Any:
            return super().push_messages([m for m in messages if not self.is_lost(m)])

        def is_lost(self, message: Message) -> bool:
            return message.metadata.message_type == "train" and message.metadata.dst_node_id == 2

    go(grid=Deaf(("oslo", "bern", "lima")), log_format="json", clock="wall", num_server_rounds=2)
    captured = capsys.readouterr()
    assert captured.out == ""  # no table between the lines
    found = [json.loads(line) for line in captured.err.splitlines()]
    assert {line["run"] for line in found} == {"run"}
    assert {line["logger"] for line in found} == set(LOGGERS)
    assert [line["aggregation"] for line in found] == sorted(line["aggregation"] for line in found)
    joined = [line["device"] for line in found if line["message"].endswith("takes part")]
    assert joined == ["oslo", "bern", "lima"]
    late = [line for line in found if "left out client 1 (bern, node 2)" in line["message"]]
    assert [line["aggregation"] for line in late] == [1, 2]
    assert late[0]["clients"] == [{"client": 1, "device": "bern", "node": "2"}]
    assert found[-1]["message"].startswith("finished: ")
