"""``start.sh``: what starts a machine where there is no systemd, by a shell alone and in a whole deployment."""

import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from fedapp.deploy.files import read_deployment, write_deployment
from fedapp.deploy.flower import ask
from fedapp.deploy.local import free_ports
from fedapp.deploy.orchestration.by_hand import start_script
from fedapp.deploy.plan import LOOPBACK, Deployment, Device
from fedapp.deploy.registration import register
from tests.deploy.command import deploy
from tests.waiting import wait_until

ENVIRONMENT = {**os.environ, "FEDAPP_ONE_USER": "1"}


def started(script: Path, **environment: str) -> subprocess.Popen[bytes]:
    """Start a machine; its own lines go to start.log beside the script."""
    with script.with_suffix(".log").open("ab") as log:
        return subprocess.Popen(
            ["sh", script], env={**ENVIRONMENT, **environment}, stdout=log, stderr=log, start_new_session=True
        )


def ended(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    process.wait(60)


def light_device(home: Path) -> tuple[Deployment, Path]:
    """Make a device whose home has programs that only say who they are, and wait; return its script, too."""
    bin_folder = home / ".venv" / "bin"
    bin_folder.mkdir(parents=True)
    for name in ("python", "flower-superexec"):
        program = bin_folder / name
        program.write_text('#!/bin/sh\necho "$PWD $$ $FLWR_HOME $*"\nsleep 1000 &\nwait\n')
        program.chmod(0o755)
    deployment = Deployment(
        (LOOPBACK,), 8000, str(home), (Device("oslo", {"data-path": "/data/x y.npz"}, 9094),)
    )
    script = home / "oslo" / "start.sh"
    (home / "oslo" / "superexec").mkdir(parents=True)
    script.write_text(start_script(deployment, "oslo"))
    return deployment, script


@pytest.fixture
def light(tmp_path):
    return light_device(tmp_path / "home")


def group_lives(number: int) -> bool:
    try:
        os.killpg(number, 0)
    except ProcessLookupError:
        return False
    return True


def test_every_process_has_its_folder_and_command_and_ends_with_the_script(light):
    deployment, script = light
    services = [service for service in deployment.services if not service.is_server]
    logs = {
        service.name: Path(deployment.home) / service.folder / f"{service.name}.log" for service in services
    }
    process = started(script)
    try:
        wait_until(lambda: all(log.exists() and log.read_text() for log in logs.values()))
        groups = []
        for service in services:
            own = f"{deployment.home}/{service.folder}"
            folder, number, home, *words = logs[service.name].read_text().split()
            assert (folder, home) == (own, f"{own}/flower")
            assert words == service.command[1:]
            assert stat.S_IMODE(logs[service.name].stat().st_mode) == 0o600
            groups.append(int(number))
        assert all(group_lives(number) for number in groups)
    finally:
        ended(process)
    wait_until(lambda: not any(group_lives(number) for number in groups))  # and what they have started


def test_a_process_that_ended_starts_again_without_what_it_left(light):
    _, script = light
    short = script.read_text().replace("sleep 10 &", "sleep 0.2 &")
    assert short != script.read_text()
    script.write_text(short)
    log = script.with_name("oslo.log")
    process = started(script)
    try:
        wait_until(lambda: log.exists() and log.read_text())
        first = int(log.read_text().split()[1])
        os.kill(first, signal.SIGKILL)  # the sleep that it has started goes with its group
        wait_until(lambda: log.read_text().count("fedapp.deploy.supernode") == 2)
        assert "oslo ended with 137, and starts again in 10 s" in script.with_suffix(".log").read_text()
        wait_until(lambda: not group_lives(first))
    finally:
        ended(process)


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("setpriv") is None, reason="needs root, and setpriv")
def test_root_starts_each_process_as_its_user_who_writes_the_log():
    with tempfile.TemporaryDirectory() as folder:  # which other users can enter
        Path(folder).chmod(0o755)
        deployment, script = light_device(Path(folder) / "home")
        names = {"fedapp-supernode": "mail", "fedapp-superexec": "daemon"}  # users that there are here
        text = script.read_text()
        for ours, theirs in names.items():
            text = re.sub(rf"(?<= ){ours}(?=[ ;])", theirs, text)
        script.write_text(text)
        shutil.chown(script.parent, names["fedapp-supernode"])
        shutil.chown(script.parent / "superexec", names["fedapp-superexec"])
        logs = {
            Path(folder) / "home" / service.folder / f"{service.name}.log": names[service.user]
            for service in deployment.services
            if not service.is_server
        }
        process = started(script, FEDAPP_ONE_USER="")
        try:
            wait_until(
                lambda: all(log.exists() and log.read_text() for log in logs),
                script.with_suffix(".log").read_text,
                seconds=60,
            )
            for log, user in logs.items():
                assert log.owner() == Path(f"/proc/{log.read_text().split()[1]}").owner() == user
        finally:
            ended(process)


def test_users_that_are_not_there_are_one_line(light):
    _, script = light
    done = subprocess.run(
        ["sh", script], env={**ENVIRONMENT, "FEDAPP_ONE_USER": ""}, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    assert len(done.stderr.splitlines()) == 1
    assert not script.with_name("oslo.log").exists()


@pytest.mark.skipif(shutil.which("dash") is None, reason="needs dash")
def test_another_shell_takes_the_script_too(light):
    _, script = light
    assert subprocess.run(["dash", "-n", script]).returncode == 0


def test_each_machine_has_its_script(tmp_path):
    out = tmp_path / "d"
    assert deploy("init", out, "--host", "fl.example.org", "--device", "oslo=/data/x.npz").exit_code == 0
    for machine in ("superlink", "oslo"):
        assert (out / machine / "start.sh").read_text() == start_script(read_deployment(out), machine)


@pytest.mark.ci
@pytest.mark.thorough
@pytest.mark.timeout(900)
def test_a_deployment_that_is_started_by_its_scripts_trains(repository, tmp_path):
    home, out = tmp_path / "home", tmp_path / "deployment"
    home.mkdir()
    (home / ".venv").symlink_to(Path(sys.executable).parents[1])
    port, node_port = free_ports(2)
    device = Device("oslo", {"partition-id": 0, "num-partitions": 1}, node_port)
    deployment = Deployment((LOOPBACK,), port, str(home), (device,))
    write_deployment(out, deployment)
    for machine in ("superlink", "oslo"):
        shutil.copytree(out / machine, home / machine)
    processes = [started(home / "superlink" / "start.sh", PYTHONPATH=str(repository))]
    try:
        wait_until(lambda: _answers(out))
        assert [answer.state for answer in register(out, deployment)] == ["registered"]
        processes.append(started(home / "oslo" / "start.sh", PYTHONPATH=str(repository)))
        socket = home / "oslo" / "superexec" / "worker.sock"
        wait_until(socket.exists)
        config = 'num-server-rounds=1 min-clients=1 model="logistic" figures=false run-name="by-hand"'
        done = deploy("run", out, "--app", repository, "-c", config)
        assert done.exit_code == 0, done.output
        wait_until(lambda: ask(out, "list")["runs"][0]["status"].startswith("finished"), seconds=600)
        log = "".join(file.read_text() for file in home.rglob("*.log"))
        assert ask(out, "list")["runs"][0]["status"] == "finished:completed", log
        results = home / "superlink" / "superexec" / "results" / "by-hand"
        assert (results / "model.safetensors").exists()
    finally:
        for process in processes:
            ended(process)
    assert not socket.exists()  # its worker was told to end


def _answers(out: Path) -> bool:
    try:
        return ask(out, "list")["runs"] == []
    except Exception:
        return False
