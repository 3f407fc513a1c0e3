"""Keys at a real SuperLink: registered, in use, unregistered for ever, and replaced; one line for each device."""

import json
import time
from pathlib import Path

import pytest

from fedapp.deploy.files import CONNECTION, read_deployment
from fedapp.deploy.flower import ask, flwr
from fedapp.deploy.local import LocalDeployment
from fedapp.deploy.nodes import NodeRecords, fingerprint
from tests.deploy.command import deploy

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture
def superlink(tmp_path):
    """A SuperLink that answers, and three devices that nobody has told it of."""
    nodes = [{"partition-id": part, "num-partitions": 3} for part in range(3)]
    with LocalDeployment(tmp_path / "d", nodes) as deployment:
        deployment.start_superlink()
        deployment.wait_for_superlink()
        yield deployment


def listed(out: Path) -> dict[str, str]:
    """What Flower's own command says: status by node id."""
    return {node["node-id"]: node["status"] for node in ask(out, "supernode", "list")["nodes"]}


def node_of(out: Path, name: str) -> str:
    node = NodeRecords.read(out).of_key(fingerprint(out / name / "device.pub"))
    assert node is not None
    assert node.device == name
    return node.node_id


def audit(out: Path) -> list[tuple[str, str, str]]:
    entries = [json.loads(line) for line in (out / "audit.jsonl").read_text().splitlines()]
    return [(entry["command"], entry.get("device", ""), entry["outcome"]) for entry in entries]


def wait_for_state(out: Path, name: str, state: str) -> None:
    deadline = time.monotonic() + 120
    while True:
        devices = json.loads(deploy("status", out, "--json").output)["devices"]
        (found,) = [device for device in devices if device["name"] == name]
        if found["state"] == state:
            return
        assert time.monotonic() < deadline, found
        time.sleep(0.5)


def test_a_key_is_registered_once_and_known_afterwards(superlink):
    out = superlink.folder
    first = deploy("register", out)
    assert first.exit_code == 0, first.output
    numbers = [node_of(out, f"device-{place}") for place in range(3)]
    assert first.output.splitlines() == [
        f"device-{place}: registered, as node {number}" for place, number in enumerate(numbers)
    ]
    assert listed(out) == dict.fromkeys(numbers, "registered")
    again = deploy("register", out)
    assert again.exit_code == 0
    assert again.output.splitlines() == [
        f"device-{place}: already registered, as node {number}" for place, number in enumerate(numbers)
    ]
    assert [outcome for _, _, outcome in audit(out)] == ["registered"] * 3 + ["already registered"] * 3
    # Of keys that aren't on record here it is found out what can be.
    (out / "nodes.json").unlink()
    assert deploy("register", out).output.splitlines() == [
        f"device-{n}: already registered" for n in range(3)
    ]
    flwr(out, "supernode", "unregister", numbers[1], CONNECTION)
    doubtful = deploy("register", out)
    assert doubtful.output.count("known to the SuperLink, but not on record here") == 3
    # Such a device is removed once it is said which node it is; it can't be that of another device.
    unsaid = deploy("remove", out, "device-0")
    assert unsaid.output.startswith("error: device 'device-0': its node id isn't on record; ")
    assert deploy("remove", out, "device-0", "--node-id", numbers[0]).exit_code == 0
    wrong = deploy("remove", out, "device-2", "--node-id", numbers[0])
    assert wrong.output == f"error: --node-id = {numbers[0]}: is on record as a node of device 'device-0'\n"
    assert list(listed(out).values()) == ["unregistered", "unregistered", "registered"]


def test_an_unregistered_key_is_refused_and_a_new_one_is_offered(superlink):
    out = superlink.folder
    deploy("register", out)
    before = node_of(out, "device-1")
    key = (out / "device-1" / "device.pub").read_bytes()
    flwr(out, "supernode", "unregister", before, CONNECTION)  # past our commands

    refused = deploy("register", out)
    assert refused.exit_code == 1
    lines = refused.output.splitlines()
    assert [line.split(": ")[1].split(",")[0] for line in lines] == [
        "already registered",
        "REFUSED",
        "already registered",
    ]
    assert "its key was unregistered and can never return" in lines[1]
    assert f"'fedapp deploy rekey {out} device-1' makes a new one" in lines[1]
    assert (out / "device-1" / "device.pub").read_bytes() == key
    superlink.start_supernode("device-1").wait(timeout=60)  # it is refused, indeed
    assert "Exit Code: 305" in superlink.log("device-1").read_text()

    renewed = deploy("register", out, "--new-keys")
    assert renewed.exit_code == 0, renewed.output
    after = node_of(out, "device-1")
    assert f"device-1: new key, registered as node {after}; copy " in renewed.output.splitlines()[1]
    assert listed(out)[after] == "registered"
    assert listed(out)[before] == "unregistered"
    assert audit(out)[-2:] == [
        ("register", "device-1", "new key"),
        ("register", "device-2", "already registered"),
    ]
    superlink.start_supernode("device-1")
    wait_for_state(out, "device-1", "online")


def test_a_device_gets_a_new_key_and_its_old_one_is_useless(superlink):
    out = superlink.folder
    deploy("register", out)
    before, others = node_of(out, "device-0"), [node_of(out, f"device-{place}") for place in (1, 2)]
    done = deploy("rekey", out, "device-0")
    assert done.exit_code == 0, done.output
    after = node_of(out, "device-0")
    assert listed(out) == {before: "unregistered", after: "registered", **dict.fromkeys(others, "registered")}
    # The database of yesterday would take the old key back; of that, status warns.
    records = NodeRecords.read(out)
    (old,) = [node for node in records.nodes if node.node_id == before]
    assert old.unregistered
    superlink.start_supernode("device-0")
    wait_for_state(out, "device-0", "online")


def test_a_removed_device_is_unregistered_and_the_others_keep_what_they_have(superlink):
    out = superlink.folder
    deploy("register", out)
    number = node_of(out, "device-1")
    folders = [out / "device-0", out / "device-2"]
    kept = {path: path.read_bytes() for own in folders for path in own.rglob("*") if path.is_file()}
    done = deploy("remove", out, "device-1")
    assert done.exit_code == 0, done.output
    assert done.output.startswith(
        f"device-1: unregistered (node {number}), its key can never return; what it"
    )
    assert listed(out)[number] == "unregistered"
    assert [device.name for device in read_deployment(out).devices] == ["device-0", "device-2"]
    assert not (out / "device-1").exists()
    (moved,) = (out / "removed").iterdir()
    assert (moved / "device.key").is_file()
    assert {path: path.read_bytes() for path in kept} == kept
    assert "device-1" not in (out / "compose.yaml").read_text()
    assert audit(out)[-2:] == [("remove", "device-1", what) for what in ("unregistered", "removed")]
    # One of the same name is another device.
    assert deploy("add", out, "device-1=/data/new").exit_code == 0
    assert ": registered, as node " in deploy("register", out).output.splitlines()[-1]
    # A key that the SuperLink was never told of can't be registered afterwards either.
    deploy("add", out, "device-9=/data/new")
    assert deploy("remove", out, "device-9").exit_code == 0
    assert sorted(listed(out).values()) == ["registered"] * 3 + ["unregistered"] * 2


def test_without_the_superlink_nothing_is_changed(superlink):
    out = superlink.folder
    deploy("register", out)
    superlink.stop()
    files = {path: path.read_bytes() for path in out.rglob("*") if path.suffix in (".toml", ".pub", ".json")}
    for command in (("remove", out, "device-1"), ("rekey", out, "device-1"), ("register", out)):
        result = deploy(*command)
        assert result.exit_code == 1
        (line,) = result.output.splitlines()
        assert line.startswith("error: flwr supernode register: ")
        assert "SuperLink is unavailable" in line
        assert audit(out)[-1][2].startswith("failed: flwr supernode register: ")
    assert {path: path.read_bytes() for path in files} == files
    status = deploy("status", out)
    assert status.exit_code == 1
    assert f"SuperLink {superlink.deployment.address}: NOT REACHED" in status.output
    assert "superlink/server.crt: valid until " in status.output
