"""A deployment in a folder: ``deployment.toml`` says what it is, and everything else there follows from it.

OUT/
  deployment.toml      hosts, port, install folder, devices
  ca.key               signs server certificates: keep it, copy it nowhere
  flower/config.toml   FLWR_HOME of whoever starts runs
  compose.yaml         the same in containers
  superlink/           to the server: certificate, keys, units of SuperLink and SuperExec
  NAME/                to that device: CA certificate, key pair, node.toml, unit of its SuperNode
  nodes.json           which node of the SuperLink is which device
  audit.jsonl          who changed what, and when
  removed/             folders of devices that were removed
"""

import shutil
import tomllib
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import tomli_w

from fedapp.deploy import audit, keys
from fedapp.deploy.plan import LOOPBACK, DeployError, Deployment, Device
from fedapp.deploy.startup import compose_file, unit_file

CONNECTION = "deployment"  # name of the SuperLink in Flower's config.toml
REMOVED = "removed"  # folder of what devices had that are no longer part of it


def write_deployment(out: Path, deployment: Deployment, *, force: bool = False) -> None:
    """Make a new deployment: keys, certificates and start-up files.

    Raises
    ------
    DeployError
        If `out` is there already and not empty; `force` replaces a deployment, its keys and authority included.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        if not (out / "deployment.toml").is_file():
            raise DeployError(f"{out}: is there already and is no deployment; choose another folder")
        if not force:
            raise DeployError(
                f"{out}: holds a deployment already, and its keys are kept; --force replaces them, "
                "'fedapp deploy add' adds a device"
            )
        _clear(out)
    try:
        (out / "superlink").mkdir(parents=True)
    except OSError as error:
        raise DeployError(f"{out}: can't be made a folder ({error.strerror})") from None
    (out / ".gitignore").write_text("*\n")  # private keys stay out of repositories
    keys.write_server(
        out / "superlink", keys.write_authority(out), [*deployment.hosts, "localhost", LOOPBACK]
    )
    for device in deployment.devices:
        _write_device_keys(out, device)
    write_startup(out, deployment)


def add_device(out: Path, name: str, node_config: dict[str, int | str]) -> Deployment:
    """Add a device to a deployment, and return it; what the others have stays as it is.

    Raises
    ------
    DeployError
        If `out` holds no deployment, or has a device of this name.
    """
    deployment = read_deployment(out)
    device = Device(name, node_config, max(d.port for d in deployment.devices) + 1)
    deployment = replace(deployment, devices=(*deployment.devices, device))
    _write_device_keys(out, device)
    write_startup(out, deployment)
    return deployment


def remove_device(out: Path, name: str) -> Path:
    """Take a device out of a deployment, and return where its folder is now; what the others have stays as it is.

    Raises
    ------
    DeployError
        If `out` holds no deployment, it has no device of this name, or no other one.
    """
    deployment = without_device(out, name)
    moved = out / REMOVED / f"{name}-{datetime.now(UTC):%Y%m%dT%H%M%S%fZ}"
    moved.parent.mkdir(exist_ok=True)
    write_startup(out, deployment)
    (out / name).rename(moved)
    return moved


def without_device(out: Path, name: str) -> Deployment:
    """Read a deployment, and return what it is without a device."""
    deployment = read_deployment(out)
    return replace(
        deployment, devices=tuple(d for d in deployment.devices if d is not deployment.device(name))
    )


def read_deployment(out: Path) -> Deployment:
    """Read a deployment back from its folder."""
    try:
        content = tomllib.loads((out / "deployment.toml").read_text("utf-8"))
        devices = tuple(Device(**device) for device in content.pop("devices"))
        return Deployment(hosts=tuple(content.pop("hosts")), devices=devices, **content)
    except FileNotFoundError:
        raise DeployError(f"{out}: holds no deployment; 'fedapp deploy init' makes one") from None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise DeployError(f"{out / 'deployment.toml'}: can't be read ({error})") from None


def write_startup(out: Path, deployment: Deployment) -> None:
    """Write everything but keys and certificates."""
    content: dict[str, Any] = asdict(deployment)
    (out / "deployment.toml").write_text(tomli_w.dumps(content), "utf-8")
    (out / "compose.yaml").write_text(compose_file(deployment), "utf-8")
    (out / "flower").mkdir(exist_ok=True)
    (out / "flower" / "config.toml").write_text(_flower_config(out, deployment), "utf-8")
    own = f"{deployment.home}/superlink"
    for name, command, after in (
        ("superlink", deployment.superlink_command(), "network-online.target"),
        ("superexec", deployment.superexec_command(), "fedapp-superlink.service"),
    ):
        unit = unit_file(f"Flower {name} of fedapp", command, deployment.home, own, after)
        (out / "superlink" / f"fedapp-{name}.service").write_text(unit, "utf-8")
    for device in deployment.devices:
        folder, own = out / device.name, f"{deployment.home}/{device.name}"
        (folder / "node.toml").write_text(tomli_w.dumps({"name": device.name, **device.node_config}), "utf-8")
        unit = unit_file(
            f"Flower SuperNode {device.name} of fedapp",
            deployment.supernode_command(device),
            deployment.home,
            own,
            "network-online.target",
        )
        (folder / f"fedapp-{device.name}.service").write_text(unit, "utf-8")


def _clear(out: Path) -> None:
    """Remove a deployment, all but the record of who did what."""
    for path in out.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != audit.FILE:
            path.unlink()


def _write_device_keys(out: Path, device: Device) -> None:
    folder = out / device.name
    folder.mkdir()
    keys.write_device(folder)
    shutil.copyfile(out / "ca.crt", folder / "ca.crt")


def _flower_config(out: Path, deployment: Deployment) -> str:
    connection = {"address": deployment.address, "root-certificates": str((out / "ca.crt").absolute())}
    return tomli_w.dumps({"superlink": {"default": CONNECTION, CONNECTION: connection}})
