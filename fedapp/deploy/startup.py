"""Texts of the systemd units, one a process.

Flower's own processes have one user and the code of runs another, which can read neither keys nor the SuperLink's
database. What a unit may do beside that is as little as PyTorch bears: it makes memory both writable and executable,
and CUDA opens devices.
"""

import re
from pathlib import Path

from fedapp.deploy.plan import WORKER, DeployError, Deployment, Service

_UNIT = """\
[Unit]
Description={what} of fedapp
Wants=network-online.target
After={after}
# Never give up: a SuperLink refuses a key for up to 60 s after its SuperNode was killed, and may itself be away.
StartLimitIntervalSec=0

[Service]
User={user}
{groups}WorkingDirectory={own}
{variables}
ExecStart={command}
Restart=always
RestartSec=10
# From systemd 254 on the pause grows to a minute; an older one ignores these two and keeps to 10 s.
RestartSteps=5
RestartMaxDelaySec=60

# Only its own folder can be written to, and what it writes is for its user alone; of the code of
# runs, for Flower's processes, too, which send it home.
UMask={umask}
ProtectSystem=strict
ReadWritePaths={own}
ProtectHome=read-only
PrivateTmp=yes
# Other users' processes can't be seen from here: Flower hands tokens over on command lines.
ProtectProc=invisible

# Nothing becomes more than it is.
NoNewPrivileges=yes
CapabilityBoundingSet=
AmbientCapabilities=
RestrictSUIDSGID=yes
RestrictNamespaces=yes
RestrictRealtime=yes
LockPersonality=yes
ProtectKernelTunables=yes
ProtectKernelModules=yes
ProtectKernelLogs=yes
ProtectControlGroups=yes
ProtectHostname=yes
SystemCallArchitectures=native
SystemCallFilter=@system-service
SystemCallErrorNumber=EPERM
RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6 AF_NETLINK
{kind}
# What goes wrong here leaves the machine usable, and no core with keys in it.
MemoryMax={memory}
TasksMax=4096
LimitNOFILE=65536
LimitCORE=0

[Install]
WantedBy=multi-user.target
"""

_FLOWER = """\
PrivateDevices=yes
ProtectClock=yes
"""
# No PrivateDevices, nor ProtectClock, which implies it: a GPU is a device.
_APPS = """\
# One process that takes too much memory is not the end of the others.
OOMPolicy=continue
"""
_LOOPBACK_ALONE = """\
IPAddressDeny=any
IPAddressAllow=localhost
"""


def check_home(home: str) -> None:
    """Check that the lines of a unit can hold the folder of a deployment on its machines.

    Raises
    ------
    DeployError
        If the folder isn't absolute, or has characters that systemd reads as something else.
    """
    if not Path(home).is_absolute() or re.search(r"[\s%$\"'\\]", home):
        raise DeployError(f"--home = {home!r}: must be an absolute path without spaces, quotes, % or $")


def unit_file(deployment: Deployment, service: Service) -> str:
    """Return a service's systemd unit, which restarts it for ever."""
    home, own = deployment.home, f"{deployment.home}/{service.folder}"
    variables = {"PATH": f"{home}/.venv/bin:/usr/local/bin:/usr/bin:/bin", **service.environment(home)}
    what = "SuperExec" if service.runs_apps else "SuperLink" if service.is_server else "SuperNode"
    named = WORKER if service.is_worker else f"Flower {what}"
    return _UNIT.format(
        what=named if service.is_server else f"{named} {service.machine}",
        after=_after(service),
        user=service.user,
        command=f"{home}/.venv/bin/" + " ".join(service.command).replace(" --", " \\\n  --"),
        groups="SupplementaryGroups=fedapp-superexec\n"
        if service.is_server and not service.runs_apps
        else "",
        umask="0027" if service.is_server and service.runs_apps else "0077",
        own=own,
        variables="\n".join(f"Environment={name}={value}" for name, value in variables.items()),
        kind=(_APPS if service.runs_apps else _FLOWER) + _network(deployment, service),
        memory="45%" if service.is_server else "65%" if service.runs_apps else "25%",
    )


def _after(service: Service) -> str:
    if service.is_worker or not service.runs_apps:
        return "network-online.target"
    worker = "" if service.is_server or service.socket else f" fedapp-{service.machine}-{WORKER}.service"
    return f"fedapp-{service.machine}.service{worker}"


def _network(deployment: Deployment, service: Service) -> str:
    """Return the lines that keep a process off the network if it talks to processes of the same machine alone."""
    if service.data and service.runs_apps:
        return "# This device's data leave it through its SuperNode or not at all.\n" + _LOOPBACK_ALONE
    if deployment.backend and service.name == "superlink":
        return "# Its clients come through the proxy.\n" + _LOOPBACK_ALONE
    return ""
