"""Whole runs through a proxy: SuperLink, SuperNodes and Flower's command line, as on real devices."""

import http.client
import json
import re
import signal
import ssl
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from flwr.supercore.protobuf.constants import PROTOBUF_MEDIA_TYPE

from fedapp.deploy.local import LocalDeployment
from fedapp.deploy.plan import SUPEREXEC
from tests.deploy.proxies import PROXIES
from tests.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Rows so wide that the first layer of the model has more than one piece of 5 MiB."""
    path = tmp_path_factory.mktemp("data") / "wide.npz"
    rows = np.random.default_rng(0).normal(size=(40, 24_000)).astype(np.float32)
    labels = (rows[:, 0] > 0).astype(np.int64)
    np.savez(path, x_train=rows, y_train=labels, x_test=rows[:10], y_test=labels[:10])
    return path


@pytest.fixture(scope="module", params=PROXIES)
def proxied(request, tmp_path_factory, data):
    """Two devices and their server with a proxy in front of it."""
    nodes = [{"data-path": str(data)}] * 2
    with (
        LocalDeployment(tmp_path_factory.mktemp("proxied") / "d", nodes, proxied=True) as deployment,
        PROXIES[request.param](deployment) as proxy,
    ):
        deployment.start()
        yield deployment, proxy


def command(deployment: LocalDeployment, *arguments: str) -> list[str]:
    return [
        sys.executable,
        "-m",
        "fedapp.cli",
        "deploy",
        "flwr",
        "--deployment",
        str(deployment.folder),
        *arguments,
    ]


def flower(deployment: LocalDeployment, *arguments: str) -> str:
    """Run one of Flower's commands as the operator does."""
    done = subprocess.run(command(deployment, *arguments), text=True, capture_output=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def listed(deployment: LocalDeployment, *arguments: str) -> list[dict[str, str]]:
    answer = json.loads(flower(deployment, *arguments, "--format", "json"))
    return next(value for value in answer.values() if isinstance(value, list))


def test_a_run_and_all_that_the_operator_asks_of_it(proxied, data, repository, tmp_path):
    deployment, _ = proxied
    config = (
        f'dataset="files" data-path="{data}" clock="wall" min-clients=2 num-server-rounds=2 '
        f'results-dir="{tmp_path}" run-name="run"'
    )
    run = command(deployment, "run", str(repository), "--stream", "--run-config", config)
    with subprocess.Popen(run, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        assert process.stdout
        printed = ""
        while "round 0 of 2" not in printed:  # its log comes while it goes
            line = process.stdout.readline()
            assert line, printed
            printed += line
        assert listed(deployment, "list")[0]["status"] == "running"
        assert_no_secret_is_shown(deployment)
        printed += process.stdout.read()
    assert process.returncode == 0, printed
    (number,) = re.findall(r"Successfully started run (\d+)", printed)
    assert listed(deployment, "list")[0]["status"] == "finished:completed"
    assert [node["status"] for node in listed(deployment, "supernode", "list")] == ["online", "online"]
    assert "round 2 of 2" in flower(deployment, "log", number, "--show")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["status"], summary["aggregations"], summary["failures"]) == ("finished", 2, 0)
    assert summary["participants"] == 2


def test_a_run_is_stopped(proxied, data, repository, tmp_path):
    deployment, _ = proxied
    config = (
        f'dataset="files" data-path="{data}" clock="wall" num-server-rounds=1000 results-dir="{tmp_path}"'
    )
    printed = flower(deployment, "run", str(repository), "--run-config", config)
    (number,) = re.findall(r"Successfully started run (\d+)", printed)
    wait_until(lambda: listed(deployment, "list")[0]["status"] == "running")
    flower(deployment, "stop", number)
    assert listed(deployment, "list")[0]["status"] == "finished:stopped"


def assert_no_secret_is_shown(deployment: LocalDeployment) -> None:
    """No process has a secret or a key of ours on its command line."""
    secrets = {file.read_text().strip() for file in deployment.folder.rglob("*.secret")}
    assert len(secrets) == 1 + len(deployment.deployment.devices)
    shown = []
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            shown.append(process.read_text().replace("\0", " "))
        except OSError:
            continue
    ours = [line for line in shown if str(deployment.folder) in line]
    assert len([line for line in ours if SUPEREXEC in line]) >= 3
    for secret in secrets:
        assert not [line for line in shown if secret in line]
    # What Flower starts itself has a token, good for one task; docs/operations.md says so.
    assert all("flwr-" in line for line in ours if "--token" in line)


def test_the_api_of_a_device_is_for_its_superexec_alone(proxied):
    deployment, _ = proxied
    port = deployment.deployment.devices[0].port
    trust = ssl.create_default_context(cafile=str(deployment.folder / "device-0" / "local.crt"))
    connection = http.client.HTTPSConnection("127.0.0.1", port, timeout=60, context=trust)
    for path in ("acquire-task", "pull-task-input", "pull-messages", "push-task-output"):
        connection.request("POST", f"/v1/runtime/{path}", b"", {"Content-Type": PROTOBUF_MEDIA_TYPE})
        answer = connection.getresponse()
        assert (answer.status, path) == (401, path), answer.read()
        answer.read()
    connection.close()
    # And a SuperExec takes nobody for it who has but a certificate of the deployment's authority.
    trust = ssl.create_default_context(cafile=str(deployment.folder / "ca.crt"))
    connection = http.client.HTTPSConnection("127.0.0.1", port, timeout=60, context=trust)
    with pytest.raises(ssl.SSLCertVerificationError):
        connection.connect()
    connection.close()


@pytest.mark.parametrize("proxied", ["nginx"], indirect=True)
def test_a_supernode_that_has_left_its_loop_ends(proxied):
    """Flower's own process would stay, and answer that it is healthy."""
    deployment, proxy = proxied
    node = deployment.processes["device-1"]
    site = proxy.site.read_text()
    broken = site.replace("if ($fedapp_api != fleet) { return 404; }", "return 500;")
    assert broken != site
    proxy.site.write_text(broken)
    proxy.process.send_signal(signal.SIGHUP)
    wait_until(lambda: node.poll() is not None)
    assert node.returncode == 1
    log = deployment.log("device-1").read_text()
    assert "500 Internal Server Error" in log
    assert log.rstrip().endswith("the SuperNode has left its loop, for the reason above")
