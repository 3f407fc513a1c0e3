"""A sweep is read back from anywhere, whatever has become of the user's own sources; runs are named literally."""

import importlib
import shutil
import sys
import tomllib

import numpy as np
import pandas as pd
import pytest

import fedapp
from fedapp.config import ConfigError
from fedapp.report.cells import axes_of
from fedapp.sweeps.looking import recorded
from fedapp.sweeps.plan import SweepPlan, checked, read_file
from fedapp.sweeps.sweep import _from_anywhere

SMALL = {"num_clients": 2, "model": "logistic", "batch_size": 0, "num_server_rounds": 1, "quiet": True}


@pytest.fixture
def data(tmp_path, monkeypatch):
    """Make two files of data in a working directory."""
    folder = tmp_path / "here"
    folder.mkdir()
    for name, scale in (("a", 1.0), ("b", 2.0)):
        x = np.arange(120.0).reshape(40, 3) / 120 * scale
        np.savez(folder / f"{name}.npz", x_train=x, y_train=np.arange(40) % 2)
    monkeypatch.chdir(folder)
    return folder


def test_a_sweep_on_own_data_is_the_same_from_elsewhere(data, tmp_path, monkeypatch):
    out = tmp_path / "out"
    made = fedapp.sweep(**SMALL, dataset="npz", data_path=["a.npz", str(data / "b.npz")], out=out)
    monkeypatch.chdir(tmp_path)
    back = fedapp.load(out)
    pd.testing.assert_frame_equal(back.runs, made.runs)
    assert back.table["data-path"].tolist() == ["a.npz", str(data / "b.npz")]
    plan = read_file(out / "plan.toml", SweepPlan)
    assert {run.key for run in plan.runs()} == {result.path.name[-10:] for result in made.results}
    assert tomllib.loads((out / "plan.toml").read_text())["grid"]["data-path"] == [
        {"label": "a.npz", "data-path": str(data / "a.npz")},
        str(data / "b.npz"),
    ]
    monkeypatch.chdir(data)
    fedapp.sweep(**SMALL, dataset="npz", data_path="a.npz", seed=[0], out=tmp_path / "base")
    content = tomllib.loads((tmp_path / "base" / "plan.toml").read_text())
    assert content["base"]["data-path"] == str(data / "a.npz")
    named = checked("x", {"base": {"dataset": "hf:./faces"}, "grid": {"seed": [0]}}, SweepPlan)
    assert _from_anywhere(named)["base"] == {"dataset": f"hf:{data}/faces"}


@pytest.mark.thorough
def test_a_sweep_is_read_back_after_its_sources_were_edited(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    source = tmp_path / "own_read_back.py"
    source.write_text("from strategies import FedAvg\nclass Mine(FedAvg):\n    pass\n")
    keys = {
        **SMALL,
        "strategy": "own_read_back:Mine",
        "lr": [0.01, 0.5],
        "tune": "lr",
        "out": tmp_path / "out",
    }
    made = fedapp.sweep(**keys)
    source.write_text(source.read_text() + "# edited\n")
    importlib.reload(sys.modules["own_read_back"])
    back = fedapp.load(tmp_path / "out")
    assert back.runs["status"].tolist() == ["finished"] * 2
    pd.testing.assert_frame_equal(back.runs, made.runs)
    pd.testing.assert_frame_equal(back.tuning, made.tuning)
    fedapp.sweep(**keys)  # is made anew, as what it runs is another
    assert len(list((tmp_path / "out" / "runs").glob("lr-*"))) == 2
    (tmp_path / "out" / "keys.json").unlink()
    assert fedapp.load(tmp_path / "out").runs["status"].tolist() == ["finished"] * 2


@pytest.mark.thorough
def test_a_damaged_run_counts_as_one_that_lacks(tmp_path):
    keys = {**SMALL, "lr": [0.1, 0.5], "seed": [0, 1], "out": tmp_path / "out"}
    made = fedapp.sweep(**keys)
    broken = made.results[0].path / "metrics.jsonl"
    lines = broken.read_text().splitlines()
    broken.write_text("\n".join([lines[0][:9], *lines[1:]]) + "\n")
    for back in (fedapp.load(tmp_path / "out"), fedapp.sweep(**keys)):
        assert back.table["runs"].tolist() == [1, 2]
        assert back.table["lacking"].tolist() == [1, 0]
        assert (
            back.table["accuracy"][0]
            == made.runs.query("run == @made.results[1].path.name")["accuracy"].iloc[-1]
        )
        assert back.runs.groupby("status")["run"].nunique().to_dict() == {"finished": 3, "unreadable": 1}
        (remark,) = back.remarks
        assert remark.startswith(f"lr=0.1, seed 0: {broken}, line 1: not JSON")
        assert axes_of(back._outcome.cells).keys() == {"time", "aggregation", "bytes"}
    report = (tmp_path / "out" / "report.md").read_text()
    assert "1 of 2: 1 unreadable" in report


def test_what_was_damaged_is_not_picked(tmp_path):
    made = fedapp.sweep(**SMALL, lr=[0.1, 0.5], tune="lr", out=tmp_path / "out")
    (best,) = made.tuning.query("picked")["run"]
    broken = tmp_path / "out" / "tuning" / best / "metrics.jsonl"
    broken.write_text("{\n" + broken.read_text())
    tuning = fedapp.load(tmp_path / "out").tuning.set_index("run")
    assert tuning["status"].value_counts().to_dict() == {"finished": len(tuning) - 1, "unreadable": 1}
    assert tuning["status"][best] == "unreadable"
    assert not tuning["picked"][best]


def test_a_run_whose_name_has_brackets_can_be_compared(tmp_path):
    run = fedapp.run(**SMALL, results_dir=tmp_path, run_name="plain").path
    for name in ("lr[0.1]", "lr[0.2]"):
        shutil.copytree(run, tmp_path / name)
    found = recorded([str(tmp_path / "lr[0.1]"), str(tmp_path / "lr[[]0.2]")])  # the second one as a pattern
    assert [each.path.name for each in found] == ["lr[0.1]", "lr[0.2]"]
    with pytest.raises(ConfigError, match="no run is there"):
        recorded([str(tmp_path / "lr[0.3]"), str(run)])
