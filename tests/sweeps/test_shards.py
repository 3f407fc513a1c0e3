"""``fedapp sweep --shard 2/3`` in processes at once, and ``--merge``."""

import contextlib
import json
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from rich.console import Console
from typer.testing import CliRunner

from fedapp.cli import app
from fedapp.config import ConfigError
from fedapp.sweeps import shards
from fedapp.sweeps.command import plan_of
from fedapp.sweeps.plan import SweepPlan, checked
from fedapp.sweeps.runner import only_one, run_missing
from fedapp.sweeps.shards import Shard, shard_record
from fedapp.sweeps.sweep import make_shard, make_sweep, merge_shards

TINY = "model='logistic' batch-size=0 num-server-rounds=2 num-clients=3 figures=false"
BASE = {"model": "logistic", "batch-size": 0, "num-server-rounds": 2, "num-clients": 3, "figures": False}
QUIET = Console(quiet=True)
FOR_A_TEST = {"engine": "sequential", "jobs": 0, "console": QUIET}
FILES = ("plan.toml", "keys.json", "runs.csv", "runs.parquet", "curves.png", "report.md")

# A shard of three as the command makes it, which begins when all three processes are ready.
MAKE = """
import sys
from rich.console import Console
from fedapp.sweeps.command import plan_of
from fedapp.sweeps.shards import Shard
from fedapp.sweeps.sweep import make_shard
from pathlib import Path
axes, base, folder, number = sys.argv[1:]
plan = plan_of(axes.split(), [base], None, {})
print("ready", flush=True)
sys.stdin.readline()
shard = Shard(int(number), 3)
print(make_shard(plan, Path(folder), shard, engine="sequential", jobs=0, console=Console(quiet=True)))
"""


def plan(**content) -> SweepPlan:
    grid = {"strategy": ["fedavg", "fedprox"], "seed": [0, 1]}
    return checked("x", {"base": BASE, "grid": grid} | content, SweepPlan)


def command(folder: Path, *arguments: str, base: str = TINY):
    given = ["sweep", *arguments, "-c", base, "--engine", "sequential", "-o", str(folder)]
    return CliRunner().invoke(app, given, env={"COLUMNS": "120"})


def contents(folder: Path) -> dict[str, bytes]:
    """Return a sweep's files that tell of its runs, each without the folder's own name."""
    return {name: (folder / name).read_bytes().replace(str(folder).encode(), b"FOLDER") for name in FILES}


def test_three_processes_at_once_make_what_one_makes(tmp_path):
    axes, whole, parts = (
        "lr=0.5,1e30 strategy=fedavg,fedprox seed=0-1",
        tmp_path / "whole",
        tmp_path / "parts",
    )
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", MAKE, axes, TINY, str(parts), str(number)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in (1, 2, 3)
    ]
    for each in processes:
        assert each.stdout.readline() == "ready\n"
    with contextlib.ExitStack() as stack:
        for each in processes:
            each.stdin.write("\n")
            each.stdin.flush()
            stack.enter_context(each)
        made = [each.communicate()[0] for each in processes]
    # Of 8 runs every third; those with the huge step, in the second half, diverge, which is no failure.
    assert made == ["(3, 0)\n", "(3, 0)\n", "(2, 0)\n"]
    assert not (parts / ".lock").exists()
    assert not (parts / "runs" / ".lock").exists()
    one = command(whole, *axes.split(), "--merge")
    assert (one.exit_code, one.output) == (
        1,
        f"error: {whole}: has no run to merge; --shard 1/2 in place of --merge makes half of them\n",
    )
    outcome = make_sweep(plan_of(axes.split(), [TINY], None, {}), whole, **FOR_A_TEST)
    assert {outcome.status_of(each)[0] for each in outcome.planned} == {"finished", "diverged"}
    merged = command(parts, *axes.split(), "--merge")
    one = command(whole, *axes.split())
    assert merged.exit_code == one.exit_code == 0, merged.output
    assert contents(parts) == contents(whole)
    assert (
        merged.output.replace(str(parts), "x")
        == one.output.replace(str(whole), "x").partition("minutes\n")[2]
    )
    for run in (whole / "runs").glob("*/metrics.jsonl"):
        assert (parts / "runs" / run.parent.name / run.name).read_bytes() == run.read_bytes()


def test_every_run_belongs_to_one_shard_whatever_is_finished(tmp_path):
    planned = plan().runs()
    parts = [Shard(number, 3).part_of([*planned, *planned]) for number in (1, 2, 3)]
    assert [[each.title for each in part] for part in parts] == [
        ["fedavg seed=0", "fedprox seed=1"],
        ["fedavg seed=1"],
        ["fedprox seed=0"],
    ]
    assert make_shard(plan(), tmp_path, Shard(2, 3), **FOR_A_TEST) == (1, 0)
    assert make_shard(plan(), tmp_path, Shard(3, 3), **FOR_A_TEST) == (1, 0)
    assert len(list(tmp_path.glob("runs/*"))) == 2
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("summary.json")}
    assert make_shard(plan(), tmp_path, Shard(1, 1), **FOR_A_TEST) == (4, 0)  # which leaves what others made
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert len(list(tmp_path.glob("runs/*"))) == 4
    assert make_shard(plan(), tmp_path, Shard(5, 5), **FOR_A_TEST) == (0, 0)


def test_the_merge_says_what_is_missing_and_which_shards_make_it(tmp_path):
    axes = ("strategy=fedavg,fedprox", "seed=0-1", "model=logistic,cnn")
    base = "dataset='synthetic' num-server-rounds=1 num-clients=3 figures=false"  # a cnn needs images
    done = command(tmp_path, *axes, "--shard", "2/3", base=base)  # the runs 2, 5 and 8
    assert done.exit_code == 1
    assert "shard 2/3: 1 of 3 runs came to their end; --merge in place of --shard shows" in done.output
    assert done.output.endswith("error: 2 of 3 runs failed; the same command tries them again\n")
    merged = command(tmp_path, *axes, "--merge", base=base)
    assert merged.exit_code == 1
    assert merged.output.endswith(
        "error: 7 of 8 runs are missing (5 not run, 2 failed): the same command with --shard makes them, for shards "
        "1, 2, 3 of 3\n"
    )
    frame = pd.read_csv(tmp_path / "runs.csv")
    assert frame["status"].value_counts()["failed"] == 2
    assert frame[frame["status"] == "failed"]["reason"].str.contains("cnn").all()
    assert "accuracy" in (tmp_path / "report.md").read_text()


def test_values_are_picked_when_the_tuning_runs_of_all_shards_are_there(tmp_path):
    tuned = plan(grid={"lr": [0.001, 0.5], "strategy": ["fedavg", "fedprox"], "seed": [3]}, tune=["lr"])
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    outcome = make_sweep(tuned, whole, **FOR_A_TEST)
    assert make_shard(tuned, parts, Shard(1, 2), **FOR_A_TEST) == (2, 0)
    with pytest.raises(
        ConfigError, match=r"no value is picked yet, as 2 of 4 tuning runs aren't finished.* 2 of 2,"
    ):
        merge_shards(tuned, parts)
    assert not (parts / "runs").exists()
    assert make_shard(tuned, parts, Shard(2, 2), **FOR_A_TEST) == (3, 0)
    assert make_shard(tuned, parts, Shard(1, 2), **FOR_A_TEST) == (3, 0)
    merged = merge_shards(tuned, parts)
    assert [pick.value for pick in merged.picks.values()] == [pick.value for pick in outcome.picks.values()]
    assert [each.name for each in merged.planned] == [each.name for each in outcome.planned]
    assert [merged.run_of(each).final("loss") for each in merged.planned] == [
        outcome.run_of(each).final("loss") for each in outcome.planned
    ]


@pytest.mark.parametrize("text", ["0/16", "17/16", "a/b", "3", "3/", "-1/4", "1/0", "1.5/2", "²/3"])
def test_a_shard_that_is_none_is_one_line(text, tmp_path):
    done = command(tmp_path / "out", "seed=0-1", "--shard", text)
    assert (done.exit_code, done.output) == (
        1,
        f"error: --shard {text}: must be NUMBER/COUNT, such as 3/16, with a number from 1 to the count\n",
    )
    assert not (tmp_path / "out").exists()


def test_shard_and_merge_exclude_each_other(tmp_path):
    done = command(tmp_path, "seed=0-1", "--shard", "1/2", "--merge")
    assert (
        done.output == "error: --shard 1/2 and --merge: one at a time; --merge comes after the last shard\n"
    )


@pytest.fixture
def hasty(monkeypatch):
    """Signs of life come and are awaited in a fiftieth of the usual time."""
    for name in ("BEAT", "WATCH", "LOOK"):
        monkeypatch.setattr(shards, name, getattr(shards, name) / 50)


def test_what_another_process_makes_is_refused(hasty, tmp_path):
    (tmp_path / "plan.toml").write_text("of the other")
    with shard_record(Shard(1, 2), tmp_path, QUIET):
        for refused in (
            lambda: make_shard(plan(), tmp_path, Shard(1, 2), **FOR_A_TEST),
            lambda: make_shard(plan(), tmp_path, Shard(1, 3), **FOR_A_TEST),
            lambda: make_sweep(plan(), tmp_path, **FOR_A_TEST),
        ):
            with pytest.raises(ConfigError, match="another process makes its runs, shard 1/2 on "):
                refused()
        assert make_shard(plan(), tmp_path, Shard(2, 2), **FOR_A_TEST) == (2, 0)
    assert (tmp_path / "plan.toml").read_text() == "of the other"
    with only_one(tmp_path), pytest.raises(ConfigError, match=r"another process makes its runs$"):
        make_shard(plan(), tmp_path, Shard(1, 2), **FOR_A_TEST)
    assert make_shard(plan(), tmp_path, Shard(1, 2), **FOR_A_TEST) == (2, 0)


def test_a_shard_that_was_killed_goes_on_elsewhere(hasty, tmp_path):
    """A killed shard leaves a record that says it is at work, and a run that is running on another machine."""
    first, second = Shard(1, 2), Shard(2, 2)
    assert make_shard(plan(), tmp_path, first, **FOR_A_TEST) == (2, 0)
    run = min(tmp_path.glob("runs/*"))
    summary = json.loads((run / "summary.json").read_text())
    elsewhere = {"host": "another", "pid": 1, "boot": "another"}
    (run / "summary.json").write_text(json.dumps({**summary, "status": "running", "process": elsewhere}))
    record = first.record_in(tmp_path)
    record.write_text(json.dumps({"status": "at work", "process": elsewhere, "failures": {}}))
    assert make_shard(plan(), tmp_path, second, **FOR_A_TEST) == (2, 0)
    assert make_shard(plan(), tmp_path, first, **FOR_A_TEST) == (2, 0)
    assert json.loads((run / "summary.json").read_text())["status"] == "finished"
    assert json.loads(record.read_text())["status"] == "ended"


def test_a_file_system_without_locks_is_no_other_process(monkeypatch, tmp_path, caplog):
    def flock(*_):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", flock)
    with only_one(tmp_path), only_one(tmp_path):
        assert "can't be locked: [Errno 38] Function not implemented" in caplog.text
    planned = plan(grid={"seed": [0]}).runs()
    assert run_missing(planned, tmp_path, engine="sequential", jobs=0, console=QUIET) == {}
    assert make_shard(plan(), tmp_path, Shard(1, 2), **FOR_A_TEST) == (2, 0)
