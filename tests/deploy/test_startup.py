"""Units, compose file and proxies' configurations, read by the programs that will read them."""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from fedapp.deploy.files import read_deployment
from fedapp.deploy.plan import Service
from tests.deploy.command import deploy

HOSTS = ("--host", "fl.example.org", "--host", "2001:db8::5")
DEVICES = ("--device", "oslo=/srv/my data/$x.npz", "--device", "bern=/data/images")
UNITS = [
    "fedapp-bern-superexec.service",
    "fedapp-bern-worker.service",
    "fedapp-bern.service",
    "fedapp-oslo-superexec.service",
    "fedapp-oslo-worker.service",
    "fedapp-oslo.service",
    "fedapp-superexec.service",
    "fedapp-superlink.service",
]
needs_systemd = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")


def init(out: Path, *arguments: object) -> Path:
    result = deploy("init", out, *HOSTS, *arguments)
    assert result.exit_code == 0, result.output
    return out


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A deployment behind a proxy, for two devices with data of their own; its install folder has an environment."""
    folder = tmp_path_factory.mktemp("made")
    (folder / "home").mkdir()
    (folder / "home" / ".venv").symlink_to(Path(sys.executable).parents[1])
    return init(folder / "deployment", *DEVICES, "--home", folder / "home")


def unit(made: Path, service: Service) -> str:
    return (made / service.machine / f"fedapp-{service.name}.service").read_text().replace(" \\\n ", "")


# Who may reach what --------------------------------------------------------------------------------------------


def test_only_the_proxy_is_public(made):
    deployment = read_deployment(made)
    for service in deployment.services:
        at = [service.command[place + 1] for place, word in enumerate(service.command) if word == "--host"]
        assert at == ([] if service.runs_apps else ["127.0.0.1"]), service.name
    assert deployment.superlink_address == "127.0.0.1:9093"
    assert "listen 0.0.0.0:8000 ssl;" in (made / "proxy" / "nginx.conf").read_text()
    assert not (made / "flower").exists()


def test_without_a_proxy_the_superlink_is_public(tmp_path):
    out = init(tmp_path / "d", *DEVICES, "--no-proxy")
    deployment = read_deployment(out)
    assert deployment.superlink_command()[4:8] == ["--host", "0.0.0.0", "--port", "8000"]
    assert not (out / "proxy").exists()
    assert not (out / "operator.key").exists()
    assert "proxy" not in yaml.safe_load((out / "compose.yaml").read_text())["services"]
    config = tomllib.loads((out / "flower" / "config.toml").read_text())
    assert config["superlink"]["deployment"]["address"] == "fl.example.org:8000"


# Units ---------------------------------------------------------------------------------------------------------


@needs_systemd
def test_systemd_accepts_the_units(made):
    units = sorted(made.glob("*/*.service"))
    assert sorted(path.name for path in units) == UNITS
    command = ["systemd-analyze", "verify", "--man=no", *map(str, units)]
    done = subprocess.run(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    newer = ("RestartSteps", "RestartMaxDelaySec")  # keys that systemd knows from 254 on
    complaints = [line for line in done.stdout.splitlines() if not any(key in line for key in newer)]
    assert [line for line in complaints if "fedapp-" in line] == []


@needs_systemd
@pytest.mark.parametrize("name", UNITS)
def test_systemd_finds_little_that_a_unit_is_exposed_to(name, made):
    (path,) = made.glob(f"*/{name}")
    command = ["systemd-analyze", "security", "--offline=true", "--threshold=39", "--no-pager", str(path)]
    done = subprocess.run(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if "--offline" in done.stdout and "unrecognized" in done.stdout:
        pytest.skip("needs systemd 250")
    assert "Overall exposure level" in done.stdout, done.stdout
    assert done.returncode == 0, done.stdout


def test_the_code_of_runs_has_a_user_of_its_own_and_bounds(made):
    deployment = read_deployment(made)
    for service in deployment.services:
        lines = unit(made, service).splitlines()
        user = "superexec" if service.runs_apps else "superlink" if service.is_server else "supernode"
        assert f"User=fedapp-{user}" in lines
        assert f"ReadWritePaths={deployment.home}/{service.folder}" in lines
        assert f"ExecStart={deployment.home}/.venv/bin/{' '.join(service.command)}" in lines
        for key in ("MemoryMax", "TasksMax", "LimitNOFILE"):
            assert len([line for line in lines if line.startswith(f"{key}=")]) == 1, (service.name, key)


def test_a_device_s_code_is_told_of_its_worker_which_is_its_user_s(made):
    services = yaml.safe_load((made / "compose.yaml").read_text())["services"]
    deployment = read_deployment(made)
    socket = {"oslo": "oslo/superexec/worker.sock", "bern": "bern/superexec/worker.sock"}
    for service in deployment.services:
        told = f"Environment=FEDAPP_WORKER={deployment.home}/{socket.get(service.machine)}"
        lines = unit(made, service).splitlines()
        assert (told in lines) == (service.runs_apps and not service.is_server), service.name
        variables = services[service.name]["environment"]
        assert (f"Environment=FEDAPP_WORKER={variables.get('FEDAPP_WORKER')}" in lines) == (told in lines)
        if service.is_worker:
            assert "User=fedapp-superexec" in lines
            assert f"Description=worker {service.machine} of fedapp" in lines
            assert (
                services[service.name]["volumes"][0] == services[f"{service.machine}-superexec"]["volumes"][0]
            )


def test_what_needs_no_network_has_none_but_loopback(made, tmp_path):
    """A device's data leave it by its SuperNode alone; one that may have to fetch a dataset isn't kept from that."""
    kept = {
        service.name: "IPAddressDeny=any" in unit(made, service) for service in read_deployment(made).services
    }
    assert kept == {
        "superlink": True,
        "superexec": False,
        "oslo": False,
        "oslo-superexec": True,
        "oslo-worker": True,
        "bern": False,
        "bern-superexec": True,
        "bern-worker": True,
    }
    out = init(tmp_path / "d", "--partitions", 1, "--no-proxy")
    assert not any("IPAddressDeny" in unit(out, service) for service in read_deployment(out).services)


# Compose -------------------------------------------------------------------------------------------------------


def test_compose_starts_what_the_units_start(made):
    deployment = read_deployment(made)
    services = yaml.safe_load((made / "compose.yaml").read_text())["services"]
    proxy = services.pop("proxy")
    commands = {service.name: service.command for service in deployment.services}
    assert {name: service["command"] for name, service in services.items()} == commands
    # Data is mounted where the device has it, for reading only; $ is doubled for compose.
    assert services["oslo-superexec"]["volumes"][2] == {
        "type": "bind",
        "source": "/srv/my data/$$x.npz",
        "target": "/srv/my data/$$x.npz",
        "read_only": True,
    }
    site = next(volume for volume in proxy["volumes"] if volume["target"].startswith("/etc/nginx"))
    assert (made / site["source"]).read_text() == (made / "proxy" / "nginx.conf").read_text()


def test_no_container_has_more_than_it_needs(made):
    services = yaml.safe_load((made / "compose.yaml").read_text())["services"]
    for name, service in services.items():
        assert service["read_only"] is True, name
        assert "/tmp" in service["tmpfs"], name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert service["mem_limit"], name
        assert service["pids_limit"], name
        assert int(service["user"].split(":")[0]) > 0, name
        # The code of runs sees no key: neither is it the keys' owner, nor are they mounted.
        sources = [volume["source"] for volume in service["volumes"]]
        if name.endswith(("superexec", "worker")):
            assert service["user"] != services["superlink"]["user"]
            assert all(Path(source).suffix in (".crt", ".npz", "") for source in sources), name
            assert not {"./superlink", "./oslo", "./bern"} & set(sources), name


def test_compose_accepts_its_file(made):
    asked = ["docker", "compose", "version"]
    if shutil.which("docker") is None or subprocess.run(asked, capture_output=True).returncode:
        pytest.skip("needs docker compose")
    command = ["docker", "compose", "--file", str(made / "compose.yaml"), "config", "--quiet"]
    assert subprocess.run(command).returncode == 0


# Proxies -------------------------------------------------------------------------------------------------------


def test_systemd_hands_caddy_what_its_file_reads(made):
    lines = (made / "proxy" / "caddy.conf").read_text().splitlines()
    handed = dict(line.removeprefix("LoadCredential=").split(":") for line in lines if "=" in line)
    read = set(re.findall(r"\{\$CREDENTIALS_DIRECTORY\}/(\S+)", (made / "proxy" / "Caddyfile").read_text()))
    assert set(handed) == read
    assert handed == {name: f"{read_deployment(made).home}/superlink/{name}" for name in read}
    assert all((made / "superlink" / name).is_file() for name in read)


@pytest.mark.skipif(shutil.which("caddy") is None, reason="needs Caddy: apt-get install caddy")
def test_caddy_accepts_its_file_and_its_form(made, tmp_path):
    file = str(made / "proxy" / "Caddyfile")
    environment = {**os.environ, "HOME": str(tmp_path), "CREDENTIALS_DIRECTORY": str(made / "superlink")}
    command = ["caddy", "adapt", "--validate", "--adapter", "caddyfile", "--config", file]
    done = subprocess.run(command, env=environment, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["admin"] == {"disabled": True}
    formatted = subprocess.run(["caddy", "fmt", file], env=environment, text=True, capture_output=True).stdout
    assert formatted == Path(file).read_text()
