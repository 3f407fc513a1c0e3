"""Devices that make their keys themselves: ``deploy request`` there, and ``deploy sign`` in the deployment."""

import json
import os
import shutil
import stat
from pathlib import Path

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_ssh_private_key,
)

from fedapp.deploy import keys
from fedapp.deploy.files import read_deployment
from fedapp.deploy.flower import ask
from fedapp.deploy.key_request import KeyRequest
from fedapp.deploy.local import LocalDeployment
from fedapp.deploy.nodes import NodeRecord, NodeRecords, fingerprint
from tests.deploy.command import contents, deploy
from tests.waiting import wait_until

ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551  # of P-256
MADE = {
    ".gitignore",
    "device.key",
    "device.pub",
    "local.crt",
    "local.key",
    "superexec.secret",
    "superexec/superexec.secret",
    "request.json",
}


def requested(folder: Path, device: str = "lima=/data/lima.npz", *options: object) -> Path:
    """Make a device's keys in a folder; return the request."""
    result = deploy("request", device, "--out", folder, *options)
    assert result.exit_code == 0, result.output
    return folder / "request.json"


def key_of(folder: Path) -> ec.EllipticCurvePrivateKey:
    key = load_ssh_private_key((folder / "device.key").read_bytes(), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    return key


def as_ssh(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())


def changed(file: Path, **fields: object) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


def without_audit(out: Path) -> dict[str, bytes]:
    return {name: content for name, content in contents(out).items() if name != "audit.jsonl"}


def assert_refused(out: Path, file: Path, text: str, *command: object) -> None:
    """Check that a request is refused with one line, which is in the audit, and that nothing else is written."""
    before = without_audit(out)
    result = deploy(*(command or ("sign", file, out)))
    assert result.exit_code == 1
    (line,) = result.output.splitlines()
    assert line.startswith("error: ")
    assert text in line
    assert without_audit(out) == before
    assert json.loads((out / "audit.jsonl").read_text().splitlines()[-1])["outcome"].startswith("failed: ")


# On the device -------------------------------------------------------------------------------------------------


def test_a_device_makes_its_keys_for_itself_alone(tmp_path):
    before = os.umask(0)
    try:
        file = requested(tmp_path / "lima")
    finally:
        os.umask(before)
    assert set(contents(tmp_path / "lima")) == MADE
    private = {"device.key", "local.key", "superexec.secret", "superexec/superexec.secret"}
    for name in MADE:
        mode = stat.S_IMODE((tmp_path / "lima" / name).stat().st_mode)
        assert mode == (0o600 if name in private else 0o644), name
    request = json.loads(file.read_text())
    assert set(request) == {"device", "relay", "key", "signature"}
    assert request["key"] == (tmp_path / "lima" / "device.pub").read_text().strip()
    numbers = key_of(tmp_path / "lima").private_numbers()
    assert str(numbers.private_value) not in file.read_text()
    assert "PRIVATE" not in file.read_text()


def test_the_folder_has_the_devices_name_and_no_key_is_replaced(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert deploy("request", "lima=/data/lima.npz").exit_code == 0
    before = contents(tmp_path)
    again = deploy("request", "lima=/data/other.npz")
    assert (
        again.output
        == "error: lima/device.key: is there already, and no key is replaced; choose another --out\n"
    )
    assert contents(tmp_path) == before


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("lima",), "--device 'lima': must be NAME=DATA-PATH"),
        (("lima=a.npz",), "--device 'lima=a.npz': the data-path must be absolute"),
        (("../lima=/a.npz",), "--device '../lima': a name is 1 to 63 of a-z"),
        (("superlink", "--relay"), "--device 'superlink': a name is 1 to 63 of a-z"),
        (("north=s.sock", "--relay"), "--relay 'north=s.sock': must be NAME or NAME=SOCKET"),
    ],
)
def test_a_device_that_no_deployment_can_have_gets_no_key(arguments, text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = deploy("request", *arguments)
    assert result.exit_code == 1
    assert result.output.startswith(f"error: {text}")
    assert not any(tmp_path.iterdir())


def test_a_device_makes_no_key_in_a_deployments_folder(made):
    before = contents(made)
    result = deploy("request", "lima=/a.npz", "--out", made / "lima")
    assert result.output.startswith(f"error: {made / 'lima'}: is in a deployment's folder")
    assert contents(made) == before


# In the deployment ---------------------------------------------------------------------------------------------


def test_a_signed_device_is_as_an_added_one_but_for_its_keys(made, tmp_path):
    file = requested(tmp_path / "lima")
    added = tmp_path / "added"
    shutil.copytree(made, added)
    assert deploy("add", added, "lima=/data/lima.npz").exit_code == 0
    signed = deploy("sign", file, made)
    assert signed.exit_code == 0, signed.output
    key = fingerprint(tmp_path / "lima" / "device.pub")
    assert signed.output.startswith(f"{key}: the key's fingerprint")
    assert f"'fedapp deploy register {made}'" in signed.output
    its, other = without_audit(made), without_audit(added)
    own = {f"lima/{name}" for name in MADE - {"device.pub", "request.json", ".gitignore"}}
    assert other.keys() - its.keys() == own
    assert its.keys() - other.keys() == {"lima/request.json"}
    assert {name for name in its if its[name] != other.get(name)} == {"lima/request.json", "lima/device.pub"}
    assert its["lima/device.pub"] == (tmp_path / "lima" / "device.pub").read_bytes()
    entry = json.loads((made / "audit.jsonl").read_text().splitlines()[-1])
    assert (entry["command"], entry["device"], entry["outcome"]) == ("sign", "lima", f"key {key}")


def test_no_secret_of_the_device_is_in_the_deployment(made, tmp_path):
    file = requested(tmp_path / "lima")
    assert deploy("sign", file, made).exit_code == 0
    secrets = [
        content for name, content in contents(tmp_path / "lima").items() if name.endswith((".key", ".secret"))
    ]
    assert len(secrets) == 4
    for name, content in contents(made).items():
        assert not any(secret in content for secret in secrets), name
        assert b"PRIVATE KEY" not in content or not name.startswith("lima/"), name
    # With the device's own folder it is whole: nothing of the keys is overwritten.
    home = tmp_path / "home"
    for folder in (tmp_path / "lima", made / "lima"):
        shutil.copytree(folder, home, dirs_exist_ok=True)
    assert {name: (home / name).read_bytes() for name in MADE} == contents(tmp_path / "lima")


def test_a_relay_asks_too(tmp_path):
    out = tmp_path / "root"
    home = ("--home", "/srv/fedapp")
    assert deploy("init", out, "--host", "fl.example.org", "--relay", "north", *home).exit_code == 0
    assert deploy("sign", requested(tmp_path / "south", "south", "--relay"), out).exit_code == 0
    assert read_deployment(out).device("south").socket == "/srv/fedapp/superlink/superexec/relay.sock"
    assert_refused(out, requested(tmp_path / "lima"), "--relay and --device: a deployment has relays alone")


@pytest.mark.parametrize(
    "fields",
    [
        {"device": "rome=/data/lima.npz"},
        {"device": "lima=/data/other.npz"},
        {"device": "lima=/s.sock", "relay": True},
    ],
)
def test_a_changed_request_is_refused(fields, made, tmp_path):
    file = requested(tmp_path / "lima")
    changed(file, **fields)
    assert_refused(
        made, file, f"{file}: is no request of a device: the signature isn't of this content by this key"
    )


def test_a_request_for_the_key_of_another_is_refused(made, tmp_path):
    file, other = requested(tmp_path / "lima"), requested(tmp_path / "rome", "rome=/data/rome.npz")
    for fields in (
        {"key": json.loads(other.read_text())["key"]},
        {"signature": json.loads(other.read_text())["signature"]},
        {"signature": ""},
        {"signature": "MEUCIB335G8"},
    ):
        text = file.read_text()
        changed(file, **fields)
        assert_refused(made, file, f"{file}: is no request of a device: ")
        file.write_text(text)
    assert deploy("sign", file, made).exit_code == 0


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("", "Expecting value"),
        ("[" * 10_000, "maximum recursion depth"),
        ("x" * 20_000, "it has more than 16384 bytes"),
        ('{"device": "lima=/a"}', "it must have device, relay, key, signature, and nothing else"),
        (
            '{"device": "lima=/a", "relay": 0, "key": "", "signature": ""}',
            "it must have device, relay, key, signature, and nothing else",
        ),
        ('{"device": "lima=/a", "relay": false, "key": "x", "signature": ""}', "the key can't be read"),
    ],
)
def test_a_file_that_is_no_request_is_one_line(content, text, made, tmp_path):
    (tmp_path / "request.json").write_text(content)
    assert_refused(made, tmp_path / "request.json", text)


def test_a_key_that_isnt_a_devices_is_refused(made, tmp_path):
    """Another curve, and a key with a comment, by which one key would have two texts."""
    file = tmp_path / "request.json"
    other = ec.generate_private_key(ec.SECP384R1())
    folder = tmp_path / "lima"
    requested(folder)
    for key, comment, text in (
        (other, "", "the key isn't of the curve P-256"),
        (key_of(folder), " someone", "the key isn't written as OpenSSH writes it"),
    ):
        public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode() + comment
        file.write_text(KeyRequest("lima=/a", False, public).signed(as_ssh(key)).text)
        assert_refused(made, file, text)


def test_a_name_that_is_taken_is_refused(made, tmp_path):
    assert_refused(
        made, requested(tmp_path / "oslo", "oslo=/a"), f"device 'oslo': {made} has a device of this name"
    )
    assert_refused(made, tmp_path / "none.json", "none.json: can't be read (No such file or directory)")


def test_a_name_that_no_device_can_have_is_refused_where_it_was_signed(made, tmp_path):
    requested(tmp_path / "lima")
    for device, text in (
        ("../lima=/a", "--device '../lima': a name is"),
        ("lima=/a\nb", r"--device 'lima=/a\nb': the data-path must be printable"),
    ):
        public = (tmp_path / "lima" / "device.pub").read_text().strip()
        request = KeyRequest(device, False, public).signed((tmp_path / "lima" / "device.key").read_bytes())
        (tmp_path / "request.json").write_text(request.text)
        assert_refused(made, tmp_path / "request.json", text)


@pytest.mark.parametrize("negated", [False, True])
@pytest.mark.parametrize("where", ["device", "record", "removed"])
def test_a_key_that_a_device_has_or_had_is_refused(where, negated, made, tmp_path):
    if where == "record":  # of a key that was replaced, the fingerprint alone is here
        requested(tmp_path / "former")
        key = key_of(tmp_path / "former")
        record = NodeRecord("bern", "7", fingerprint(tmp_path / "former" / "device.pub"), "", "then")
        NodeRecords.read(made).add(record)
    else:
        key = key_of(made / "bern")
        if where == "removed":
            (made / "removed").mkdir()
            shutil.copytree(made / "bern", made / "removed" / "bern-2026")
            keys.write_device(made / "bern")
    if negated:
        key = ec.derive_private_key(ORDER - key.private_numbers().private_value, ec.SECP256R1())
    public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()
    (tmp_path / "request.json").write_text(KeyRequest("lima=/a", False, public).signed(as_ssh(key)).text)
    whose = "bern-2026" if where == "removed" else "bern"
    what = "the negation of the key" if negated else "the key"
    assert_refused(
        made, tmp_path / "request.json", f"the request's key is {what} of '{whose}', now or formerly"
    )


def test_a_device_whose_signing_was_interrupted_is_signed_again(made, tmp_path, monkeypatch):
    file = requested(tmp_path / "lima")

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    for command in (("add", made, "lima=/data/lima.npz"), ("sign", file, made)):
        with monkeypatch.context() as patch:
            patch.setattr("fedapp.deploy.files.write_startup", killed)
            deploy(*command)
    assert deploy("sign", file, made).exit_code == 0
    assert not any(b"PRIVATE KEY" in content for content in contents(made / "lima").values())


def test_other_commands_make_no_key_of_such_a_device(made, tmp_path):
    assert deploy("sign", requested(tmp_path / "lima"), made).exit_code == 0
    before = contents(made / "lima")
    for command in (
        ("refresh", made),
        ("renew", made, "--authority"),
        ("backup", made, tmp_path / "b.tar.gz"),
    ):
        result = deploy(*command)
        assert result.exit_code == 0, result.output
    after = contents(made / "lima")
    assert {name for name in after if after[name] != before.get(name)} == {"ca.crt"}
    assert deploy("restore", tmp_path / "b.tar.gz", tmp_path / "restored").exit_code == 0
    assert contents(tmp_path / "restored" / "lima") == after
    rekey = ("rekey", made, "lima")
    assert_refused(made, Path(), "device 'lima': made its key itself; a new key is made there", *rekey)
    same = tmp_path / "lima" / "request.json"
    assert_refused(made, same, "the request's key is the key of 'lima'", *rekey, "--request", same)
    other = requested(tmp_path / "other", "lima=/data/other.npz")
    assert_refused(made, other, "isn't of device 'lima' with {'data-path'", *rekey, "--request", other)


# On a real SuperLink -------------------------------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.timeout(600)
def test_a_signed_device_trains_gets_another_key_and_is_removed(repository, tmp_path):
    data = tmp_path / "data.npz"
    rows = np.random.default_rng(0).normal(size=(40, 5)).astype(np.float32)
    labels = (rows[:, 0] > 0).astype(np.int64)
    np.savez(data, x_train=rows, y_train=labels, x_test=rows[:10], y_test=labels[:10])
    out = tmp_path / "d"
    with LocalDeployment(out, [{"data-path": str(data)}]) as local:
        local.start_superlink()
        local.start_superexec()
        local.wait_for_superlink()
        assert deploy("sign", requested(tmp_path / "lima", f"lima={data}"), out).exit_code == 0
        registered = deploy("register", out)
        assert ": registered, as node " in registered.output.splitlines()[1]
        local.services = {service.name: service for service in read_deployment(out).services}

        def start() -> None:  # on loopback the device's folder is the deployment's
            shutil.copytree(tmp_path / "lima", out / "lima", dirs_exist_ok=True)
            local.start_supernode("lima")
            wait_until(lambda: state(out) == "online", local.log("lima").read_text, 120)

        start()
        config = {
            "dataset": "files",
            "data-path": str(data),
            "clock": "wall",
            "min-clients": 1,
            "num-server-rounds": 1,
            "model": "logistic",
            "results-dir": str(tmp_path / "results"),
            "run-name": "run",
            "figures": False,
        }
        assert local.run(repository, config), local.log("superexec").read_text()
        summary = json.loads((tmp_path / "results" / "run" / "summary.json").read_text())
        assert summary["status"] == "finished"

        # A device of a trial gets a key of its owner's, and nothing here has its former one.
        own = requested(tmp_path / "device-0", f"device-0={data}")
        assert deploy("rekey", out, "device-0", "--request", own).exit_code == 0
        assert not any(b"PRIVATE KEY" in content for content in contents(out / "device-0").values())

        # After a theft its owner makes another key.
        local.kill("lima")
        former = NodeRecords.read(out).of_key(fingerprint(out / "lima" / "device.pub"))
        new = requested(tmp_path / "lima-2", f"lima={data}")
        rekeyed = deploy("rekey", out, "lima", "--request", new)
        assert rekeyed.exit_code == 0, rekeyed.output
        assert not any(b"PRIVATE KEY" in content for content in contents(out / "lima").values())
        shutil.rmtree(tmp_path / "lima")
        (tmp_path / "lima-2").rename(tmp_path / "lima")
        start()
        removed = deploy("remove", out, "lima")
        assert removed.exit_code == 0, removed.output
        assert {node["status"] for node in nodes(out) if node["node-id"] == former.node_id} == {
            "unregistered"
        }
        assert [node["status"] for node in nodes(out)].count("registered") == 1  # device-0
    assert deploy("audit", out, "--verify").exit_code == 0


def state(out: Path) -> str:
    devices = json.loads(deploy("status", out, "--json").output)["devices"]
    return str(next(device["state"] for device in devices if device["name"] == "lima"))


def nodes(out: Path) -> list[dict[str, str]]:
    return list(ask(out, "supernode", "list")["nodes"])
