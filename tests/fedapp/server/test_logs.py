"""The log as JSON: one object a line, with who and when, whatever is said."""

import io
import json
import logging
import re
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Message

from fedapp.api.command import parser_of, run
from fedapp.config import RunConfig
from fedapp.logs import LOGGERS, copied_to, logging_as, plain_where_piped
from fedapp.report.files import read_warnings
from fedapp.server import build_strategy
from strategies import FedAvg
from strategies.clients.roster import Client
from tests.fedapp.server.conftest import Devices

LOG = logging.getLogger("flwr.fedapp")


def objects(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in capsys.readouterr().err.splitlines()]


def test_a_line_says_when_where_what_and_of_whom(capsys):
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
        "level": "WARNING",
        "logger": "flwr.strategies",
        "message": "client 1 (oslo) is late",
        "run": "run-1",
        "aggregation": 7,
        "client": 1,
        "device": "oslo",
        "node": "9223372036854775813",
    }
    assert (third["aggregation"], third["level"]) == (9, "ERROR")


def test_nothing_that_is_said_breaks_a_line_or_steers_a_terminal(capsys):
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
def test_otherwise_all_is_as_always(given, capsys):
    with logging_as(given) as lines:
        assert lines is None
        LOG.warning("plain")
    assert "{" not in capsys.readouterr().err


def test_it_ends_with_its_block_and_one_is_enough(capsys):
    before = [(list(log.handlers), log.propagate) for log in map(logging.getLogger, LOGGERS)]
    with logging_as("json") as outer, logging_as("json") as inner:
        assert outer is inner
        LOG.info("once")
    assert len(objects(capsys)) == 1
    assert [(list(log.handlers), log.propagate) for log in map(logging.getLogger, LOGGERS)] == before


def test_a_whole_run_in_json(go, capsys):
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


# The copy in the run's folder --------------------------------------------------------------------------------


def copy(folder: Path) -> list[str]:
    return [line.split(maxsplit=2)[2] for line in (folder / "log.txt").read_text("utf-8").splitlines()]


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_a_run_leaves_its_log_behind(log_format, tmp_path):
    given = f"num-server-rounds=2 checkpoint-every=1 model=logistic results-dir={tmp_path} run-name=run"
    arguments = ["--engine", "sequential", "--federation-config", "num-supernodes=3", "-c"]
    config = f"{given} lr=0.2 log-format={log_format} buffer-size=3"
    assert run(parser_of(None, "").parse_args([*arguments, config])) == 0
    lines = copy(tmp_path / "run")
    assert lines[0].startswith("WARNING not read by fedavg: buffer-size = 3")
    assert "INFO    FedAvg: default settings" in lines
    assert lines[-1].startswith(("INFO    round 2 of 2: loss", "INFO    finished: "))
    again = f"resume={tmp_path / 'run'} num-server-rounds=3 log-format={log_format}"
    assert run(parser_of(None, "").parse_args([*arguments, again])) == 0
    more = copy(tmp_path / "run")
    assert more[: len(lines)] == lines
    assert any(re.fullmatch("INFO    resumed from aggregation [12]", line) for line in more)
    assert not [
        handler
        for name in ("flwr", *LOGGERS)
        for handler in logging.getLogger(name).handlers
        if isinstance(handler, logging.FileHandler)
    ]


def test_the_log_begins_with_what_is_odd_about_the_data(tmp_path):
    """Data are looked at before the run has a folder."""
    rows = np.random.default_rng(0).normal(size=(30, 4)).astype(np.float32)
    labels = np.arange(30) % 2
    np.savez(tmp_path / "own.npz", x_train=rows, y_train=labels, x_test=rows[:1], y_test=labels[:1])
    config = f"num-server-rounds=1 dataset=npz data-path={tmp_path / 'own.npz'} results-dir={tmp_path} run-name=run"
    arguments = ["--engine", "sequential", "--federation-config", "num-supernodes=3", "-c", config]
    assert run(parser_of(None, "").parse_args(arguments)) == 0
    lines = copy(tmp_path / "run")
    said = "WARNING data: there is a single test row: accuracy is 0 or 1"
    assert lines.count(said) == 1
    assert lines.index(said) < lines.index("INFO    FedAvg: default settings")
    assert said.partition("WARNING ")[2] in read_warnings(tmp_path / "run")


def test_the_log_ends_with_why_the_run_did(tmp_path):
    config = f"num-server-rounds=1 lr=1e30 model=logistic results-dir={tmp_path} run-name=run"
    assert run(parser_of(None, "").parse_args(["--engine", "vectorized", "-c", config])) == 1
    assert copy(tmp_path / "run")[-1].startswith("ERROR   no client's work was accepted in 1 aggregations")


def test_a_log_that_cannot_be_written_ends_nothing(tmp_path, capsys):
    (tmp_path / "log.txt").symlink_to("/dev/full")
    with copied_to(tmp_path):
        for number in range(3):
            LOG.info("line %d", number)
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    assert "Logging error" not in captured.err


@pytest.mark.parametrize(
    ("terminal", "no_color", "colored"), [(True, "", True), (True, "1", False), (False, "", False)]
)
def test_no_colours_where_nobody_sees_them(terminal, no_color, colored, monkeypatch):
    (handler,) = (each for each in logging.getLogger("flwr").handlers if hasattr(each, "colored"))
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: terminal)
    monkeypatch.setattr(handler, "stream", stream)
    monkeypatch.setattr(handler, "colored", True)
    monkeypatch.setenv("NO_COLOR", no_color)
    plain_where_piped()
    LOG.info("said")
    assert ("\x1b[" in stream.getvalue()) == colored
    assert stream.getvalue().endswith("said\n")


def test_the_strategys_line_says_what_is_not_usual(caplog):
    values = {"strategy": "fedbuff", "buffer-size": 3, "server-lr": 0.5}
    build_strategy(RunConfig.load(values)).summary()
    FedAvg(fraction_train=0.5).summary()
    said = [record.getMessage() for record in caplog.records if record.name == "flwr.strategies"]
    assert sorted(said[0].removeprefix("FedBuff: ").split(", ")) == ["buffer_size = 3", "server_lr = 0.5"]
    assert sorted(said[1].removeprefix("FedAvg: ").split(", ")) == [
        "fraction_train = 0.5",
        "participation = 'flower'",
    ]
