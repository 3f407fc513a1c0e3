"""The job array in docs/sweep.md, as it stands there, on a real Slurm of one node that the test starts."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import blocks_of
from tests.slurm import PATH, said, slurm_of_one_node, wait_until

FILES = ("keys.json", "runs.csv", "runs.parquet", "tuning.csv", "curves.png", "report.md")
END = 1200  # seconds for all jobs to end


@pytest.fixture
def slurm(tmp_path_factory):
    with slurm_of_one_node(tmp_path_factory.mktemp("slurm")) as environment:
        yield environment


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
