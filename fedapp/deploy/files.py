"""A deployment in a folder: ``deployment.toml`` says what it is, and everything else there follows from it.

OUT/
  deployment.toml      hosts, port, install folder, devices
  ca.key               signs certificates: keep it, copy it nowhere
  operator.crt, .key   let the first operator through the proxy, who may do all
  operators.json       the other operators, their roles and certificates, and who was removed
  operators/NAME/      to that operator: certificate, and key unless the operator made it, and what names the server
  flower/config.toml   FLWR_HOME of whoever starts runs, where there is no proxy
  compose.yaml         the same in containers
  kubernetes/          the same as Pods, with `--for kubernetes`
  ansible/             a play that installs the devices, with `--for ansible`
  grafana.json         a dashboard of what runs tell Prometheus
  proxy/               to the server: nginx and Caddy in front of the SuperLink
  superlink/           to the server: certificate, keys, units of SuperLink and SuperExec
    superexec/         the folder of the user who runs the code of runs
  NAME/                to that device: CA certificate, keys, node.toml, units of its SuperNode and SuperExec;
                       a relay's to its region's server; request.json in place of the keys that a device made itself
    superexec/         as on the server
  nodes.json           which node of the SuperLink is which device
  audit.jsonl          who changed what, and when
  audit.seal           its last signed line
  removed/             folders of devices and operators that were removed
"""

import shutil
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path

import tomli_w
from cryptography.hazmat.primitives.serialization import Encoding

from fedapp.deploy import audit, key_request, keys, nodes
from fedapp.deploy.certificates import read_authority
from fedapp.deploy.dashboard import dashboard
from fedapp.deploy.operators.records import FOLDER as OPERATORS
from fedapp.deploy.operators.records import Operators
from fedapp.deploy.orchestration import by_hand
from fedapp.deploy.orchestration.ansible import FOLDER as ANSIBLE
from fedapp.deploy.orchestration.ansible import ansible_files
from fedapp.deploy.orchestration.compose import compose_file
from fedapp.deploy.orchestration.kubernetes import FOLDER as KUBERNETES
from fedapp.deploy.orchestration.kubernetes import kubernetes_files
from fedapp.deploy.plan import (
    LOOPBACK,
    NODE_CONFIG,
    PLAN,
    SUPEREXEC,
    DeployError,
    Deployment,
    Device,
    is_operators,
)
from fedapp.deploy.proxy import caddy_unit, caddyfile, nginx_site
from fedapp.deploy.startup import unit_file

CONNECTION = "deployment"  # name of the SuperLink in Flower's config.toml
NGINX = "proxy/nginx.conf"
_MADE_FOLDERS = ("proxy", "flower", KUBERNETES, ANSIBLE)  # the other folders have keys, and are there
REMOVED = "removed"  # folder of the folders of removed devices


@keys.written_by_owner_alone()
def write_deployment(out: Path, deployment: Deployment, *, force: bool = False) -> None:
    """Make a new deployment: keys, certificates and start-up files.

    Raises
    ------
    DeployError
        If `out` is there already and not empty; `force` replaces a deployment, its keys and authority included.
    """
    startup_files(out, deployment)  # raises the error before anything is written
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        if not (out / PLAN).is_file():
            raise DeployError(f"{out}: is there already and is no deployment; choose another folder")
        if not force:
            raise DeployError(
                f"{out}: holds a deployment already, and its keys are kept; 'fedapp deploy init --force' replaces "
                "them, 'fedapp deploy add' adds a device"
            )
        _clear(out)
    server = out / "superlink"
    try:
        (server / SUPEREXEC).mkdir(parents=True)
    except OSError as error:
        raise DeployError(f"{out}: can't be made a folder ({error.strerror})") from None
    (out / ".gitignore").write_text("*\n")  # private keys stay out of repositories
    authority = keys.write_authority(out)
    keys.write_server(server, authority, [*deployment.hosts, "localhost", LOOPBACK])
    keys.write_secret(server, server / SUPEREXEC)
    if deployment.backend:
        keys.write_operator(out, authority)
    for device in deployment.devices:
        _write_device_keys(out, device)
    write_startup(out, deployment)


@keys.written_by_owner_alone()
def add_device(
    out: Path,
    name: str,
    node_config: dict[str, int | str],
    request: key_request.KeyRequest | None = None,
) -> Deployment:
    """Add a device to a deployment, and return the deployment; the other devices' keys stay.

    With the ``request`` of a device that made its keys itself, no private key is made here.

    Raises
    ------
    DeployError
        If `out` holds no deployment, or has a device of this name.
    """
    deployment = read_deployment(out)
    device = Device(name, node_config, max(d.port for d in deployment.devices) + 1)
    deployment = replace(deployment, devices=(*deployment.devices, device))
    startup_files(out, deployment)  # raises the error before anything is written
    _write_device_keys(out, device, request)
    write_startup(out, deployment)
    return deployment


def add_requested(out: Path, request: key_request.KeyRequest) -> tuple[str, Deployment]:
    """Add a device that made its keys itself; return its name and the deployment.

    Raises
    ------
    DeployError
        If `out` holds no deployment, or the device's name or key is that of another, or its node config is wrong.
    """
    deployment = read_deployment(out)
    name, node_config = request.read_device(deployment.home)
    if name in [device.name for device in deployment.devices]:
        raise DeployError(
            f"the request's device {name!r}: {out} has a device of this name; 'fedapp deploy rekey --request' gives "
            "it another key"
        )
    request.check_unknown(out, deployment)
    return name, add_device(out, name, node_config, request)


@keys.written_by_owner_alone()
def remove_device(out: Path, name: str) -> Path:
    """Take a device out of a deployment, and return where its folder is now; the other devices' keys stay.

    Raises
    ------
    DeployError
        If `out` holds no deployment, or the deployment has no device of this name or no other device.
    """
    deployment = without_device(out, name)
    moved = out / REMOVED / f"{name}-{datetime.now(UTC):%Y%m%dT%H%M%S%fZ}"
    moved.parent.mkdir(exist_ok=True)
    write_startup(out, deployment)
    (out / name).rename(moved)
    shutil.rmtree(out / KUBERNETES / name, ignore_errors=True)
    return moved


def without_device(out: Path, name: str) -> Deployment:
    """Return a folder's deployment without one of its devices; nothing is written."""
    deployment = read_deployment(out)
    return replace(
        deployment, devices=tuple(d for d in deployment.devices if d is not deployment.device(name))
    )


def read_deployment(out: Path) -> Deployment:
    """Read a deployment back from its folder."""
    try:
        return deployment_of((out / PLAN).read_bytes(), str(out / PLAN))
    except FileNotFoundError:
        raise DeployError(f"{out}: holds no deployment; 'fedapp deploy init' makes one") from None
    except OSError as error:
        raise DeployError(f"{out / PLAN}: can't be read ({error})") from None


def deployment_of(content: bytes, where: str) -> Deployment:
    """Return the deployment that a ``deployment.toml`` describes; ``where`` is the file's name in an error."""
    try:
        read = tomllib.loads(content.decode())
        devices = tuple(Device(**device) for device in read.pop("devices"))
        orchestrators = tuple(read.pop("orchestrators", ()))
        return Deployment(tuple(read.pop("hosts")), devices=devices, orchestrators=orchestrators, **read)
    except (ValueError, TypeError, KeyError) as error:
        raise DeployError(f"{where}: can't be read ({error})") from None


def write_startup(out: Path, deployment: Deployment) -> None:
    """Write everything but keys and certificates.

    Raises
    ------
    DeployError
        If a file can't be written, such as that of a device whose folder is gone.
    """
    _write(out, startup_files(out, deployment))


def startup_files(out: Path, deployment: Deployment) -> dict[str, str]:
    """Return the text of each file but keys and certificates, by its path below `out`; nothing is written.

    Raises
    ------
    DeployError
        If an orchestrator can't have one of the devices, or `out` is an operator's folder.
    """
    if is_operators(out):
        raise DeployError(f"{out}: is an operator's folder, and only the deployment's own can be changed")
    texts = {
        PLAN: tomli_w.dumps(asdict(deployment)),
        "compose.yaml": compose_file(deployment),
        "grafana.json": dashboard(),
    }
    texts |= _way_in(out, deployment)
    for folder in sorted(out.glob(f"{OPERATORS}/*/{PLAN}")):
        texts |= operator_files(out, deployment, f"{OPERATORS}/{folder.parent.name}/")
    configs = {device.name: _node_config(deployment, device) for device in deployment.devices}
    texts |= {f"{name}/{NODE_CONFIG}": text for name, text in configs.items()}
    for machine in ("superlink", *configs):
        texts[f"{machine}/{by_hand.FILE}"] = by_hand.start_script(deployment, machine)
    for service in deployment.services:
        texts[f"{service.machine}/fedapp-{service.name}.service"] = unit_file(deployment, service)
    if KUBERNETES in deployment.orchestrators:
        texts |= kubernetes_files(deployment, texts.get(NGINX, ""), configs)
    if ANSIBLE in deployment.orchestrators:
        texts |= ansible_files(deployment)
    return texts


def operator_files(out: Path, deployment: Deployment, below: str = "") -> dict[str, str]:
    """Return what an operator's folder has beside the certificate: the plan, and which node is which device."""
    texts = {f"{below}{PLAN}": tomli_w.dumps(asdict(deployment))}
    if (out / nodes.FILE).is_file():
        texts[f"{below}{nodes.FILE}"] = (out / nodes.FILE).read_text("utf-8")
    return texts


def _write(out: Path, texts: Mapping[str, str]) -> None:
    try:
        for name, text in texts.items():
            if Path(name).parts[0] in _MADE_FOLDERS:
                (out / name).parent.mkdir(parents=True, exist_ok=True)
            (out / name).write_text(text, "utf-8")
    except OSError as error:
        raise DeployError(f"{error.filename or out}: can't be written ({error.strerror})") from None


def _node_config(deployment: Deployment, device: Device) -> str:
    # A client's state of a run outlives its SuperNode in this folder (fedapp/client/kept.py).
    state = f"{deployment.home}/{device.name}/{SUPEREXEC}/state"
    return tomli_w.dumps({"name": device.name, **device.node_config, "state-path": state})


def _way_in(out: Path, deployment: Deployment) -> dict[str, str]:
    """Return the files by which whoever starts runs reaches the SuperLink: the proxy's, or Flower's config.toml."""
    if deployment.backend:
        operators = Operators.read(out)
        return {
            NGINX: nginx_site(deployment, operators),
            "proxy/Caddyfile": caddyfile(deployment, operators),
            "proxy/caddy.conf": caddy_unit(deployment),
        }
    trust = {"root-certificates": str((out / "ca.crt").absolute())}
    return {"flower/config.toml": flower_config(deployment.address, trust)}


def _clear(out: Path) -> None:
    """Remove all files of a deployment but its audit."""
    for path in out.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name not in (audit.FILE, audit.SEAL):
            path.unlink()


def _write_device_keys(out: Path, device: Device, request: key_request.KeyRequest | None = None) -> None:
    folder, authority = out / device.name, read_authority(out)
    # An interrupted `add` or `remove` leaves a folder of no device; all that is written in it is written anew.
    (folder / SUPEREXEC).mkdir(parents=True, exist_ok=True)
    if request is None:
        (folder / key_request.FILE).unlink(missing_ok=True)
        keys.write_own(folder, folder / SUPEREXEC)
    else:
        key_request.write_public_key(folder, request)
    (folder / "ca.crt").write_bytes(authority.public_bytes(Encoding.PEM))


def flower_config(address: str, trust: Mapping[str, str | bool]) -> str:
    """Return Flower's config.toml with one SuperLink; ``trust`` has Flower's keys that say how TLS is checked."""
    return tomli_w.dumps({"superlink": {"default": CONNECTION, CONNECTION: {"address": address, **trust}}})
