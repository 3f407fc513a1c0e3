"""A deployment of real processes as its operator sees it: status, stop, new certificates, and a database restored."""

import json
import re
import stat
from pathlib import Path
from typing import Any

import pytest

from fedapp.deploy.certificates import read, shown_by_server
from fedapp.deploy.flower import ask
from fedapp.deploy.local import LocalDeployment
from tests.deploy.command import deploy
from tests.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture
def two(tmp_path):
    """A SuperLink and two SuperNodes, online."""
    nodes = [{"partition-id": part, "num-partitions": 2} for part in range(2)]
    with LocalDeployment(tmp_path / "d", nodes) as deployment:
        deployment.start()
        wait_until(lambda: states(deployment.folder) == ["online", "online"])
        yield deployment


def status(out: Path, *options: object) -> dict[str, Any]:
    result = deploy("status", out, "--json", *options)
    assert result.exit_code == 0, result.output
    return dict(json.loads(result.output))


def states(out: Path) -> list[str]:
    return [device["state"] for device in status(out)["devices"]]


def begin_run(deployment: LocalDeployment, repository: Path, rounds: int) -> str:
    config = (
        f'num-server-rounds={rounds} local-epochs=50 min-clients=2 results-dir="{deployment.folder}/results" '
        'run-name="run"'
    )
    result = deploy("run", deployment.folder, "--app", repository, "-c", config)
    assert result.exit_code == 0, result.output
    return str(re.findall(r"run (\d+) started", result.output)[0])


def test_status_while_a_run_goes(two, repository):
    out = two.folder
    idle = status(out)
    assert [device["doing"] for device in idle["devices"]] == ["nothing", "nothing"]
    assert (idle["runs"], idle["warnings"], idle["error"]) == ([], [], "")

    run_id = begin_run(two, repository, rounds=30)
    seen: set[str] = set()

    def at_work_and_told() -> bool:
        now = status(out)
        seen.update(device["doing"].partition(",")[0] for device in now["devices"])
        return f"train of run {run_id}" in seen and now["runs"][0]["progress"]["aggregation"] >= 3

    wait_until(at_work_and_told)
    (run,) = status(out)["runs"]
    assert (run["run-id"], run["status"], run["progress"]["of"]) == (run_id, "running", 30)
    assert run["folder"] == str(out / "results" / "run")
    assert (Path(run["folder"]) / "config.toml").is_file()
    lines = deploy("status", out).output.splitlines()
    assert lines[1].split() == ["device", "state", "since", "doing", "node"]
    assert [line.split()[:2] for line in lines[2:4]] == [["device-0", "online"], ["device-1", "online"]]
    assert any(line.startswith(f"run {run_id}: running for 0:0") and "of 30" in line for line in lines)

    two.processes["device-1"].terminate()
    wait_until(lambda: states(out) == ["online", "offline"])
    assert deploy("stop", out).output == f"run {run_id} stopped\n"
    wait_until(lambda: status(out)["runs"][0]["status"] == "finished:stopped")
    assert deploy("stop", out).output == "error: stop: no run goes\n"
    entries = [json.loads(line) for line in (out / "audit.jsonl").read_text().splitlines()]
    assert [(e["command"], e["outcome"], e.get("run")) for e in entries] == [
        ("run", "started", run_id),
        ("stop", "stopped", run_id),
        ("end of run", "finished:stopped", run_id),
        ("stop", "failed: stop: no run goes", None),
    ]
    said = deploy("audit", out, "--verify").output.splitlines()
    assert said[0].startswith("4 lines are as they were written, 1 of them signed by the server's key")
    assert said[1:] == ["lines 4 to 4: held by hashes alone, there is no signature after them"]


def test_a_run_that_nobody_starts_says_where_to_look(two, repository):
    two.processes["superexec"].terminate()
    two.processes["superexec"].wait()
    run_id = begin_run(two, repository, rounds=1)
    lines = deploy("status", two.folder).output.splitlines()
    (at,) = (i for i, line in enumerate(lines) if line.startswith(f"run {run_id}: pending since 2"))
    assert lines[at + 1].endswith("the server's `journalctl -u fedapp-superexec` says what it waits for")
    two.start_superexec()
    wait_until(lambda: status(two.folder)["runs"][0]["status"] == "finished:completed")
    assert status(two.folder)["runs"][0]["details"] == ""


def test_devices_take_the_server_with_its_new_certificate(two, repository):
    out, own = two.folder, two.folder / "superlink" / "server.crt"
    keys = {path: path.read_bytes() for path in [*out.glob("*/device.*"), *out.rglob("ca.crt")]}
    before = read(own)
    assert shown_by_server(two.deployment) == before
    assert deploy("renew", out).exit_code == 0
    assert read(own) != before
    (warning,) = status(out)["warnings"]
    assert warning.startswith("the server shows another certificate, valid until ")

    two.kill("superlink")
    two.start_superlink()
    two.wait_for_superlink()
    assert shown_by_server(two.deployment) == read(own)
    assert status(out)["warnings"] == []

    run_id = begin_run(two, repository, rounds=1)  # with devices that have seen nothing of all this
    wait_until(lambda: status(out)["runs"][0]["status"].startswith("finished"))
    assert status(out)["runs"][0]["status"] == "finished:completed"
    assert {path: path.read_bytes() for path in keys} == keys
    # The audit's chain went on past the SuperLink that was killed, with a signature by the new key.
    (said,) = deploy("audit", out, "--verify").output.splitlines()
    assert said.startswith("3 lines are as they were written, 1 of them signed by the server's key")
    shown = deploy("audit", out).output.splitlines()
    assert shown[1].endswith(f" run {run_id}: started")
    assert shown[2].endswith(f" end of run {run_id}: finished:completed")
    text = (out / "audit.jsonl").read_text()
    (out / "audit.jsonl").write_text("".join(text.splitlines(keepends=True)[:2]))
    assert "audit.jsonl: line 3: is missing, " in deploy("audit", out, "--verify").output


def test_a_database_is_copied_in_use_and_restored(two, tmp_path):
    out, database = two.folder, two.folder / "superlink" / "superlink.db"
    nodes = {device["name"]: device["node-id"] for device in status(out)["devices"]}
    copy = tmp_path / "superlink.backup"
    result = deploy("backup-server", copy, "--database", database)
    assert result.output == f"{copy}: sound, 2 registered devices\n"
    assert stat.S_IMODE(copy.stat().st_mode) == 0o600
    assert [path.name for path in tmp_path.glob("superlink.*")] == ["superlink.backup"]
    again = deploy("backup-server", copy, "--database", database)
    assert again.output == f"error: {copy}: can't be made (File exists)\n"
    # What happens afterwards is lost; that a key was unregistered is, too, and status says so.
    assert deploy("rekey", out, "device-1").exit_code == 0

    two.kill("superlink")
    for name in ("device-0", "device-1"):
        two.kill(name)
    for path in database.parent.glob("superlink.db*"):
        path.unlink()
    database.write_bytes(copy.read_bytes())
    two.start_superlink()
    two.wait_for_superlink()
    listed = {node["node-id"] for node in ask(out, "supernode", "list")["nodes"]}
    assert listed == set(nodes.values())
    (warning,) = status(out)["warnings"]
    assert warning.startswith(f"node {nodes['device-1']} (")
    assert "was device-1, and was unregistered on " in warning
    registered = deploy("register", out).output.splitlines()
    assert registered[0] == f"device-0: already registered, as node {nodes['device-0']}"
    assert registered[1].startswith("device-1: registered, as node ")
    wait_until(lambda: "online" not in states(out))  # it counts as such for a minute
    two.start_supernode("device-0")
    wait_until(lambda: states(out)[0] == "online")
    assert status(out)["devices"][0]["node-id"] == nodes["device-0"]
