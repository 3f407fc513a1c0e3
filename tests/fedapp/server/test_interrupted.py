"""A run that is interrupted says how it goes on and from where, and its result is of one run after that."""

import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

import fedapp
from fedapp.config import ConfigError
from fedapp.server import Observer

KEYS: dict[str, Any] = {
    "num_clients": 3,
    "model": "logistic",
    "engine": "sequential",
    "figures": False,
    "num_server_rounds": 6,
    "checkpoint_every": 2,
}


class Interrupt(Observer):
    """Interrupts the run after its third round, as Ctrl-C does."""

    def record(self, entry):
        if entry.progress.aggregation == 3:
            os.kill(os.getpid(), signal.SIGINT)


def interrupted(folder: Path, **keys: Any) -> tuple[Path, str]:
    """Return the folder of an interrupted run of that name, and what the interruption says."""
    keys = {**KEYS, "results_dir": str(folder), "run_name": "run", **keys}
    with pytest.raises(KeyboardInterrupt) as caught:
        fedapp.run(**keys, observers=[Interrupt()])
    return folder / "run", str(caught.value)


def test_an_interrupted_run_and_the_same_command_again_say_how_it_goes_on(tmp_path):
    path, said = interrupted(tmp_path)
    done = int(re.search(r"goes on from aggregation (\d)$", said)[1])  # type: ignore[index]
    assert said.endswith(f"; resume={path} goes on from aggregation {done}")
    log = (path / "log.txt").read_text("utf-8")
    assert f"interrupted after aggregation 3: resume={path} goes on from aggregation {done}\n" in log
    how = f"was interrupted after aggregation 3, and resume={path} goes on from aggregation {done}; or choose"
    with pytest.raises(ConfigError, match=re.escape(how)):
        fedapp.run(**KEYS, results_dir=str(tmp_path), run_name="run")
    resumed = fedapp.run(resume=str(path))
    assert f"resumed from aggregation {done}\n" in (path / "log.txt").read_text("utf-8")
    assert len(resumed.metrics) == 7


def test_the_same_command_again_without_a_name_begins_a_new_run_and_says_so(tmp_path):
    interrupted(tmp_path, run_name="")
    cut_off = tmp_path / "fedavg-digits-logistic-001"
    keys = {**KEYS, "results_dir": str(tmp_path)}
    second = fedapp.run(**keys)
    log = (second.path / "log.txt").read_text("utf-8")
    done = re.search(
        r"interrupted after aggregation 3: (resume=.*)", (cut_off / "log.txt").read_text("utf-8")
    )
    assert done
    said = "a new run begins; {} has the same config and {}: "
    assert said.format(cut_off.name, "was interrupted after aggregation 3") + done[1] in log
    third = fedapp.run(**keys)
    how = f"resume={second.path} goes on from aggregation 6 with a larger num-server-rounds or time-budget"
    ended = said.format(second.path.name, "finished after aggregation 6")
    assert (third.path / "log.txt").read_text("utf-8").count(ended + how) == 1
    for others in ({"lr": 0.3}, {"num_clients": 2}, {"run_name": "named"}):
        other = fedapp.run(**(keys | others))
        assert "a new run begins" not in (other.path / "log.txt").read_text("utf-8")


def test_a_run_without_checkpoints_says_nothing_of_going_on(tmp_path):
    path, said = interrupted(tmp_path, checkpoint_every=0)
    assert said == f"what the run has recorded is in {path}"
    assert "resume=" not in (path / "log.txt").read_text("utf-8")


def test_a_result_is_of_one_run_after_a_resume(tmp_path):
    first = fedapp.run(**KEYS, results_dir=str(tmp_path))
    assert (len(first.metrics), first.config.num_server_rounds) == (7, 6)
    assert first.metrics is first.metrics
    again = fedapp.run(resume=str(first.path), num_server_rounds=8)
    for result in (first, again):
        assert (len(result.metrics), result.config.num_server_rounds) == (9, 8)
        assert result.summary["loss"] == result.metrics["loss"].iloc[-1]
        assert result.clients is not None
        assert result.clients["aggregation"].max() == 8
