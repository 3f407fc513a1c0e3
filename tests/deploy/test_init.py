"""``fedapp deploy init``: what it writes, read by the programs that will read it."""

import os
import shutil
import stat
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key
from cryptography.x509.oid import ExtendedKeyUsageOID
from flwr.common.config import parse_config_args

from tests.deploy.command import contents, deploy, shake_hands

HOSTS = ("--host", "fl.example.org", "--host", "10.0.0.5")
DEVICES = ("--device", "oslo=/srv/my data/$x.npz", "--device", "bern=/data/images")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A deployment for two devices with data of their own."""
    out = tmp_path_factory.mktemp("made") / "deployment"
    result = deploy("init", out, *HOSTS, *DEVICES)
    assert result.exit_code == 0, result.output
    return out


# Keys and certificates ---------------------------------------------------------------------------------------


def test_private_keys_are_for_their_owner_alone_and_nothing_else_is_private(made):
    private = {name for name, content in contents(made).items() if b"PRIVATE KEY" in content}
    assert private == {
        "ca.key",
        "operator.key",
        "superlink/server.key",
        "oslo/device.key",
        "oslo/local.key",
        "bern/device.key",
        "bern/local.key",
    }
    secrets = {name: content for name, content in contents(made).items() if name.endswith(".secret")}
    for name in (*private, *secrets):
        assert stat.S_IMODE((made / name).stat().st_mode) == 0o600, name
    # Each machine has a secret of its own, twice: for each of its two users.
    for machine in ("superlink", "oslo", "bern"):
        first, second = f"{machine}/superexec.secret", f"{machine}/superexec/superexec.secret"
        assert secrets.pop(first) == secrets.pop(second) not in secrets.values()
    assert not secrets
    # A machine gets its own secrets only: the authority's key is in no folder that is copied.
    assert (made / ".gitignore").read_text() == "*\n"


def test_the_folder_of_the_user_who_runs_the_code_of_runs_has_no_key(made):
    files = {str(path.relative_to(made)) for path in made.glob("*/superexec/**/*")}
    assert files == {f"{machine}/superexec/superexec.secret" for machine in ("superlink", "oslo", "bern")}


def test_certificates_are_each_good_for_one_thing(made):
    """A server's opens no control port, and the operator's makes no server."""
    good = {
        name: x509.load_pem_x509_certificate((made / name).read_bytes())
        .extensions.get_extension_for_class(x509.ExtendedKeyUsage)
        .value
        for name in ("operator.crt", "superlink/server.crt", "oslo/local.crt")
    }
    assert good == {
        "operator.crt": x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH]),
        "superlink/server.crt": x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]),
        "oslo/local.crt": x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]),
    }


def test_what_only_a_device_uses_needs_no_renewal(made):
    ends = {
        name: x509.load_pem_x509_certificate((made / name).read_bytes()).not_valid_after_utc
        for name in ("ca.crt", "superlink/server.crt", "oslo/local.crt")
    }
    assert ends["oslo/local.crt"] >= ends["ca.crt"] > ends["superlink/server.crt"]


def test_a_superexec_knows_its_supernode_and_no_other(made):
    own = made / "oslo" / "local.crt"
    assert shake_hands(made, "127.0.0.1", own, server=own) is None
    for other in (made / "bern" / "local.crt", made / "superlink" / "server.crt"):
        assert "CERTIFICATE_VERIFY_FAILED" in str(shake_hands(made, "127.0.0.1", own, server=other))


@pytest.mark.parametrize("name", ["fl.example.org", "10.0.0.5", "localhost", "127.0.0.1"])
def test_a_client_that_trusts_the_authority_accepts_the_server_under_each_of_its_names(made, name):
    assert shake_hands(made, name) is None


def test_a_client_refuses_the_server_under_another_name_and_without_the_authority(made, tmp_path):
    assert "mismatch" in str(shake_hands(made, "other.example.org"))
    assert deploy("init", tmp_path / "else", *HOSTS, *DEVICES).exit_code == 0
    assert "CERTIFICATE_VERIFY_FAILED" in str(shake_hands(made, "10.0.0.5", tmp_path / "else" / "ca.crt"))


def test_device_keys_are_what_flower_reads_and_differ(made):
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


def test_flower_reads_what_a_device_is_told(made):
    assert parse_config_args([str(made / "oslo" / "node.toml")]) == {
        "name": "oslo",
        "data-path": "/srv/my data/$x.npz",
        "state-path": "/opt/fedapp/oslo/superexec/state",
    }


def test_partitions_instead_of_data(tmp_path):
    assert deploy("init", tmp_path / "d", *HOSTS, "--partitions", 3).exit_code == 0
    told = [parse_config_args([str(tmp_path / "d" / f"device-{part}" / "node.toml")]) for part in range(3)]
    assert told == [
        {
            "name": f"device-{part}",
            "partition-id": part,
            "num-partitions": 3,
            "state-path": f"/opt/fedapp/device-{part}/superexec/state",
        }
        for part in range(3)
    ]


# What is there already -----------------------------------------------------------------------------------------


def test_nothing_is_overwritten_but_by_force(tmp_path):
    out = tmp_path / "d"
    assert deploy("init", out, *HOSTS, *DEVICES).exit_code == 0
    before = contents(out)
    again = deploy("init", out, *HOSTS, *DEVICES)
    assert again.exit_code == 1
    assert again.output.startswith(
        f"error: {out}: holds a deployment already, and its keys are kept; 'fedapp"
    )
    assert contents(out) == before
    assert deploy("init", out, *HOSTS, *DEVICES, "--force").exit_code == 0
    changed = {name for name, content in contents(out).items() if content != before[name]}
    assert changed >= {"ca.key", "ca.crt", "superlink/server.key", "oslo/device.key", "bern/device.pub"}


def test_force_removes_no_folder_that_is_no_deployment(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    result = deploy("init", tmp_path, *HOSTS, *DEVICES, "--force")
    assert result.output.startswith(f"error: {tmp_path}: is there already and is no deployment")
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


def test_a_device_is_added_and_the_others_keep_what_they_have(tmp_path):
    out = tmp_path / "d"
    deploy("init", out, *HOSTS, *DEVICES)
    before = contents(out)
    assert deploy("add", out, "lima=/data/lima.npz").exit_code == 0
    after = contents(out)
    assert {name for name in after if after[name] != before.get(name)} == {
        "audit.jsonl",
        "deployment.toml",
        "compose.yaml",
        "lima/ca.crt",
        "lima/device.key",
        "lima/device.pub",
        "lima/local.crt",
        "lima/local.key",
        "lima/superexec.secret",
        "lima/superexec/superexec.secret",
        "lima/node.toml",
        "lima/start.sh",
        "lima/fedapp-lima.service",
        "lima/fedapp-lima-superexec.service",
        "lima/fedapp-lima-worker.service",
    }
    assert after["lima/ca.crt"] == before["ca.crt"]
    ports = [device["port"] for device in tomllib.loads(after["deployment.toml"].decode())["devices"]]
    assert ports == [9094, 9095, 9096]
    again = deploy("add", out, "lima=/data/lima.npz")
    assert again.output == "error: --device 'lima': is there twice; names must differ\n"
    assert {**contents(out), "audit.jsonl": b""} == {**after, "audit.jsonl": b""}


def test_a_device_whose_adding_was_interrupted_is_added_again(tmp_path, monkeypatch):
    out = tmp_path / "d"
    deploy("init", out, *HOSTS, *DEVICES)
    plan = (out / "deployment.toml").read_bytes()

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("fedapp.deploy.files.write_startup", killed)
        deploy("add", out, "lima=/data/lima.npz")
    assert (out / "deployment.toml").read_bytes() == plan
    left = contents(out / "lima")
    added = deploy("add", out, "lima=/data/lima.npz")
    assert added.exit_code == 0, added.output
    made = contents(out / "lima")
    assert {name for name in left if made[name] == left[name]} == {"ca.crt"}  # the authority's
    assert set(made) - set(left) == {
        "node.toml",
        "start.sh",
        "fedapp-lima.service",
        "fedapp-lima-superexec.service",
        "fedapp-lima-worker.service",
    }
    assert stat.S_IMODE((out / "lima" / "device.key").stat().st_mode) == 0o600


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (DEVICES, "--host: at least one"),
        (
            ("--host", "10.0.0.300", *DEVICES),
            "--host '10.0.0.300': is no IP address; four numbers from 0 to 255",
        ),
        (("--host", "fl.example.org", "--host", "10.0.5", *DEVICES), "--host '10.0.5': is no IP address"),
        (("--host", "http://x", *DEVICES), "--host 'http://x': must be a host name or an IP address"),
        (HOSTS, "--device, --partitions and --relay: give one of them"),
        ((*HOSTS, *DEVICES, "--partitions", 2), "--device, --partitions and --relay: give one of them"),
        ((*HOSTS, "--device", "oslo"), "--device 'oslo': must be NAME=DATA-PATH"),
        ((*HOSTS, "--device", "oslo=a.npz"), "--device 'oslo=a.npz': the data-path must be absolute"),
        ((*HOSTS, "--device", "oslo=/a\nb"), r"--device 'oslo=/a\nb': the data-path must be printable"),
        ((*HOSTS, "--device", "oslo=/a\0b"), r"--device 'oslo=/a\x00b': the data-path must be printable"),
        ((*HOSTS, "--device", "../x=/a"), "--device '../x': a name is 1 to 63 of a-z, 0-9 and -"),
        ((*HOSTS, "--device", "superlink=/a"), "--device 'superlink': a name is"),
        ((*HOSTS, "--device", "oslo-superexec=/a"), "--device 'oslo-superexec': a name is"),
        ((*HOSTS, *DEVICES, "--port", 9093), "--port = 9093: is the SuperLink's own behind the proxy"),
        ((*HOSTS, "--device", "a=/a", "--device", "a=/b"), "--device 'a': is there twice"),
        ((*HOSTS, *DEVICES, "--port", 0), "--port = 0: must be 1 to 65535"),
        ((*HOSTS, *DEVICES, "--home", "opt"), "--home = 'opt': must be an absolute path"),
        ((*HOSTS, *DEVICES, "--home", "/opt/$x"), "--home = '/opt/$x': must be an absolute path"),
    ],
)
def test_a_wrong_option_is_one_line_and_nothing_is_written(arguments, text, tmp_path):
    result = deploy("init", tmp_path / "d", *arguments)
    assert result.exit_code == 1
    assert result.output.startswith(f"error: {text}")
    assert len(result.output.splitlines()) == 1
    assert not (tmp_path / "d").exists()


def test_nothing_is_writable_by_others_whatever_the_umask(tmp_path):
    before = os.umask(0)
    try:
        assert deploy("init", tmp_path / "d", *HOSTS, *DEVICES).exit_code == 0
        assert deploy("add", tmp_path / "d", "lima=/a.npz").exit_code == 0
        assert os.umask(0) == 0
    finally:
        os.umask(before)
    written = [path for path in (tmp_path / "d").rglob("*") if path.name not in ("audit.jsonl", "audit.seal")]
    assert (tmp_path / "d" / "lima" / "fedapp-lima.service") in written
    assert [path for path in written if path.stat().st_mode & 0o022] == []


def test_add_and_register_want_a_deployment(tmp_path):
    for arguments in (("add", tmp_path, "a=/a"), ("register", tmp_path)):
        result = deploy(*arguments)
        assert result.output == f"error: {tmp_path}: holds no deployment; 'fedapp deploy init' makes one\n"


# The app bundle ------------------------------------------------------------------------------------------------


def test_no_key_is_in_the_app_bundle(repository, tmp_path):
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
