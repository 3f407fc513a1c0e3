"""The batch script in docs/scale.md, as it stands there: one run on two Ray nodes, in one job of a real Slurm."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import blocks_of
from tests.runs import summary_of
from tests.slurm import PATH, said, slurm_of_one_node, wait_until

END = 900  # seconds for the job to end
ROUNDS = 'num-server-rounds=2 model="logistic" figures=false'


@pytest.fixture
def slurm(tmp_path_factory):
    with slurm_of_one_node(tmp_path_factory.mktemp("slurm")) as environment:
        yield environment


@pytest.mark.slow
@pytest.mark.timeout(END + 300)
def test_one_run_on_two_ray_nodes_is_the_run_of_one_process(slurm, repository, tmp_path):
    (script,) = [block.code for block in blocks_of("docs/scale.md") if block.title.endswith("run.sbatch")]
    given = "num-server-rounds=100"
    assert given in script
    (tmp_path / "run.sbatch").write_text(script.replace(given, ROUNDS))
    commands = tmp_path / "bin"  # of an environment that is active
    commands.mkdir()
    for name, program in (
        ("fedapp", f'"{sys.executable}" -m fedapp.cli'),
        ("python", f'"{sys.executable}"'),
        ("ray", f'"{Path(sys.executable).parent / "ray"}"'),
    ):
        (commands / name).write_text(f'#!/bin/sh\nexec {program} "$@"\n')
        (commands / name).chmod(0o755)
    environment = {**slurm, "PATH": f"{commands}{os.pathsep}{PATH}", "PYTHONPATH": str(repository)}
    # Two tasks of one node, in place of two nodes with a task each.
    submit = ["sbatch", "--parsable", "--nodes=1", "--ntasks-per-node=2", "run.sbatch"]
    done = subprocess.run(submit, cwd=tmp_path, env=environment, check=True, capture_output=True, text=True)
    job = done.stdout.strip()
    wait_until(END, lambda: not said("squeue", "-h", env=environment).strip(), tmp_path)
    log = (tmp_path / f"run-{job}.log").read_text()
    assert "2 Ray nodes" in log, log
    (run,) = (tmp_path / "results").glob("*/summary.json")
    assert summary_of(run.parent)["status"] == "finished", log
    # A node of one CPU has one worker of one CPU: the second is on the other node.
    assert "workers: 2 on Ray, on 2 machines" in log, log
    one = ["fedapp", "run", "--engine", "vectorized", "--federation-config", "num-supernodes=100"]
    one += ["-c", f'{ROUNDS} run-name="alone"']
    subprocess.run(one, cwd=tmp_path, env=environment, check=True, capture_output=True)
    models = [folder / "model.safetensors" for folder in (run.parent, tmp_path / "results" / "alone")]
    assert models[0].read_bytes() == models[1].read_bytes()
