"""The play that installs devices, run by Ansible on this machine, into a folder of the test.

What needs root's own places is left out: the users, the systemd of a device, and what the app needs from a package
index.
"""

import json
import os
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from fedapp.deploy.files import read_deployment
from tests.deploy.command import contents, deploy

BIN = Path(sys.executable).parent
HOSTS = ("--host", "fl.example.org")
BUILD = "import sys; from hatchling.build import build_wheel; print(build_wheel(sys.argv[1]))"
UNITS = ["fedapp-oslo-superexec.service", "fedapp-oslo-worker.service", "fedapp-oslo.service"]


def init(folder: Path) -> Path:
    (folder / "data").mkdir(parents=True)
    (folder / "data" / "oslo.npz").write_bytes(b"")
    devices = ("--device", f"oslo={folder}/data/oslo.npz", "--device", f"bern={folder}/data/bern.npz")
    home = ("--home", folder / "home")
    result = deploy("init", folder / "d", *HOSTS, *devices, *home, "--for", "ansible")
    assert result.exit_code == 0, result.output
    return folder / "d"


def test_the_inventory_has_every_device_with_its_data(tmp_path):
    out = init(tmp_path)
    read = yaml.safe_load((out / "ansible" / "inventory.yaml").read_text())["devices"]
    assert read["vars"] == {"home": str(tmp_path / "home")}
    assert read["hosts"] == {
        name: {"data_path": str(tmp_path / "data" / f"{name}.npz")} for name in ("oslo", "bern")
    }
    before = contents(out / "ansible")
    assert deploy("add", out, "lima=/data/lima.npz").exit_code == 0
    after = contents(out / "ansible")
    assert {name for name in after if after[name] != before[name]} == {"inventory.yaml"}
    assert "lima" in yaml.safe_load(after["inventory.yaml"])["devices"]["hosts"]
    # Without data of its own a device has what the run's dataset gives it.
    parts = tmp_path / "parts"
    assert deploy("init", parts, *HOSTS, "--partitions", 1, "--for", "ansible").exit_code == 0
    hosts = yaml.safe_load((parts / "ansible" / "inventory.yaml").read_text())["devices"]["hosts"]
    assert hosts == {"device-0": {}}


def test_the_play_starts_the_units_as_the_users_that_they_name(tmp_path):
    out = init(tmp_path)
    (play,) = yaml.safe_load((out / "ansible" / "devices.yaml").read_text())
    services = {name.replace("{{ device }}", "oslo") for name in play["vars"]["services"]}
    deployment = read_deployment(out)
    assert services == {f"fedapp-{one.name}" for one in deployment.services if one.machine == "oslo"}
    users = {play["vars"]["flower_user"], play["vars"]["apps_user"]}
    assert users == {one.user for one in deployment.services if not one.is_server}


class Play:
    """The play of a deployment, on this machine in place of oslo."""

    def __init__(self, out: Path, folder: Path) -> None:
        self.out = out
        user = Path(folder).owner()
        self.given = {
            "ansible_connection": "local",
            "ansible_become": False,
            "ansible_remote_tmp": str(folder / "ansible" / "remote"),
            "ansible_python_interpreter": sys.executable,
            "python": sys.executable,
            "pip_arguments": "--no-deps --no-index",
            "units": str(folder / "units"),
            "flower_user": user,
            "apps_user": user,
        }
        self.environment = {
            **os.environ,
            "ANSIBLE_HOME": str(folder / "ansible"),
            "ANSIBLE_NOCOLOR": "1",
            "LC_ALL": "C.UTF-8",
        }

    def run(self, *options: str, **given: object) -> tuple[int, str]:
        command = [
            str(BIN / "ansible-playbook"),
            *("-i", str(self.out / "ansible" / "inventory.yaml"), str(self.out / "ansible" / "devices.yaml")),
            *("--limit", "oslo", "--extra-vars", json.dumps({**self.given, **given}), *options),
        ]
        done = subprocess.run(
            command, env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        return done.returncode, done.stdout


def changed(printed: str) -> int:
    recap = re.search(r"^oslo +: ok=\d+ +changed=(\d+) +unreachable=0 +failed=0 ", printed, re.M)
    assert recap, printed
    return int(recap[1])


@pytest.mark.ci
@pytest.mark.thorough
@pytest.mark.timeout(900)
def test_the_play_installs_a_device_once(repository, tmp_path):
    out, home, units = init(tmp_path), tmp_path / "home", tmp_path / "units"
    units.mkdir()
    dist = tmp_path / "source" / "dist"
    dist.mkdir(parents=True)
    shutil.copy(repository / "constraints.txt", dist.parent)
    subprocess.run([sys.executable, "-c", BUILD, dist], cwd=repository, check=True, capture_output=True)
    (wheel,) = dist.glob("*.whl")
    play = Play(out, tmp_path)
    code, printed = play.run("--skip-tags", "users,start", wheel=str(wheel))
    assert code == 0, printed
    assert changed(printed) > 0

    # The app is installed, in an environment of its own.
    assert (home / ".venv" / "bin" / "fedapp-worker").exists()
    asked = [home / ".venv" / "bin" / "python", "-I", "-c", "import fedapp; print(fedapp.__file__)"]
    there = subprocess.run(asked, capture_output=True, text=True, check=True).stdout
    assert there.startswith(str(home / ".venv"))
    # The device's folder is as the guide's commands make it; what is private stays so.
    given = contents(out / "oslo")
    assert contents(home / "oslo") == {
        name: given[name] for name in given if not name.endswith((".service", ".sh"))
    }
    assert (home / "start-oslo.sh").read_bytes() == given["start.sh"]
    for name, content in contents(home / "oslo").items():
        private = b"PRIVATE KEY" in content or name.endswith(".secret")
        assert stat.S_IMODE((home / "oslo" / name).stat().st_mode) == (0o600 if private else 0o644), name
    assert contents(units) == {name: given[name] for name in UNITS}
    (home / ".venv" / "bin" / "flower-superexec").symlink_to(
        BIN / "flower-superexec"
    )  # Flower isn't in there
    if shutil.which("systemd-analyze"):
        command = ["systemd-analyze", "verify", "--man=no", *(str(units / name) for name in UNITS)]
        said = subprocess.run(command, capture_output=True, text=True).stderr.splitlines()
        newer = ("RestartSteps", "RestartMaxDelaySec")  # keys that systemd knows from 254 on
        own = [line for line in said if "fedapp-" in line and not any(key in line for key in newer)]
        assert own == []

    # A second time there is nothing to do; a new key is copied, and nothing else.
    code, printed = play.run("--skip-tags", "users,start", wheel=str(wheel))
    assert (code, changed(printed)) == (0, 0), printed
    (out / "oslo" / "device.key").write_text("another key\n")
    code, printed = play.run("--tags", "files")
    assert (code, changed(printed)) == (0, 1), printed
    assert (home / "oslo" / "device.key").read_text() == "another key\n"

    # A device that made its keys and its secret itself keeps them.
    for name in ("device.key", "local.crt", "local.key", "superexec.secret", "superexec/superexec.secret"):
        (out / "oslo" / name).unlink()
    code, printed = play.run("--tags", "files")
    assert (code, changed(printed)) == (0, 0), printed
    assert (home / "oslo" / "device.key").read_text() == "another key\n"

    # What is wrong on the device is told before anything is started.
    (tmp_path / "data" / "oslo.npz").unlink()
    code, printed = play.run("--tags", "files")
    assert code != 0
    assert f"oslo: {Path(tmp_path).owner()} can't read {tmp_path}/data/oslo.npz" in printed
    if not Path("/run/systemd/system").is_dir():
        code, printed = play.run("--tags", "start")
        assert code != 0
        assert re.search(r"oslo: is started by \S+, and units need systemd; with --skip-tags start", printed)
