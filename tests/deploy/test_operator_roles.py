"""Operators behind real proxies and in front of a real SuperLink: what each role may do, and who is named for it."""

import http.client
import json
import re
import ssl
import subprocess
import sys
from pathlib import Path

import pytest
from flwr.proto.control_pb2 import ListRunsRequest
from flwr.supercore.protobuf.constants import PROTOBUF_MEDIA_TYPE

from fedapp.deploy.local import LocalDeployment
from tests.deploy.command import deploy
from tests.deploy.proxies import PROXIES, Proxy

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(params=PROXIES)
def guarded(request, tmp_path):
    """A SuperLink and a proxy in front of it; ben looks, anna starts runs, and carl, who made the key, manages."""
    nodes = [{"partition-id": 0, "num-partitions": 1}]
    with LocalDeployment(tmp_path / "d", nodes, proxied=True) as deployment:
        assert deploy("operator", "add", deployment.folder, "ben", "--role", "look").exit_code == 0
        assert deploy("operator", "add", deployment.folder, "anna", "--role", "start").exit_code == 0
        assert deploy("operator", "request", "carl", "--out", tmp_path / "carl").exit_code == 0
        signed = deploy(
            "operator", "sign", tmp_path / "carl/operator.csr", deployment.folder, "--role", "manage"
        )
        assert signed.exit_code == 0, signed.output
        for file in (deployment.folder / "operators" / "carl").iterdir():
            (tmp_path / "carl" / file.name).write_bytes(file.read_bytes())
        deployment.start_superlink()
        deployment.wait_for_superlink()
        with PROXIES[request.param](deployment) as proxy:
            yield deployment, proxy


def flower(folder: Path, *arguments: object) -> tuple[int, str]:
    """Run one of Flower's commands as the operator whose folder it is."""
    command = [sys.executable, "-m", "fedapp.cli", "deploy", "flwr", "--deployment", str(folder)]
    done = subprocess.run([*command, *map(str, arguments)], text=True, capture_output=True, timeout=120)
    return done.returncode, " ".join((done.stdout + done.stderr).split())


def test_each_operator_may_do_what_the_role_says_and_is_named(guarded, repository, tmp_path):
    deployment, proxy = guarded
    out, key = deployment.folder, deployment.folder / "device-0" / "device.pub"
    ben, anna, carl = out / "operators" / "ben", out / "operators" / "anna", tmp_path / "carl"

    assert flower(ben, "list")[0] == 0
    code, printed = flower(ben, "run", repository)
    assert code != 0
    assert re.search(r"permission denied: operator (CN=)?ben has the role look", printed), printed
    code, printed = flower(anna, "run", repository)
    assert code == 0, printed
    (run,) = re.findall(r"Successfully started run (\d+)", printed)
    assert "permission denied" in flower(anna, "supernode", "register", key)[1]
    assert "permission denied" in flower(ben, "stop", run)[1]
    code, printed = flower(carl, "supernode", "register", key)
    assert code == 0, printed
    assert flower(anna, "stop", run)[0] == 0
    # The app's own commands work in an operator's folder, too.
    status = deploy("status", ben, "--json")
    assert status.exit_code == 0, status.output
    assert [each["status"] for each in json.loads(status.output)["runs"]] == ["finished:stopped"]
    refused = deploy("stop", ben, "--run", run).output
    assert re.search(r"^error: flwr stop .*: permission denied: operator (CN=)?ben", refused), refused
    # The first operator may do all, as before there were others.
    assert deploy("register", out).exit_code == 0

    assert_removed_is_refused(proxy, out, anna)
    assert_audit_names(out, proxy, run)


def assert_removed_is_refused(proxy: Proxy, out: Path, anna: Path) -> None:
    """The operator had a copy of the folder, and still has it."""
    copy = out.parent / "copy"
    copy.mkdir()
    for file in anna.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    trust = ssl.create_default_context(cafile=str(out / "ca.crt"))
    trust.load_cert_chain(copy / "operator.crt", copy / "operator.key")
    port = proxy.deployment.deployment.port
    connection = http.client.HTTPSConnection("127.0.0.1", port, timeout=60, context=trust)
    assert list_runs(connection) == 200
    assert deploy("operator", "remove", out, "anna").exit_code == 0
    assert list_runs(connection) == 200
    proxy.reload()
    assert list_runs(connection) in (403, 0)
    connection.close()
    code, printed = flower(copy, "list")
    assert code != 0
    assert "permission denied: the certificate isn't that of an operator" in printed
    assert deploy("status", out / "operators" / "ben").exit_code == 0


def list_runs(connection: http.client.HTTPSConnection) -> int:
    """Return the status of the answer; 0 if the proxy has closed the connection."""
    headers = {"Content-Type": PROTOBUF_MEDIA_TYPE}
    try:
        connection.request("POST", "/v1/control/list-runs", ListRunsRequest().SerializeToString(), headers)
        answer = connection.getresponse()
        answer.read()
    except (http.client.HTTPException, OSError):
        return 0
    return answer.status


def assert_audit_names(out: Path, proxy: Proxy, run: str) -> None:
    unknown = deploy("audit", out)
    assert unknown.exit_code == 0, unknown.output
    assert f"run {run}: who started it isn't known" in unknown.output
    shown = deploy("audit", out, "--access-log", proxy.access_log)
    assert shown.exit_code == 0, shown.output
    assert "who started it isn't known" not in shown.output
    said = [line.partition(" ")[2] for line in shown.output.splitlines()]
    lines = [line for line in said if line.startswith("operator ")]
    assert lines[:6] == [
        "operator ben (look) start-run: refused: permission denied",
        f"operator anna (start) start-run run {run}: done",
        "operator anna (start) register-node: refused: permission denied",
        "operator ben (look) stop-run: refused: permission denied",
        *[line for line in lines if line.startswith("operator carl (manage) register-node node ")],
        f"operator anna (start) stop-run run {run}: done",
    ]
    again = deploy("audit", out, "--access-log", proxy.access_log).output
    assert again.startswith("0 new requests of operators in ")
    assert again.splitlines()[1:] == shown.output.splitlines()[1:]
    assert "lines are as they were written" in deploy("audit", out, "--verify").output
