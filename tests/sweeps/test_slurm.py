"""The job array in docs/sweep.md, as it stands there, on a real Slurm of one node that the test starts."""

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.pages import blocks_of

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "sacct", "squeue", "sinfo")
PATH = f"{os.environ['PATH']}{os.pathsep}/usr/sbin"  # of the daemons, on Debian
FILES = ("keys.json", "runs.csv", "runs.parquet", "tuning.csv", "curves.png", "report.md")
START, END = 60, 1200  # seconds for the daemons to come up, and for all jobs to end

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


@pytest.fixture
def slurm(tmp_path_factory) -> Iterator[dict[str, str]]:
    """Start a Slurm of one node; yield the environment of its users."""
    if lacking := [name for name in PROGRAMS if shutil.which(name, path=PATH) is None]:
        pytest.skip(
            f"no Slurm is installed: {', '.join(lacking)} (Debian's packages slurm-wlm and munge have them)"
        )
    folder = tmp_path_factory.mktemp("slurm")
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


def wait_until(seconds: float, condition, logs: Path) -> None:
    end = time.monotonic() + seconds
    while not condition():
        told = {path.name: path.read_text(errors="replace")[-2000:] for path in logs.glob("*.out")}
        assert time.monotonic() < end, told
        time.sleep(0.5)


@pytest.mark.slow
@pytest.mark.timeout(END + 300)
def test_the_script_of_the_guide_makes_what_one_process_makes(slurm, tmp_path):
    blocks = {block.title: block.code for block in blocks_of("docs/sweep.md")}
    (tmp_path / "plan.toml").write_text(blocks["plan.toml"])
    (tmp_path / "sweep.sbatch").write_text(blocks["needs Slurm: the file sweep.sbatch"])
    commands = tmp_path / "bin"  # of an environment that is active
    commands.mkdir()
    (commands / "fedapp").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m fedapp.cli "$@"\n')
    (commands / "fedapp").chmod(0o755)
    root = Path(__file__).parents[2]
    environment = {**slurm, "PATH": f"{commands}{os.pathsep}{PATH}", "PYTHONPATH": str(root)}
    submit = blocks["needs Slurm: the commands that submit it"]
    subprocess.run(["bash", "-e", "-c", submit], cwd=tmp_path, env=environment, check=True)
    wait_until(END, lambda: not said("squeue", "-h", env=environment).strip(), tmp_path)
    logs = {path.name: path.read_text() for path in tmp_path.glob("*.log")}
    assert [f"shard {number}/3: " in logs.get(f"sweep-{number}.log", "") for number in (1, 2, 3)] == [
        True
    ] * 3, logs
    assert "runs.csv" in logs["merge.log"], logs
    array, whole = tmp_path / "results" / "array", tmp_path / "whole"
    made_by = [json.loads((array / "shards" / f"{number}-of-3.json").read_text()) for number in (1, 2, 3)]
    assert [record["failures"] for record in made_by] == [{}, {}, {}]
    assert len({record["process"]["pid"] for record in made_by}) == 3
    one = ["fedapp", "sweep", "plan.toml", "-o", str(whole)]
    done = subprocess.run(one, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout
    for name in FILES:
        ours, theirs = ((folder / name).read_bytes() for folder in (array, whole))
        assert ours.replace(b"results/array", b"FOLDER") == theirs.replace(str(whole).encode(), b"FOLDER"), (
            name
        )
