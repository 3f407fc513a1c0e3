"""What a deployment is: a server, its devices, and the command line of every process."""

import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

LOOPBACK = "127.0.0.1"
HOME = "/opt/fedapp"  # folder of the app on every machine, by default
SUPERLINK_PORT = 9093  # of the SuperLink behind the proxy
FIRST_NODE_PORT = 9094  # of the first SuperNode's own API on loopback: Flower's default; the others follow
SUPEREXEC, WORKER = "superexec", "worker"
PLAN = "deployment.toml"
DATABASE, NODE_CONFIG = "superlink.db", "node.toml"
ORCHESTRATORS = ("kubernetes", "ansible")  # for which there are further start-up files
WORKER_COMMAND = ["python", "-P", "-m", "fedapp.worker.command"]  # fedapp-worker, whatever else is installed
_RESERVED = ("superlink", SUPEREXEC, "proxy", "flower", "cache", "removed", "operators", *ORCHESTRATORS)
_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")
_HOST = re.compile(
    r"(?=.{1,253}$)[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?(\.[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?)*"
)


class DeployError(ValueError):
    """A deployment can't be made or run as asked; the message is one line."""


@dataclass(frozen=True)
class Device:
    """A device: its name, node config (`data-path`, or `partition-id` and `num-partitions`) and SuperNode's port.

    A relay, which answers for all devices of another deployment, has `relay` in its node config: the path of a socket
    on its region's server.
    """

    name: str
    node_config: dict[str, int | str]
    port: int

    @property
    def socket(self) -> str:
        """The socket of a relay's region; empty for a device."""
        return str(self.node_config.get("relay", ""))


@dataclass(frozen=True)
class Service:
    """A process that a machine keeps running.

    Attributes
    ----------
    name : str
        ``superlink``, ``superexec``; ``oslo``, ``oslo-superexec``, ``oslo-worker``.
    machine : str
        The machine's folder below the deployment's: ``superlink``, or a device's name.
    command : list of str
        Its command line; the program is in the environment's `bin`.
    runs_apps : bool
        Whether it is a SuperExec or a worker, in which the code of runs runs: as another user, in a folder within the
        machine's.
    data : str
        The path of a device's own data; empty if the run's config says what the data are.
    socket : str
        The socket of a relay's region; empty if it isn't a relay's.
    """

    name: str
    machine: str
    command: list[str]
    runs_apps: bool = False
    data: str = ""
    socket: str = ""

    @property
    def folder(self) -> str:
        """The folder that the process may write to, below the deployment's."""
        return f"{self.machine}/{SUPEREXEC}" if self.runs_apps else self.machine

    @property
    def is_server(self) -> bool:
        """Whether it is on the server."""
        return self.machine == "superlink"

    @property
    def is_worker(self) -> bool:
        """Whether it works for the processes that a device's SuperExec starts."""
        return self.name == f"{self.machine}-{WORKER}"

    @property
    def user(self) -> str:
        """The user that it runs as: the code of runs has one of its own."""
        return f"fedapp-{SUPEREXEC if self.runs_apps else 'superlink' if self.is_server else 'supernode'}"

    def environment(self, home: str, *, worker: bool = True) -> dict[str, str]:
        """Return its environment; ``worker`` says whether a device's code may ask the device's worker."""
        own = f"{home}/{self.folder}"
        variables = environment(own)
        if self.is_server and not self.runs_apps:
            variables["FEDAPP_RUNS"] = f"{own}/{SUPEREXEC}"  # whose runs it hands out
        if worker and self.runs_apps and not self.is_server and not self.socket:
            variables["FEDAPP_WORKER"] = f"{own}/{WORKER}.sock"
        return variables


@dataclass(frozen=True)
class Deployment:
    """The server, the devices, and where their files are.

    Attributes
    ----------
    hosts : tuple of str
        Host names and IP addresses of the server; devices connect to the first.
    port : int
        The server's port for devices and the operator: the proxy's, or the SuperLink's own if there is none.
    home : str
        Folder on every machine that holds `.venv` and the machine's own folder, `superlink` or the device's name.
    devices : tuple of Device
    backend : int
        The SuperLink's port on loopback, behind the proxy; 0 if there is no proxy.
    orchestrators : tuple of str
        Of ``ORCHESTRATORS``: what there are start-up files for, beside systemd and compose.
    """

    hosts: tuple[str, ...]
    port: int
    home: str
    devices: tuple[Device, ...]
    backend: int = 0
    orchestrators: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for orchestrator in self.orchestrators:
            if orchestrator not in ORCHESTRATORS:
                raise DeployError(f"--for {orchestrator!r}: must be one of {', '.join(ORCHESTRATORS)}")
        for host in self.hosts:
            _check_host(host)
        if not self.hosts:
            raise DeployError("--host: at least one host name or IP address of the server is needed")
        if not 1 <= self.port <= 65535:
            raise DeployError(f"--port = {self.port}: must be 1 to 65535")
        if self.port == self.backend:
            raise DeployError(f"--port = {self.port}: is the SuperLink's own behind the proxy; take another")
        names = [device.name for device in self.devices]
        for name in names:
            check_name(name)
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise DeployError(f"--device {twice[0]!r}: is there twice; names must differ")
        if not names:
            raise DeployError(
                "--device: at least one NAME=DATA-PATH is needed, or --partitions N, or --relay NAME"
            )
        sockets = [bool(device.socket) for device in self.devices]
        if any(sockets) and not all(sockets):
            raise DeployError(
                "--relay and --device: a deployment has relays alone or devices alone, as a run's clients are; give "
                "the devices a SuperLink and a relay of their own"
            )
        if any(sockets) and self.orchestrators:
            raise DeployError(
                f"--for {self.orchestrators[0]} and --relay: relays have files for systemd, and start.sh, "
                "alone"
            )

    @property
    def address(self) -> str:
        """The server's address for devices and the operator, HOST:PORT."""
        host = self.hosts[0]
        return f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"

    @property
    def has_relays(self) -> bool:
        """Whether its SuperNodes are relays of regions rather than devices."""
        return any(device.socket for device in self.devices)

    @property
    def superlink_address(self) -> str:
        """The SuperLink's address on the server itself."""
        return f"{LOOPBACK}:{self.backend or self.port}"

    def device(self, name: str) -> Device:
        """Return the device of a name.

        Raises
        ------
        DeployError
            If there is none.
        """
        for device in self.devices:
            if device.name == name:
                return device
        raise DeployError(f"device {name!r}: isn't one of {', '.join(d.name for d in self.devices)}")

    # ---- How its processes are started ------------------------------------------------------------------------

    @property
    def services(self) -> list[Service]:
        """All processes, the server's first."""
        found = [
            Service("superlink", "superlink", self.superlink_command()),
            Service(SUPEREXEC, "superlink", self.superexec_command(), runs_apps=True),
        ]
        for device in self.devices:
            data = str(device.node_config.get("data-path", ""))
            command, socket = self.node_superexec_command(device), device.socket
            found += [
                Service(device.name, device.name, self.supernode_command(device)),
                Service(f"{device.name}-{SUPEREXEC}", device.name, command, True, data, socket),
            ]
            if not socket:  # the region's run is a relay's worker
                found.append(Service(f"{device.name}-{WORKER}", device.name, WORKER_COMMAND, True, data))
        return found

    def superlink_command(self) -> list[str]:
        """Return the SuperLink's command line, with its state in a database.

        TLS on loopback, too: Flower wants it for node authentication, and a process that took the port while the
        SuperLink is away would learn nothing.
        """
        own, host = f"{self.home}/superlink", self.hosts[0]
        everywhere = "::" if ":" in host else "0.0.0.0"
        return [
            "python",
            "-P",
            "-m",
            "fedapp.deploy.superlink",
            "--host",
            LOOPBACK if self.backend or host == LOOPBACK else everywhere,
            "--port",
            str(self.backend or self.port),
            "--ssl-ca-certfile",
            f"{own}/ca.crt",
            "--ssl-certfile",
            f"{own}/server.crt",
            "--ssl-keyfile",
            f"{own}/server.key",
            "--enable-supernode-auth",
            "--database",
            f"{own}/{DATABASE}",
            "--isolation",
            "process",
            "--superexec-auth-secret-file",
            f"{own}/superexec.secret",
            "--disable-runtime-dependency-installation",
        ]

    def superexec_command(self) -> list[str]:
        """Return the command line of the SuperLink's SuperExec: the ServerApp's processes outlive the SuperLink."""
        return self._superexec("superlink", self.superlink_address, "ca.crt")

    def supernode_command(self, device: Device) -> list[str]:
        """Return the command line of a device's SuperNode; its own API is on loopback, for its SuperExec alone."""
        own = f"{self.home}/{device.name}"
        return [
            "python",
            "-P",
            "-m",
            "fedapp.deploy.supernode",
            "--superlink",
            self.address,
            "--root-certificates",
            f"{own}/ca.crt",
            "--auth-supernode-private-key",
            f"{own}/device.key",
            "--node-config",
            f"{own}/{NODE_CONFIG}",
            "--host",
            LOOPBACK,
            "--port",
            str(device.port),
            "--isolation",
            "process",
            "--ssl-ca-certfile",
            f"{own}/local.crt",
            "--ssl-certfile",
            f"{own}/local.crt",
            "--ssl-keyfile",
            f"{own}/local.key",
            "--superexec-auth-secret-file",
            f"{own}/superexec.secret",
        ]

    def node_superexec_command(self, device: Device) -> list[str]:
        """Return the command line of a SuperNode's SuperExec, which starts the ClientApp's processes."""
        return self._superexec(device.name, f"{LOOPBACK}:{device.port}", "local.crt")

    def _superexec(self, machine: str, address: str, certificate: str) -> list[str]:
        own = f"{self.home}/{machine}"
        return [
            "flower-superexec",
            "--runtime-api-address",
            address,
            "--root-certificates",
            f"{own}/{certificate}",
            "--superexec-auth-secret-file",
            f"{own}/{SUPEREXEC}/superexec.secret",
        ]


def environment(home: str) -> dict[str, str]:
    """Return the environment of Flower's processes on a machine: state in `home`, nothing installed at run time."""
    return {
        "FLWR_HOME": f"{home}/flower",
        "FEDAPP_CACHE": f"{home}/cache",
        "MPLCONFIGDIR": f"{home}/cache/matplotlib",
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    }


def devices_of(
    given: Sequence[str], partitions: int, relays: Sequence[str] = (), home: str = ""
) -> tuple[Device, ...]:
    """Make devices of `NAME=DATA-PATH` words, of the number of parts of the run's dataset, or of relays' names."""
    if (bool(given), bool(partitions), bool(relays)).count(True) != 1:
        raise DeployError("--device, --partitions and --relay: give one of them")
    named = [device_of(word) for word in given] + [relay_of(word, home) for word in relays]
    pairs = named or [
        (f"device-{part}", {"partition-id": part, "num-partitions": partitions}) for part in range(partitions)
    ]
    return tuple(Device(*pair, FIRST_NODE_PORT + place) for place, pair in enumerate(pairs))


def device_of(word: str) -> tuple[str, dict[str, int | str]]:
    """Read `NAME=DATA-PATH`."""
    name, equals, path = word.partition("=")
    if not equals or not path:
        raise DeployError(f"--device {word!r}: must be NAME=DATA-PATH")
    if not path.isprintable():
        raise DeployError(f"--device {word!r}: the data-path must be printable, on one line")
    if not Path(path).is_absolute():
        raise DeployError(f"--device {word!r}: the data-path must be absolute, as it is on that device")
    return name, {"data-path": path}


def relay_of(word: str, home: str) -> tuple[str, dict[str, int | str]]:
    """Read `NAME` or `NAME=SOCKET` of a relay; by default the socket is of a region with the same home folder."""
    name, equals, path = word.partition("=")
    path = path if equals else relay_socket(home)
    if not Path(path).is_absolute() or not path.isprintable():
        raise DeployError(
            f"--relay {word!r}: must be NAME or NAME=SOCKET, an absolute path on the region's server"
        )
    return name, {"relay": path}


def relay_socket(home: str) -> str:
    """Return the socket of a region's run on the server whose deployment has this home folder."""
    return f"{home}/superlink/{SUPEREXEC}/relay.sock"


def is_operators(out: Path) -> bool:
    """Return True if a folder is an operator's: it has the plan of a deployment, and nothing that starts it."""
    return (out / PLAN).is_file() and not any((out / name).exists() for name in ("superlink", "compose.yaml"))


def check_name(name: str) -> None:
    """Check the name of a device.

    Raises
    ------
    DeployError
        If a folder or a unit can't have this name, or something else has it.
    """
    if not _NAME.fullmatch(name) or name in _RESERVED or name.endswith((f"-{SUPEREXEC}", f"-{WORKER}")):
        raise DeployError(
            f"--device {name!r}: a name is 1 to 63 of a-z, 0-9 and -, no - first, "
            f"no -{SUPEREXEC} or -{WORKER} last, and none of {', '.join(_RESERVED)}"
        )


def _check_host(host: str) -> None:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        if host.rpartition(".")[2].isdigit():  # as no name of the internet ends
            raise DeployError(
                f"--host {host!r}: is no IP address; four numbers from 0 to 255 are needed"
            ) from None
        if not _HOST.fullmatch(host):
            raise DeployError(
                f"--host {host!r}: must be a host name or an IP address, without a port"
            ) from None
