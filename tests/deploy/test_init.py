"""``fedapp deploy init``: what it writes, read by the programs that will read it."""

import shutil
import socket
import ssl
import stat
import subprocess
import sys
import threading
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key
from flwr.common.config import parse_config_args
from typer.testing import CliRunner, Result

from fedapp.cli import app
from fedapp.deploy.files import read_deployment

HOSTS = ("--host", "fl.example.org", "--host", "10.0.0.5")
DEVICES = ("--device", "oslo=/srv/my data/$x.npz", "--device", "bern=/data/images")


def deploy(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["deploy", *map(str, arguments)])


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A deployment for two devices with data of their own."""
    out = tmp_path_factory.mktemp("made") / "deployment"
    result = deploy("init", out, *HOSTS, *DEVICES)
    assert result.exit_code == 0, result.output
    return out


def contents(out: Path) -> dict[str, bytes]:
    return {str(path.relative_to(out)): path.read_bytes() for path in out.rglob("*") if path.is_file()}


# Keys and certificates ---------------------------------------------------------------------------------------


def test_private_keys_are_for_their_owner_alone_and_nothing_else_is_private(made: Path) -> None:
    private = {name for name, content in contents(made).items() if b"PRIVATE KEY" in content}
    assert private == {"ca.key", "superlink/server.key", "oslo/device.key", "bern/device.key"}
    for name in (*private, "superlink/superexec.secret"):
        assert stat.S_IMODE((made / name).stat().st_mode) == 0o600, name
    # A machine gets its own secrets only: the authority's key is in no folder that is copied.
    assert (made / ".gitignore").read_text() == "*\n"


@pytest.mark.parametrize("name", ["fl.example.org", "10.0.0.5", "localhost", "127.0.0.1"])
def test_a_client_that_trusts_the_authority_accepts_the_server_under_each_of_its_names(
    made: Path, name: str
) -> None:
    assert shake_hands(made, name) is None


def test_a_client_refuses_the_server_under_another_name_and_without_the_authority(
    made: Path, tmp_path: Path
) -> None:
    assert "mismatch" in str(shake_hands(made, "other.example.org"))
    assert deploy("init", tmp_path / "else", *HOSTS, *DEVICES).exit_code == 0
    assert "CERTIFICATE_VERIFY_FAILED" in str(shake_hands(made, "10.0.0.5", tmp_path / "else" / "ca.crt"))


def shake_hands(made: Path, name: str, authority: Path | None = None) -> ssl.SSLError | None:
    """Connect over TLS on loopback as if to ``name``; return why the client refuses the server."""
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(made / "superlink" / "server.crt", made / "superlink" / "server.key")
    client = ssl.create_default_context(cafile=str(authority or made / "oslo" / "ca.crt"))
    client.verify_flags |= ssl.VERIFY_X509_STRICT
    ours, theirs = socket.socketpair()

    def serve() -> None:
        try:
            server.wrap_socket(theirs, server_side=True).close()
        except OSError:
            theirs.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        client.wrap_socket(ours, server_hostname=name).close()
    except ssl.SSLError as error:
        return error
    finally:
        ours.close()
        thread.join()
    return None


def test_device_keys_are_what_flower_reads_and_differ(made: Path) -> None:
    numbers = set()
    for name in ("oslo", "bern"):
        private = load_ssh_private_key((made / name / "device.key").read_bytes(), None)
        public = load_ssh_public_key((made / name / "device.pub").read_bytes())
        assert isinstance(private, ec.EllipticCurvePrivateKey)
        assert isinstance(public, ec.EllipticCurvePublicKey)
        assert private.curve.name == "secp256r1"
        assert private.public_key() == public
        numbers.add(public.public_numbers().x)
    assert len(numbers) == 2


# Start-up files ------------------------------------------------------------------------------------------------


def test_flower_reads_what_a_device_is_told(made: Path) -> None:
    assert parse_config_args([str(made / "oslo" / "node.toml")]) == {
        "name": "oslo", "data-path": "/srv/my data/$x.npz",
    }  # fmt: skip


def test_partitions_instead_of_data(tmp_path: Path) -> None:
    assert deploy("init", tmp_path / "d", *HOSTS, "--partitions", 3).exit_code == 0
    told = [parse_config_args([str(tmp_path / "d" / f"device-{part}" / "node.toml")]) for part in range(3)]
    assert told == [
        {"name": f"device-{part}", "partition-id": part, "num-partitions": 3} for part in range(3)
    ]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd")
def test_systemd_accepts_the_units(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / ".venv").symlink_to(Path(sys.executable).parents[1])
    assert deploy("init", tmp_path / "d", *HOSTS, *DEVICES, "--home", home).exit_code == 0
    units = sorted((tmp_path / "d").glob("*/*.service"))
    assert [unit.name for unit in units] == [
        "fedapp-bern.service", "fedapp-oslo.service", "fedapp-superexec.service", "fedapp-superlink.service",
    ]  # fmt: skip
    command = ["systemd-analyze", "verify", "--man=no", *map(str, units)]
    done = subprocess.run(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    newer = ("RestartSteps", "RestartMaxDelaySec")  # keys that systemd knows from 254 on
    complaints = [line for line in done.stdout.splitlines() if not any(key in line for key in newer)]
    assert [line for line in complaints if "fedapp-" in line] == []


def test_units_and_compose_start_the_same_commands(made: Path) -> None:
    deployment = read_deployment(made)
    services = yaml.safe_load((made / "compose.yaml").read_text())["services"]
    commands = {
        "superlink": deployment.superlink_command(),
        "superexec": deployment.superexec_command(),
        **{device.name: deployment.supernode_command(device) for device in deployment.devices},
    }
    assert {name: service["command"] for name, service in services.items()} == commands
    for name, command in commands.items():
        folder = made / ("superlink" if name == "superexec" else name)
        unit = (folder / f"fedapp-{name}.service").read_text().replace(" \\\n ", "")
        assert f"ExecStart=/opt/fedapp/.venv/bin/{' '.join(command)}\n" in unit
    # Data is mounted where the device has it, for reading only; $ is doubled for compose.
    assert services["oslo"]["volumes"][1] == {
        "type": "bind", "source": "/srv/my data/$$x.npz", "target": "/srv/my data/$$x.npz", "read_only": True,
    }  # fmt: skip


# What is there already -----------------------------------------------------------------------------------------


def test_nothing_is_overwritten_but_by_force(tmp_path: Path) -> None:
    out = tmp_path / "d"
    assert deploy("init", out, *HOSTS, *DEVICES).exit_code == 0
    before = contents(out)
    again = deploy("init", out, *HOSTS, *DEVICES)
    assert again.exit_code == 1
    assert again.output.startswith(
        f"error: {out}: holds a deployment already, and its keys are kept; --force"
    )
    assert contents(out) == before
    assert deploy("init", out, *HOSTS, *DEVICES, "--force").exit_code == 0
    changed = {name for name, content in contents(out).items() if content != before[name]}
    assert changed >= {"ca.key", "ca.crt", "superlink/server.key", "oslo/device.key", "bern/device.pub"}


def test_force_removes_no_folder_that_is_no_deployment(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    result = deploy("init", tmp_path, *HOSTS, *DEVICES, "--force")
    assert result.output.startswith(f"error: {tmp_path}: is there already and is no deployment")
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


def test_a_device_is_added_and_the_others_keep_what_they_have(tmp_path: Path) -> None:
    out = tmp_path / "d"
    deploy("init", out, *HOSTS, *DEVICES)
    before = contents(out)
    assert deploy("add", out, "lima=/data/lima.npz").exit_code == 0
    after = contents(out)
    assert {name for name in after if after[name] != before.get(name)} == {
        "audit.jsonl", "deployment.toml", "compose.yaml", "lima/ca.crt", "lima/device.key", "lima/device.pub",
        "lima/node.toml", "lima/fedapp-lima.service",
    }  # fmt: skip
    assert after["lima/ca.crt"] == before["ca.crt"]
    ports = [device["port"] for device in tomllib.loads(after["deployment.toml"].decode())["devices"]]
    assert ports == [9094, 9095, 9096]
    again = deploy("add", out, "lima=/data/lima.npz")
    assert again.output == "error: --device 'lima': is there twice; names must differ\n"
    assert {**contents(out), "audit.jsonl": b""} == {**after, "audit.jsonl": b""}


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (DEVICES, "--host: at least one"),
        (("--host", "http://x", *DEVICES), "--host 'http://x': must be a host name or an IP address"),
        (HOSTS, "--device and --partitions: give one of the two"),
        ((*HOSTS, *DEVICES, "--partitions", 2), "--device and --partitions: give one of the two"),
        ((*HOSTS, "--device", "oslo"), "--device 'oslo': must be NAME=DATA-PATH"),
        ((*HOSTS, "--device", "oslo=a.npz"), "--device 'oslo=a.npz': the data-path must be absolute"),
        ((*HOSTS, "--device", "../x=/a"), "--device '../x': a name is 1 to 63 of a-z, 0-9 and -"),
        ((*HOSTS, "--device", "superlink=/a"), "--device 'superlink': a name is"),
        ((*HOSTS, "--device", "a=/a", "--device", "a=/b"), "--device 'a': is there twice"),
        ((*HOSTS, *DEVICES, "--port", 0), "--port = 0: must be 1 to 65535"),
        ((*HOSTS, *DEVICES, "--home", "opt"), "--home = 'opt': must be an absolute path"),
        ((*HOSTS, *DEVICES, "--home", "/opt/$x"), "--home = '/opt/$x': must be an absolute path"),
    ],
)
def test_a_wrong_option_is_one_line_and_nothing_is_written(
    arguments: tuple[object, ...], text: str, tmp_path: Path
) -> None:
    result = deploy("init", tmp_path / "d", *arguments)
    assert result.exit_code == 1
    assert result.output.startswith(f"error: {text}")
    assert len(result.output.splitlines()) == 1
    assert not (tmp_path / "d").exists()


def test_add_and_register_want_a_deployment(tmp_path: Path) -> None:
    for arguments in (("add", tmp_path, "a=/a"), ("register", tmp_path)):
        result = deploy(*arguments)
        assert result.output == f"error: {tmp_path}: holds no deployment; 'fedapp deploy init' makes one\n"


# The app bundle ------------------------------------------------------------------------------------------------


def test_no_key_is_in_the_app_bundle(repository: Path, tmp_path: Path) -> None:
    source = tmp_path / "app"
    for folder in ("fedapp", "strategies", "custom"):
        shutil.copytree(repository / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(repository / name, source)
    for out in (source / "deployment", source / "fedapp" / "keys"):  # even in the worst place
        assert deploy("init", out, *HOSTS, *DEVICES).exit_code == 0
    command = [str(Path(sys.executable).parent / "flwr"), "build"]
    subprocess.run(command, cwd=source, check=True, stdout=subprocess.DEVNULL)
    (bundle,) = source.glob("*.fab")
    secret = (source / "deployment" / "superlink" / "superexec.secret").read_bytes()
    with zipfile.ZipFile(bundle) as archive:
        assert "fedapp/client_app.py" in archive.namelist()
        for name in archive.namelist():
            assert not name.startswith(("deployment/", "fedapp/keys/")), name
            content = archive.read(name)
            assert b"BEGIN OPENSSH PRIVATE" not in content, name
            assert b"BEGIN PRIVATE" not in content, name
            assert secret not in content, name
