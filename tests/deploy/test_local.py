"""``fedapp deploy local``: a whole deployment as a user starts it, and nothing of it left when it ends."""

import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fedapp.deploy.files import read_deployment
from fedapp.deploy.local import LocalDeployment
from fedapp.deploy.plan import DeployError
from fedapp.report import read_metrics
from tests.selection import spread

Start = Callable[..., subprocess.Popen[str]]
OUT = "my out"  # a folder's name may have spaces


@pytest.fixture
def start(repository, tmp_path):
    """Start the command, with its folder at tmp_path/OUT; nothing of it outlives the test."""
    begun = []

    def run(*arguments: str) -> subprocess.Popen[str]:
        command = [
            sys.executable,
            "-m",
            "fedapp.cli",
            "deploy",
            "local",
            "--out",
            str(tmp_path / OUT),
            *arguments,
        ]
        begun.append(
            subprocess.Popen(
                command,
                cwd=repository,
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_heeds_interrupts,
            )
        )
        return begun[-1]

    yield run
    for process in begun:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            process.wait(60)


def _heeds_interrupts() -> None:
    """A shell's background job, and all below it, ignores them."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def left_over(out: Path) -> list[str]:
    """Return the command lines of processes whose FLWR_HOME is below a folder."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if f"FLWR_HOME={out}/".encode() in (process / "environ").read_bytes():
                found.append((process / "cmdline").read_text().replace("\0", " "))
        except OSError:
            continue
    return found


def test_the_folder_may_be_called_as_no_unit_could_hold_it(tmp_path):
    folder = tmp_path / "a 'b' %c $d"
    deployment = LocalDeployment(folder, [{"partition-id": 0, "num-partitions": 1}]).deployment
    assert read_deployment(folder) == deployment
    assert deployment.home == str(folder)


@pytest.mark.ci
@pytest.mark.thorough
@pytest.mark.timeout(600)
def test_a_run_on_real_processes_with_tls_and_keys(start, tmp_path):
    config = f'num-server-rounds=1 results-dir="{tmp_path}" run-name="run"'
    simulated = tmp_path / "config.toml"  # as a simulation leaves it
    simulated.write_text('clock = "virtual"\nnum-clients = 2\n[versions]\nflwr = "1"\n')
    process = start("-n", "2", "-c", str(simulated), "-c", config)
    output = process.communicate(timeout=500)[0]
    assert process.returncode == 0, output
    assert output.startswith(
        "clock = virtual: was the simulation's, and isn't taken over; devices have real time\n"
    )
    assert {line["clock"] for line in read_metrics(tmp_path / "run")} == {"wall"}
    assert "Successfully started run" in output
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["status"], summary["engine"], summary["num-clients"]) == ("finished", "deployment", 2)
    assert (summary["participants"], summary["failures"]) == (2, 0)
    assert left_over(tmp_path / OUT) == []
    for name in ("superlink", "superexec", "device-0", "device-1"):
        assert (tmp_path / OUT / f"{name}.log").stat().st_size > 0


@pytest.mark.ci
@pytest.mark.thorough
@pytest.mark.timeout(300)
@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.thorough)])
def test_interrupted_it_ends_everything_that_it_started(number, start, tmp_path):
    process = start("-n", "2", "-c", f'results-dir="{tmp_path}"')
    deadline = time.monotonic() + 200
    while len([line for line in left_over(tmp_path / OUT) if "fedapp.deploy.supernode" in line]) < 2:
        assert time.monotonic() < deadline
        assert process.poll() is None, process.stdout and process.stdout.read()
        time.sleep(0.2)
    process.send_signal(number)
    output = process.communicate(timeout=60)[0]
    assert process.returncode == 1
    # What Flower's own command says of the end of its stream may come later.
    assert "interrupted; everything that was started is ended\n" in output
    assert left_over(tmp_path / OUT) == []


@pytest.mark.parametrize(
    ("arguments", "text"),
    spread(
        [
            (("-c", "lr=-1.0"), "error: lr = -1.0: must be a number > 0"),
            (("-c", 'dataset="files"'), "error: data-path = '': dataset files needs the path of a .npz"),
            (("--app", "tests"), "error: --app = 'tests': must be the app's source folder"),
        ],
        1,
    ),
)
def test_what_cannot_run_is_one_line_before_anything_starts(arguments, text, start, tmp_path):
    process = start(*arguments)
    output = process.communicate(timeout=200)[0]
    assert process.returncode == 1
    assert output.startswith(text)
    assert len(output.splitlines()) == 1
    assert not (tmp_path / OUT).exists()


def test_a_superlink_that_accepts_connections_and_never_answers_has_not_started(tmp_path, monkeypatch):
    monkeypatch.setattr("fedapp.deploy.local.START_TIMEOUT", 0.5)
    with LocalDeployment(tmp_path / "d", [{"partition-id": 0, "num-partitions": 1}]) as deployment:
        host, _, port = deployment.deployment.superlink_address.partition(":")
        process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        with socket.create_server((host, int(port))), process:
            deployment.processes["superlink"] = process
            with pytest.raises(DeployError, match="the SuperLink didn't start"):
                deployment.wait_for_superlink()
