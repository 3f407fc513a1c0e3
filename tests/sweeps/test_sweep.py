"""``fedapp sweep``: real runs on the digits, in real worker processes."""

import csv
import importlib
import json
import math
import shutil
import sys
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from PIL import Image
from rich.console import Console
from typer.testing import CliRunner

import fedapp
from fedapp.cli import app
from fedapp.config import ConfigError, RunConfig
from fedapp.sweeps.command import plan_of
from fedapp.sweeps.plan import SweepPlan, checked
from fedapp.sweeps.point import PlannedRun
from fedapp.sweeps.results import report, write_results
from fedapp.sweeps.runner import _check_jobs, only_one
from fedapp.sweeps.sweep import Outcome, make_sweep, outcome_in
from fedapp.sweeps.tuning import check_tested_rows, pick
from tests.runs import summary_of

# A run takes a tenth of a second; a worker process takes seconds to start.
TINY = "model='logistic' batch-size=0 num-server-rounds=2 num-clients=3 figures=false"


def command(*arguments: str):
    """Run ``fedapp sweep``, in this process unless it says how many others."""
    jobs = () if {"--jobs", "--engine=ray", "ray"} & set(arguments) else ("--jobs", "0")
    return CliRunner().invoke(app, ["sweep", *arguments, *jobs], env={"COLUMNS": "120"})


def sweep(out: Path, *arguments: str, base: str = TINY):
    return command(*arguments, "-c", base, "--engine", "sequential", "-o", str(out))


def stamps(folder: Path) -> dict[str, int]:
    return {path.parent.name: path.stat().st_mtime_ns for path in folder.glob("*/summary.json")}


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """A sweep of two step sizes, one of which no client survives, on two seeds, in two processes."""
    out = tmp_path_factory.mktemp("sweep") / "own"
    return out, sweep(out, "lr=0.5,1e30", "seed=0-1", "--jobs", "2")


def test_every_combination_is_a_run_and_a_failed_one_a_row(swept):
    out, done = swept
    frame = pd.read_parquet(out / "runs.parquet")
    failed = int(frame[frame["status"] == "failed"]["run"].nunique())
    assert done.exit_code == min(failed, 1), done.output
    assert (f"error: {failed} of 4 runs failed; the same command tries them again" in done.output) == (
        failed > 0
    )
    assert frame.columns[:6].tolist() == ["run", "lr", "seed", "status", "reason", "aggregation"]
    good, bad = frame[frame["lr"] == 0.5], frame[frame["lr"] == 1e30]
    assert good[["seed", "aggregation"]].to_numpy().tolist() == [[s, a] for s in (0, 1) for a in (0, 1, 2)]
    assert set(good["status"]) == {"finished"}
    assert set(bad["status"]) <= {"failed", "diverged"}
    assert bad["reason"].str.len().min() > 0
    for _, row in good.iterrows():
        lines = [
            json.loads(line)
            for line in (out / "runs" / row["run"] / "metrics.jsonl").read_text().splitlines()
        ]
        assert lines[row["aggregation"]]["accuracy"] == row["accuracy"]
    with (out / "runs.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [float(row["accuracy"] or "nan") for row in rows] == pytest.approx(
        frame["accuracy"].tolist(), nan_ok=True
    )


def test_the_table_has_mean_and_deviation_over_seeds(swept):
    out, done = swept
    finals = [summary_of(path)["accuracy"] for path in sorted(out.glob("runs/lr-0.5*"))]
    mean, spread = np.mean(finals), np.std(finals, ddof=1)
    report = (out / "report.md").read_text()
    assert f"{mean:.3f} ± {spread:.2g}" in report
    assert f"{mean:.3f} ± {spread:.2g}" in done.output
    assert "0 of 2: 2 " in report
    assert "seed 0, 1: " in report
    logs = [path.read_text() for path in out.glob("runs/*/log.txt")]
    assert len(logs) == 4
    assert all("round 0 of 2: loss" in log for log in logs)
    assert "round 0" not in done.output
    assert Image.open(out / "curves.png").width == 1200
    assert tomllib.loads((out / "plan.toml").read_text())["grid"] == {"lr": [0.5, 1e30], "seed": [0, 1]}


@pytest.mark.thorough
def test_what_is_there_is_not_made_again(swept, tmp_path):
    out, _ = swept
    copy = tmp_path / "copy"
    shutil.copytree(out, copy)
    before = stamps(copy / "runs")
    killed = next(iter(sorted(copy.glob("runs/lr-0.5*"))))
    (killed / "summary.json").write_text('{"status": "running"}')
    done = sweep(copy, "lr=0.5", "seed=0-2")  # one of them anew, and one more
    assert done.exit_code == 0, done.output
    after = stamps(copy / "runs")
    assert {name for name in before if after[name] == before[name]} == set(before) - {killed.name}
    assert len(after) == len(before) + 1
    frame = pd.read_csv(copy / "runs.csv")
    assert sorted(frame["seed"].unique()) == [0, 1, 2]
    assert (frame["status"] == "finished").all()


def test_the_config_of_a_run_is_what_all_runs_share(swept):
    out, _ = swept
    run = next(iter(sorted(out.glob("runs/lr-0.5-seed-1-*"))))
    again = {
        each.name for each in plan_of(["lr=0.5", "seed=0-1"], [str(run / "config.toml")], None, {}).runs()
    }
    assert again == {path.name for path in out.glob("runs/lr-0.5*")}  # the same runs, with their clients


def test_of_a_runs_config_an_axis_wins_and_what_is_written_beside_it_does_not(swept, tmp_path):
    out, _ = swept
    run = next(iter(sorted(out.glob("runs/lr-0.5-seed-1-*"))))
    file = str(run / "config.toml")
    plan_file = tmp_path / "plan.toml"
    plan_file.write_text(
        "[base]\nmomentum = 0.3\n[grid]\nwork = [{ label = 'ten', local-epochs = 0, local-steps = 10 }]\n"
    )
    planned = plan_of([str(plan_file), "num-clients=4,5"], [file, "batch-size=7"], None, {})
    assert [
        (each.num_clients, each.config.local_steps, each.config.local_epochs, each.config.batch_size)
        for each in planned.runs()
    ] == [(4, 10, 0, 7), (5, 10, 0, 7)]
    assert {(each.config.lr, each.config.seed) for each in planned.runs()} == {(0.5, 1)}
    assert {each.config.momentum for each in planned.runs()} == {0.3}  # which the plan's author wrote
    assert {each.num_clients for each in plan_of(["lr=1"], [file, "num-clients=9"], None, {}).runs()} == {9}
    own = tmp_path / "own.toml"
    own.write_text("lr = 0.2\nbatch-size = 5\n")
    swept = plan_of(["lr=1,2"], [str(own), "seed=3"], None, {}).runs()
    assert [(each.config.lr, each.config.batch_size) for each in swept] == [(1, 5), (2, 5)]
    with pytest.raises(ConfigError, match="lr: is given both for all runs and as an axis"):
        plan_of(["lr=1,2"], [str(own), "lr=3"], None, {})
    for beside, message in (
        ("lr=3", "lr: is given both for all runs and as an axis"),
        ("results-dir=x", "results-dir is the sweep's own"),
        ("num-clients=9 lr=3", "lr, num-clients: are given both for all runs and as an axis"),
        ("num-clients=9", "num-clients: is given both for all runs and as an axis"),
    ):
        with pytest.raises(ConfigError, match=message):
            plan_of(["lr=1,2", "num-clients=4"], [file, beside], None, {})


def test_only_failures_are_exit_code_1(tmp_path, monkeypatch):
    def here(*given: Any, jobs: int, **more: Any) -> Any:  # without the seconds that a process takes to start
        return make_sweep(*given, jobs=0, **more)

    monkeypatch.setattr("fedapp.sweeps.command.make_sweep", here)
    done = sweep(tmp_path / "bad", "dataset=npz", base=f"{TINY} data-path='/nowhere.npz'")
    assert done.exit_code == 1
    assert "no run came to its end" in done.output
    frame = pd.read_csv(tmp_path / "bad" / "runs.csv")
    assert frame["status"].tolist() == ["failed"]
    assert "no such file" in frame["reason"][0]


def test_a_sweep_with_a_failed_run_is_exit_code_1(tmp_path, monkeypatch):
    def here(*given: Any, jobs: int, **more: Any) -> Any:
        return make_sweep(*given, jobs=0, **more)

    monkeypatch.setattr("fedapp.sweeps.command.make_sweep", here)
    base = "dataset='synthetic' num-server-rounds=1 num-clients=3 figures=false"
    done = sweep(tmp_path / "half", "model=logistic,cnn", base=base)  # a cnn needs images
    assert done.exit_code == 1
    assert done.output.endswith("error: 1 of 2 runs failed; the same command tries them again\n")
    assert pd.read_csv(tmp_path / "half" / "runs.csv")["status"].value_counts()["failed"] == 1


@pytest.mark.thorough
def test_tuning_is_on_seeds_that_are_not_reported(tmp_path):
    arguments = ("lr=0.001,0.5", "strategy=fedavg,fedprox", "seed=3", "--tune", "lr", "--tuning-seeds", "2")
    done = sweep(tmp_path, *arguments)
    assert done.exit_code == 0, done.output
    tried = pd.read_csv(tmp_path / "tuning.csv")
    assert sorted(tried["seed"].unique()) == [4, 5]
    assert len(tried) == 8
    best = tried.groupby(["strategy", "lr"])["accuracy"].mean().unstack().idxmax(axis=1)
    picked = tried[tried["picked"]].groupby("strategy")["lr"].unique()
    assert {name: values.tolist() for name, values in picked.items()} == {n: [v] for n, v in best.items()}
    reported = pd.read_csv(tmp_path / "runs.csv")
    assert reported["seed"].unique().tolist() == [3]
    assert reported.groupby("strategy")["lr"].unique().map(list).to_dict() == {
        n: [v] for n, v in best.items()
    }
    assert "By accuracy at the end, on seeds 4, 5" in (tmp_path / "report.md").read_text()


def test_on_a_machine_with_a_gpu_several_runs_go_at_once(monkeypatch):
    """``auto`` is Ray only where clients share the GPU, which those of a sweep don't."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    _check_jobs(plan(tune=[]).runs(), "", 2)
    with pytest.raises(ConfigError, match="allowed with engine ray is 1"):
        _check_jobs(plan(tune=[]).runs(), "ray", 2)


def plan(**changes: Any) -> SweepPlan:
    return checked("x", {"grid": {"lr": [0.1, 0.2, 0.3], "seed": [0]}, "tune": ["lr"], **changes}, SweepPlan)


def made_up(path: Path, planned: PlannedRun, status: str, **finals: float) -> None:
    folder = path / planned.name
    folder.mkdir(parents=True)
    (folder / "summary.json").write_text(json.dumps({"status": status, **finals}))
    (folder / "metrics.jsonl").write_text(json.dumps({"aggregation": 1, **finals}) + "\n")


@pytest.mark.parametrize(("by", "best"), [("loss", 0.1), ("accuracy", 0.2)])
def test_a_value_with_a_run_that_diverged_is_not_picked(tmp_path, by, best):
    tuned = plan(**{"tuning-seeds": 2})
    planned = tuned.runs(tuned.seeds_to_tune_on)
    loss, accuracy = {0.1: 1.0, 0.2: 2.0, 0.3: 0.1}, {0.1: 0.5, 0.2: 0.6, 0.3: 0.9}
    for each in planned:
        lr = each.config.lr
        bad = lr == 0.3 and each.config.seed == 2
        made_up(tmp_path, each, "diverged" if bad else "finished", loss=loss[lr], accuracy=accuracy[lr])
    (found,) = pick(tuned, planned, tmp_path, by).values()
    assert found.value == (best,)
    assert math.isnan(found.scores[(0.3,)])
    assert found.at_edge == (["lr"] if best == 0.1 else [])


def test_a_setting_with_a_run_that_diverged_leads_nothing_nor_does_one_alone(tmp_path):
    of_two = checked("x", {"grid": {"lr": [0.1, 0.3], "seed": [0, 1]}}, SweepPlan)
    planned = of_two.runs()
    for each in planned:
        bad = each.config.lr == 0.3 and each.config.seed == 1
        made_up(tmp_path / "runs", each, "diverged" if bad else "finished", accuracy=each.config.lr)
    text = report(Outcome(tmp_path, of_two, planned, by="accuracy"), has_figure=False)
    assert "| 0.1 | 2 |" in text
    assert "**" not in text
    assert "| 0.3 | 1 of 2: 1 diverged |" in text


def test_where_nothing_came_to_its_end_nothing_is_picked(tmp_path):
    tuned = plan()
    planned = tuned.runs(tuned.seeds_to_tune_on)
    (found,) = pick(tuned, planned, tmp_path, "loss").values()
    assert found.value is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("lrr=1,2",), "unknown key 'lrr': did you mean 'lr'?"),
        (("lr=1,-2",), "lr = -2: must be a number > 0"),
        (("lr=1,2", "-c", "lr=3"), "lr: is given both for all runs and as an axis"),
        (("lr=1,1",), "grid.lr: 1 is there twice"),
        (("lr=1", "-c", "run-name='x'"), "run-name is the sweep's own"),
        (("results-dir=a,b",), "results-dir is the sweep's own"),
        (("lr=1", "--tune", "l2"), "tune: 'l2' is no axis; there are lr"),
        (("seed=1,2", "--tune", "seed"), "the seed isn't tuned"),
        (
            ("test-on=held-out,own", "--tune", "test-on"),
            "tune = test-on: test-on=held-out and test-on=own are tested on different rows, so their scores can't",
        ),
        (
            (
                "partitioner=iid,dirichlet",
                "lr=0.1,1",
                "--tune",
                "lr",
                "--tune",
                "partitioner",
                "-c",
                "test-on=own",
            ),
            "lr=0.1 partitioner=iid and lr=0.1 partitioner=dirichlet are tested on different rows",
        ),
        (("lr=1", "--by", "f1"), "by: 'f1' is measured in no run; allowed are loss, accuracy, rmse, r2"),
        (("lr=1", "--engine", "rya"), "engine = 'rya': allowed are auto, sequential, vectorized, ray"),
        (("lr=1", "--engine", "ray", "--jobs", "2"), "allowed with engine ray is 1"),
        (("lr=1", "--federation-config", "init-args-num-cpus=1"), "isn't read by a sweep"),
        (("nowhere.toml",), "nowhere.toml: no such file"),
        (("num-clients=0",), "num-clients = 0: must be a whole number >= 1"),
        (("client-device=cpu,cuda",), "grid.client-device: client-device doesn't change what a run computes"),
        (("client-threads=1,4", "lr=1"), "so all values are one run"),
        (("data-path=/a,/b", "-c", "dataset='mnist'"), "grid.data-path: data-path doesn't change"),
    ],
)
def test_what_is_not_possible_is_one_line_before_anything_runs(tmp_path, arguments, message):
    done = command(*arguments, "-o", str(tmp_path / "out"))
    assert done.exit_code == 1
    assert message in done.output
    assert not list(tmp_path.glob("out/*/*"))


def test_seeds_to_tune_on_without_anything_to_tune_are_refused(tmp_path):
    done = sweep(tmp_path, "lr=1,2", "--tuning-seeds", "2")
    assert (done.exit_code, done.output) == (
        1,
        "error: lr=1,2: tuning-seeds = 2: nothing is tuned; tune names the axes to tune\n",
    )


def test_a_division_that_is_tested_on_the_same_rows_may_be_tuned():
    """The held-out rows depend on the seed alone, whatever the other rows' division and the number of clients."""
    held = {"grid": {"partitioner": ["iid", "dirichlet"], "num-clients": [2, 3]}, "tune": ["partitioner"]}
    plan = checked("x", held | {"base": {"dataset": "digits"}}, SweepPlan)
    check_tested_rows(plan, plan.runs([1, 2]))


def test_a_folder_that_can_not_be_made_is_one_line(tmp_path):
    (tmp_path / "file").touch()
    done = sweep(place := tmp_path / "file" / "own", "lr=1,2")
    assert (done.exit_code, done.output) == (1, f"error: [Errno 20] Not a directory: '{place}'\n")


def test_a_sweep_leaves_the_plan_of_another_process_that_makes_runs_in_its_folder(tmp_path):
    (tmp_path / "plan.toml").write_text("of the other")
    with only_one(tmp_path):
        done = sweep(tmp_path, "lr=1,2")
    assert (done.exit_code, done.output) == (1, f"error: {tmp_path}: another process makes its runs\n")
    assert (tmp_path / "plan.toml").read_text() == "of the other"


def test_what_is_best_by_may_be_a_metric_of_clients(swept):
    out, _ = swept
    for name in ("personal-accuracy-mean", "client-loss-worst-tenth", "loss-std"):
        assert plan(by=name).by == name
    outcome = outcome_in(out)
    assert outcome.metrics == ["accuracy", "loss"]
    assert replace(outcome, by="client-loss-std").metrics == ["client-loss-std", "accuracy", "loss"]
    assert replace(outcome, by="personal-loss-mean").metrics == ["accuracy", "loss"]


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        (
            {"lr": [0.1, 0.3], "work": [{"label": "fast", "lr": 0.5}, {"label": "slow"}]},
            "work: lr is set by the axis lr",
        ),
        (
            {"where": [{"label": "a", "client-device": "cpu"}, {"label": "b", "client-device": "cuda"}]},
            "where: client-d",
        ),
        (
            {"time": [{"label": "long", "local-epochs": 5}]},
            "grid.time: tables have another column of that name",
        ),
        ({"run": [{"label": "long", "local-epochs": 5}]}, "grid.run: tables have another column"),
    ],
)
def test_axes_that_show_one_run_as_two_or_hide_a_column_are_refused(grid, message):
    with pytest.raises(ConfigError, match=message):
        checked("x", {"grid": grid}, SweepPlan)


def test_axes_that_name_a_place_beside_what_is_computed_are_allowed():
    own = {"base": {"dataset": "npz"}, "grid": {"data-path": ["/a.npz", "/b.npz"]}}
    cases = [{"label": "a", "data-path": "/a", "lr": 0.1}, {"label": "b", "data-path": "/b", "lr": 0.2}]
    for content in (own, {"grid": {"case": cases}}, {"grid": {"client-device": ["cuda"], "lr": [0.1]}}):
        assert len({run.key for run in checked("x", content, SweepPlan).runs()}) == len(
            checked("x", content, SweepPlan).runs()
        )


def test_what_is_tuned_is_not_tuned_on_a_seed_of_a_labelled_value():
    case = [{"label": "first", "seed": 1}, {"label": "second", "seed": 2}]
    assert len(checked("x", {"grid": {"case": case}}, SweepPlan).runs()) == 2
    with pytest.raises(ConfigError, match=r"grid.case: sets the seed, on which tune may not be"):
        checked("x", {"grid": {"case": case, "lr": [0.1, 0.2]}, "tune": ["lr"]}, SweepPlan)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"grid": {}}, "grid: has no axis, such as seed"),
        ({"grid": {"lr": []}}, "grid.lr: has no value"),
        ({"grid": {"case": [{"lr": 0.1}]}}, "grid.case: .* has no 'label'"),
        ({"grid": {"lr": [0.1, 0.2, 0.1]}}, "grid.lr: 0.1 is there twice"),
        (
            {"grid": {"seed": [{"label": "first", "seed": 1}], "lr": [0.1, 0.2]}, "tune": ["lr"]},
            "tune: seeds must be whole numbers, without labels",
        ),
    ],
)
def test_a_grid_has_values_and_seeds_that_can_be_followed_by_others(content, message):
    with pytest.raises(ConfigError, match=message):
        checked("x", content, SweepPlan)


def test_an_axis_and_a_metric_of_one_name_are_two_columns(tmp_path):
    keys = {
        "dataset": "custom.diabetes:load",
        "normalize": "standardize",
        "model": "mlp",
        "num_server_rounds": 1,
    }
    swept = fedapp.sweep(**keys, loss=["mse", "mae"], num_clients=3, lr=0.01, out=tmp_path, quiet=True)
    finals = [result.summary["loss"] for result in swept.results]
    assert finals[0] != finals[1]
    assert swept.table[["loss-key", "loss"]].to_numpy().tolist() == [["mse", finals[0]], ["mae", finals[1]]]
    written = (pd.read_csv(tmp_path / "runs.csv"), pd.read_parquet(tmp_path / "runs.parquet"))
    for frame in (swept.runs, *written, fedapp.load(tmp_path).runs):
        assert frame["loss-key"].tolist() == ["mse", "mse", "mae", "mae"]
        assert frame["loss"].tolist()[1::2] == pytest.approx(finals)
    assert "| loss-key | runs | rmse | r2 | loss |" in (tmp_path / "report.md").read_text()


def test_a_plan_file_and_what_stands_beside_it(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(
        'title = "Two ways"\n[base]\nmodel = "logistic"\nnum-server-rounds = 1\nnum-clients = 3\n'
        "[grid]\nseed = [0, 1]\n"
        'case = [{ label = "slow", lr = 0.1 }, { label = "fast", lr = 0.5, local-epochs = 2 }]\n'
    )
    planned = plan_of([str(path), "seed=5"], None, None, {})
    outcome = make_sweep(planned, tmp_path / "out", engine="sequential", jobs=0, console=Console(quiet=True))
    write_results(outcome)
    assert "# Two ways" in (tmp_path / "out" / "report.md").read_text()
    frame = pd.read_csv(tmp_path / "out" / "runs.csv")
    assert frame[["case", "seed"]].drop_duplicates().to_numpy().tolist() == [["slow", 5], ["fast", 5]]
    path.write_text('source = "a paper"\n[grid]\nlr = [1.0]\n')
    assert "mine.toml: source: Extra inputs are not permitted" in command(str(path)).output
    path.write_text("[grid]\ncase = [{ lr = 1.0 }]\n")
    assert "has no 'label'" in command(str(path)).output


def test_brackets_in_values_are_shown(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(
        '[base]\nmodel = "logistic"\nnum-server-rounds = 1\nnum-clients = 3\n'
        '[grid]\ncase = [{ label = "net[slow]", lr = 0.1 }, { label = "[/x]", lr = 0.5 }]\n'
    )
    done = command(str(path), "--engine", "sequential", "-o", str(tmp_path / "own"))
    assert done.exit_code == 0, done.output
    assert {"net[slow]", "[/x]"} <= set(done.output.split())


def test_runs_of_other_data_or_of_another_source_are_other_runs(tmp_path, monkeypatch):
    def key(**values: Any) -> str:
        return PlannedRun({}, RunConfig.load({k.replace("_", "-"): v for k, v in values.items()}), 2).key

    assert key(dataset="npz", data_path="/a.npz") != key(dataset="npz", data_path="/b.npz")
    assert key(dataset="mnist", data_path="/a") == key(dataset="mnist", data_path="/b")  # the same, elsewhere
    assert key(dataset="synthetic") != key(dataset="synthetic", data_path="/a")  # generated, and the authors'
    assert key(dataset="synthetic", data_path="/a") == key(dataset="synthetic", data_path="/b")
    monkeypatch.chdir(tmp_path)
    here = key(dataset="hf:./data")
    assert key(dataset=f"hf:{tmp_path}/data") == here
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    assert key(dataset="hf:./data") != here
    monkeypatch.syspath_prepend(str(tmp_path))
    source = tmp_path / "own_sweep_strategy.py"
    source.write_text("from strategies import FedAvg\nclass Mine(FedAvg):\n    pass\n")
    before = key(strategy="own_sweep_strategy:Mine")
    assert before == key(strategy="own_sweep_strategy:Mine")
    source.write_text(source.read_text() + "# changed\n")
    assert key(strategy="own_sweep_strategy:Mine") == before  # what was imported is what runs
    importlib.reload(sys.modules["own_sweep_strategy"])
    assert key(strategy="own_sweep_strategy:Mine") != before


def test_a_sweep_of_data_that_have_changed_makes_its_runs_anew(tmp_path):
    """Finished runs of the former values stay, and are found again with these."""
    path, rng = tmp_path / "own.npz", np.random.default_rng(0)
    former, latter = rng.normal(size=(2, 40, 3)).astype(np.float32)
    words = [
        "seed=0",
        "-c",
        f"num-server-rounds=1 model=logistic dataset=npz data-path={path}",
        "num-clients=2",
    ]

    def loss_of(x: np.ndarray) -> float:
        np.savez(path, x_train=x, y_train=np.arange(40) % 2)
        done = command(*words, "--engine", "sequential", "-o", str(tmp_path / "out"))
        assert done.exit_code == 0, done.output
        return float(pd.read_csv(tmp_path / "out" / "runs.csv")["loss"].iloc[-1])

    first = loss_of(former)
    assert loss_of(latter) != first
    assert len(list((tmp_path / "out" / "runs").glob("*/summary.json"))) == 2
    stamps = {
        each: each.stat().st_mtime_ns for each in (tmp_path / "out" / "runs").glob("*/model.safetensors")
    }
    assert loss_of(former) == first
    assert stamps == {each: each.stat().st_mtime_ns for each in stamps}


@pytest.mark.slow
def test_a_sweep_on_ray_is_the_sweep_in_process(tmp_path):
    here = command("seed=0", "-c", TINY, "--engine", "sequential", "-o", str(tmp_path / "here"))
    ray = command("seed=0", "-c", TINY, "--engine", "ray", "-o", str(tmp_path / "ray"))
    assert (here.exit_code, ray.exit_code) == (0, 0), ray.output
    columns = ["seed", "aggregation", "loss", "accuracy"]
    frames = [pd.read_csv(tmp_path / name / "runs.csv")[columns] for name in ("here", "ray")]
    pd.testing.assert_frame_equal(*frames, check_exact=True)


def test_processes_and_engines_give_one_result(swept, tmp_path):
    out, _ = swept
    planned = plan_of(["lr=0.5", "seed=0-1"], [TINY], None, {})
    outcome = make_sweep(planned, tmp_path, engine="vectorized", jobs=0, console=Console(quiet=True))
    write_results(outcome)
    mine, other = (pd.read_csv(folder / "runs.csv") for folder in (tmp_path, out))
    np.testing.assert_allclose(mine["loss"], other[other["lr"] == 0.5]["loss"], rtol=1e-5)
