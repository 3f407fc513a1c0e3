"""The log of a device, as far as its site shares it: signed by the device, and told to who may start runs."""

import json
import logging
import re
import time
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_ssh_private_key,
)

from fedapp.client.device_log import LINES, tail, write_log
from fedapp.deploy import keys
from fedapp.deploy.local import LocalDeployment
from fedapp.deploy.registration import register
from fedapp.deploy.shared_logs import MOST_BYTES, TIME, Lines, SharedLogError, SharedLogs, signed
from tests.deploy.command import deploy
from tests.waiting import wait_until

BODY = json.dumps({"supernode": ["one", "two\x1b[31m"], "app": []}).encode()


@pytest.fixture
def key(tmp_path: Path) -> bytes:
    """A device's private key."""
    keys.write_device(tmp_path)
    return (tmp_path / "device.key").read_bytes()


def node_of(key: bytes) -> object:
    """Return the function that knows this key as node 7."""
    public = load_ssh_private_key(key, None).public_key()
    return {public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo): 7}.get


def test_a_registered_node_is_taken_at_its_word(key):
    logs = SharedLogs()
    logs.take(node_of(key), signed(key, BODY), BODY)
    told = logs.told("7")
    assert told["supernode"] == ["one", "two\N{REPLACEMENT CHARACTER}[31m"]  # nothing for a terminal
    assert logs.told("8") == {}


def test_what_nobody_has_signed_isnt_taken(key, tmp_path):
    logs, headers = SharedLogs(), signed(key, BODY)
    keys.write_device(tmp_path)
    other = (tmp_path / "device.key").read_bytes()
    old = {**headers, TIME: f"{time.time() - 301:.3f}"}
    for given, body, reason in (
        (headers, BODY + b" ", "the signature isn't that of a device"),
        (old, BODY, "the time of the signature is off"),
        ({**headers, TIME: "nan"}, BODY, "the time of the signature is off"),
        ({}, BODY, "the signature isn't that of a device"),
        (signed(other, BODY), BODY, "the key isn't that of a registered node"),
        (headers, b" " * (MOST_BYTES + 1), "1048577 bytes, allowed are 1048576"),
        (signed(key, b"{}"), b"{}", "the lines can't be read"),
    ):
        with pytest.raises(SharedLogError) as raised:
            logs.take(node_of(key), given, body)
        assert str(raised.value) == reason
    assert logs.known == {}


def test_the_app_writes_its_log_where_the_site_shares_it(tmp_path):
    logger, before = logging.getLogger("flwr"), list(logging.getLogger("flwr").handlers)
    try:
        for share in (False, True, True):  # the second time there is nothing to do
            write_log({"state-path": str(tmp_path / "state"), "share-logs": share})
            logging.getLogger("flwr.fedapp").warning("shared: %s", share)
    finally:
        for handler in set(logger.handlers) - set(before):
            logger.removeHandler(handler)
            handler.close()
    lines = tail(tmp_path / "state" / "device.log")
    assert [re.sub(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\dZ ", "", line) for line in lines] == [
        "WARNING shared: True"
    ] * 2
    assert tail(tmp_path / "nothing") == []


def test_the_last_lines_are_kept():
    lines, logger = Lines(), logging.Logger("device")
    logger.addHandler(lines)
    for number in range(LINES + 1):
        logger.info("line %d", number)
        logger.info("")
    assert len(lines.last) == LINES
    assert lines.last[0].endswith("INFO line 1")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_log_of_a_device_is_read_through_the_superlink(tmp_path):
    nodes = [{"partition-id": part, "num-partitions": 2} for part in range(2)]
    with LocalDeployment(tmp_path / "d", nodes) as deployment:
        out = deployment.folder
        (out / "device-1" / "site.toml").write_text("share-logs = true")
        assert deploy("logs", out, "device-1").output.startswith(
            "error: device 'device-1': isn't registered; "
        )
        deployment.start_superlink()
        deployment.wait_for_superlink()
        list(register(out, deployment.deployment))
        state = out / "device-1" / "superexec" / "state"
        state.mkdir(parents=True)
        (state / "device.log").write_text("2026-11-28 10:00:00Z WARNING This client can't take part\n")
        deployment.start_supernode("device-1")
        deployment.start_supernode("device-0")
        wait_until(lambda: "SuperNode ID: " in deploy("logs", out, "device-1").output)
        printed = deploy("logs", out, "device-1").output
        assert printed.startswith("device-1, SuperNode, 20")
        assert printed.splitlines()[-1] == "  2026-11-28 10:00:00Z WARNING This client can't take part"
        said = deploy("logs", out, "device-0").output
        assert said == (
            "error: device 'device-0': has sent no log since the SuperLink began; its site allows it by "
            "share-logs = true\n"
        )
