"""How far a run is, out of its log; and node numbers, out of what was registered."""

import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from fedapp.cli import app
from fedapp.deploy.files import read_deployment
from fedapp.deploy.nodes import NodeRecord, NodeRecords, registered_nodes
from fedapp.deploy.plan import DeployError
from fedapp.deploy.runs import DeployedRun, RunProgress, message_of
from fedapp.deploy.status import Status

LOG = """\
INFO :      Starting logstream for run_id `1`
INFO :      Recording this run in /opt/my results/run 1
INFO :      progress: aggregation 0 of 100, 0 of 5 devices at work
WARNING :   round 3: left out client 1 (oslo, node 123): no reply before the deadline
INFO :      progress: aggregation 12 of 100, 3 of 5 devices at work, 0:04:10 left
INFO :      round 10 of 100: loss 0.5  accuracy 0.9
WARNING :   round 12: left out client 2 (bern, node 1234): it lies
"""


def run_of(log: str) -> DeployedRun:
    return DeployedRun("1", "running", "", "2026-01-01 00:00:00Z", 60.0, log.splitlines())


@pytest.mark.parametrize(
    ("log", "progress"),
    [
        (LOG, RunProgress(12, 100, 3, 5, "0:04:10")),
        (LOG + "INFO :      round 20 of 100: loss 0.5", RunProgress(20, 100, 3, 5, "0:04:10")),
        ("progress: aggregation 1 of 2, 0 of 1 devices at work", RunProgress(1, 2, 0, 1)),
        (
            "progress: aggregation 1 of 2, 0 of 1 devices at work, 1 day, 2:03:04 left",
            RunProgress(1, 2, 0, 1, "1 day, 2:03:04"),
        ),
        ("round 5 of 40: loss 0.3", RunProgress(5, 40)),
        ("round 5: left out client 1 (node 3)", RunProgress()),
        ("a device says: progress: aggregation many of all", RunProgress()),
        ("", RunProgress()),
    ],
)
def test_progress_is_the_last_that_was_said(log, progress):
    assert RunProgress.read(log.splitlines()) == progress


def test_a_line_of_json_says_what_a_line_of_text_does():
    record = {
        "time": "2026-01-01T00:00:00Z",
        "message": "progress: aggregation 1 of 2, 0 of 1 devices at work",
    }
    assert message_of(json.dumps(record)) == record["message"]
    for line in ("INFO :      a line", "{torn", '{"level": "INFO"}', "[1]"):
        assert message_of(line) == line


def test_a_log_says_where_the_run_is_and_what_was_last_said_of_a_node():
    run = run_of(LOG)
    assert run.folder == "/opt/my results/run 1"
    assert run.remark("123") == "round 3: left out client 1 (oslo, node 123): no reply before the deadline"
    assert run.remark("1234") == "round 12: left out client 2 (bern, node 1234): it lies"
    assert run.remark("12") == ""
    assert run_of("").folder == ""


@pytest.mark.parametrize(
    ("state", "lines"),
    [
        (
            "starting",
            [
                "run 1: starting since 2026-01-01 00:00:00Z",
                "  if that lasts, the server's `journalctl -u fedapp-superexec` says what it waits for",
            ],
        ),
        ("running", ["run 1: running for 0:01:00"]),
        ("finished:failed", ["run 1: finished:failed"]),
    ],
)
def test_a_run_is_told_from_one_that_waits_for_its_process(state, lines):
    told = list(Status("a:1", "", [], [replace(run_of(""), status=state)], [], []).lines())
    assert told[2:] == lines


def test_nodes_are_on_record_by_key_and_a_new_key_is_another_node(tmp_path):
    records = NodeRecords.read(tmp_path)
    assert records.of_key("a") is None
    records.add(NodeRecord("oslo", "18446744073709551615", "a", "then"))
    records.add(NodeRecord("oslo", "7", "b", "now"))
    records.add(NodeRecord("oslo", "18446744073709551615", "a", "then", "later"))
    again = NodeRecords.read(tmp_path)
    assert again.of_key("a") == NodeRecord("oslo", "18446744073709551615", "a", "then", "later")
    assert again.of_key("b") == NodeRecord("oslo", "7", "b", "now")
    assert len(json.loads((tmp_path / "nodes.json").read_text())["nodes"]) == 2


def test_tags_are_a_devices_whatever_key_it_has(tmp_path):
    deployment = tmp_path / "d"
    result = CliRunner().invoke(
        app, ["deploy", "init", str(deployment), "--host", "x", "--device", "oslo=/a", "--device", "bern=/b"]
    )
    assert result.exit_code == 0

    def tag(*words: str) -> str:
        return CliRunner().invoke(app, ["deploy", "tag", str(deployment), *words]).output

    assert tag("oslo", "hospital", "gpu") == "oslo: hospital, gpu\n"  # before its key is registered
    records = NodeRecords.read(deployment)
    records.add(NodeRecord("oslo", "7", "a", "then", "later"))
    records.add(NodeRecord("oslo", "8", "b", "now"))
    records.add(NodeRecord("bern", "9", "c", "now"))
    read = read_deployment(deployment)
    assert registered_nodes(deployment, read) == "oslo:8+gpu+hospital, bern:9"
    assert tag("bern", "Hospital") == (
        "error: tag 'Hospital': must be a-z, 0-9, _, . and -, a letter or a digit first\n"
    )
    assert tag("rome", "gpu") == "error: device 'rome': isn't one of oslo, bern\n"
    assert tag("oslo") == "oslo: no tags\n"
    assert registered_nodes(deployment, read) == "oslo:8, bern:9"
    # A run on a tag that nobody has isn't begun; the SuperLink isn't even asked.
    command = ["deploy", "run", str(deployment), "-c", 'participation="tag:gpu"']
    assert CliRunner().invoke(app, command).output == (
        "error: participation = 'tag:gpu': no registered device has the tag 'gpu'; allowed are none, as no device "
        "has a tag\n"
    )


@pytest.mark.parametrize("text", ["", "[]", '{"nodes": [], "tags": []}', '{"nodes": [{"device": "oslo"}]}'])
def test_records_that_cannot_be_read_are_one_line(tmp_path, text):
    (tmp_path / "nodes.json").write_text(text)
    with pytest.raises(DeployError, match=r"nodes.json: can't be read \("):
        NodeRecords.read(tmp_path)
