"""A real Slurm of one node, which a test starts and ends."""

import contextlib
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "sacct", "squeue", "sinfo")
PATH = f"{os.environ['PATH']}{os.pathsep}/usr/sbin"  # of the daemons, on Debian
START = 60  # seconds for the daemons to come up

# Three tasks run at once, however few cores there are.
CONFIG = """
ClusterName=one
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
SlurmUser={user}
SlurmdUser={user}
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=2,bf_interval=2
ReturnToService=2
NodeName={host} NodeAddr=127.0.0.1 CPUs=4 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES
"""


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


@contextlib.contextmanager
def slurm_of_one_node(folder: Path) -> Iterator[dict[str, str]]:
    """Start a Slurm of one node, with its files in a folder; yield the environment of its users."""
    if lacking := [name for name in PROGRAMS if shutil.which(name, path=PATH) is None]:
        pytest.skip(
            f"no Slurm is installed: {', '.join(lacking)} (Debian's packages slurm-wlm and munge have them)"
        )
    for name in ("state", "spool"):
        (folder / name).mkdir()
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o600)
    host, user = socket.gethostname().partition(".")[0], Path("~").expanduser().owner()
    (folder / "slurm.conf").write_text(
        CONFIG.format(host=host, ports=free_ports(2), user=user, folder=folder)
    )
    environment = {**os.environ, "PATH": PATH, "SLURM_CONF": str(folder / "slurm.conf")}
    files = [
        f"--{name}={folder}/munge.{name.partition('-')[0]}" for name in ("socket", "pid-file", "seed-file")
    ]
    munged = [
        "munged",
        "--foreground",
        "--force",
        f"--key-file={key}",
        *files,
        f"--log-file={folder}/munge.log",
    ]
    daemons = [munged, ["slurmctld", "-D"], ["slurmd", "-D", "-N", host]]
    with contextlib.ExitStack() as stack:
        for daemon in daemons:
            log = stack.enter_context((folder / f"{daemon[0]}.out").open("wb"))
            process = subprocess.Popen(daemon, env=environment, stdout=log, stderr=subprocess.STDOUT)
            stack.callback(process.wait, 30)
            stack.callback(process.terminate)
        wait_until(START, lambda: "idle" in said("sinfo", "-h", "-o", "%T", env=environment), folder)
        yield environment


def said(*command: str, env: dict[str, str]) -> str:
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False).stdout


def wait_until(seconds: float, condition: Callable[[], object], logs: Path) -> None:
    end = time.monotonic() + seconds
    while not condition():
        told = {path.name: path.read_text(errors="replace")[-2000:] for path in logs.glob("*.out")}
        assert time.monotonic() < end, told
        time.sleep(0.5)
