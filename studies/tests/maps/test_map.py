"""``fedapp map``: a real, tiny map on the digits, and the shipped one's plan."""

import io
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import tomli_w
from PIL import Image
from rich.console import Console
from typer.testing import CliRunner

from fedapp.cli import app
from fedapp.config import ConfigError
from fedapp.config.options import SimulationConfig
from fedapp.engine.run import run_on
from fedapp.report.recorded import RecordedRun
from fedapp.sweeps.plan import checked, read_file
from fedapp.sweeps.point import PlannedRun, folder_of
from studies.maps.command import _plan_of
from studies.maps.curves import FILE, metric_in, read_curves
from studies.maps.making import MapRuns
from studies.maps.plan import MapPlan, Spot
from studies.maps.report import write_report
from studies.maps.search import candidates

SHIPPED = Path(__file__).parents[2] / "experiments" / "map.toml"
TINY: dict[str, Any] = {
    "title": "tiny",
    "seeds": [0, 1],
    "base": {
        "num-clients": 3,
        "local-epochs": 0,
        "local-steps": 2,
        "time-budget": 2.0,
        "num-server-rounds": 1000,
        "client-records": "never",
        "checkpoint-every": 0,
    },
    "across": {"name": "data", "values": [{"label": "even", "class-imbalance": 0.0}]},
    "upwards": {
        "name": "speed",
        "values": [{"label": "1", "time-scenario": "F0"}, {"label": "5", "time-scenario": "F80"}],
    },
    "problems": {"logistic": {"target": 0.2, "tried": [0.1, 0.5], "keys": {"model": "logistic"}}},
    "methods": {
        "fedavg": {"strategy": "fedavg", "same-upwards": True},
        "async-fedavg": {"strategy": "async-fedavg", "eval-every": [3, 6]},
    },
    "tuning": {"seeds": [9], "tries": 2, "steps": 1},
    "rule": {"text": "the rule"},
    "quick": {"note": "one row", "upwards": ["5"], "seeds": [0]},
}
JUDGED = 2 + 2 * 2  # on two seeds: fedavg once, the other in both rows
TRIED = 2 + 2 * 2  # the same of two values; a walk goes on to others


def command(*arguments: str):
    return CliRunner().invoke(app, ["map", *arguments], env={"COLUMNS": "120"})


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plan") / "tiny.toml"
    path.write_text(tomli_w.dumps(TINY))
    return path


def make(out: Path, **changes: Any) -> str:
    """Make what a folder lacks of the map, in this process, and its report; return what is said."""
    plan, said = checked("x", {**TINY, **changes}, MapPlan), Console(file=io.StringIO(), width=200)
    runs = MapRuns(plan, out, engine="sequential", jobs=0, console=said)
    runs.make()
    assert all(why.startswith("diverged") for why in runs.failures.values())  # as far steps of a walk may
    write_report(plan, runs.curves, runs.versions, out)
    return said.file.getvalue()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fedapp.server.journal.draw_figures", lambda *_: None)
        out = tmp_path_factory.mktemp("map") / "own"
        out.mkdir()
        yield out, make(out)


def test_a_map_says_how_long_it_takes_and_leaves_picture_table_and_curves(made):
    out, said = made
    assert "0 of 2 cells are complete, 0 runs\n" in said
    assert "cell 2 of 2: logistic, data even, speed 5" in said
    curves, _ = read_curves(out / FILE)
    seeds = [each.labels["seed"] for each in curves.values()]
    assert len(curves) == len(list(out.glob("runs/*/summary.json"))) > TRIED + JUDGED
    assert len(seeds) - seeds.count(9) == JUDGED
    table = pd.read_csv(out / "map.csv")
    assert table[["upwards", "method", "runs"]].to_numpy().tolist() == [
        [upwards, method, 2] for upwards in (1, 5) for method in ("fedavg", "async-fedavg")
    ]
    first, third = table[table["method"] == "fedavg"].to_dict("records")
    assert first["mean"] == third["mean"]  # one round is as long as the slowest client's task in both rows
    image = Image.open(out / "map.png")
    assert image.width == 1200
    assert len(np.unique(np.asarray(image.convert("L")))) > 20
    report = (out / "report.md").read_text()
    assert "**Rule**, fixed before the runs. the rule" in report
    assert "| fedavg | `strategy = fedavg` | `lr` 0.1, 0.5 |  |" in report


def test_the_command_makes_a_map_in_processes_of_its_own(plan_file, tmp_path):
    done = command(str(plan_file), "--quick", "--engine", "sequential", "-o", str(tmp_path))
    assert done.exit_code == 0, done.output
    assert "0 of 1 cells are complete" in done.output
    for name in ("map.png", "map.csv", "report.md"):
        assert str(tmp_path / name) in done.output.replace("\n", "")
    assert pd.read_csv(tmp_path / "map.csv")["upwards"].tolist() == [5, 5]


def test_the_measures_are_those_of_the_runs(made):
    out, _ = made
    table = pd.read_csv(out / "map.csv").set_index(["upwards", "method"])
    row = table.loc[(5, "async-fedavg")]
    means, times = [], []
    plan = checked("x", TINY, MapPlan)
    for seed in plan.seeds:
        key, _, value = row["tuned"].partition("=")
        run = plan.run(Spot("logistic", "even", "5"), "async-fedavg", ((key, float(value)),), seed)
        folder = folder_of(run, out / "runs")
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        lines = [line for line in lines if line["time"] <= 2.0]
        ends = [*(line["time"] for line in lines[1:]), 2.0]
        means.append(
            sum(line["accuracy"] * (end - line["time"]) for line, end in zip(lines, ends, strict=True)) / 2
        )
        times.append(next((line["time"] for line in lines if line["accuracy"] >= 0.2), None))
    assert row["mean"] == pytest.approx(np.mean(means), abs=1e-6)
    assert row["reached"] == sum(time is not None for time in times)
    if row["reached"] == 2:
        assert row["time"] == pytest.approx(np.mean(times), abs=1e-6)


def test_what_is_there_is_not_made_again_and_the_report_alone_is_the_same(made, plan_file, tmp_path):
    out, _ = made
    copy = tmp_path / "copy"
    shutil.copytree(out, copy)
    told = {name: (copy / name).read_bytes() for name in ("map.png", "map.csv", "report.md", FILE)}
    shutil.rmtree(copy / "runs")  # the curves hold all that is needed
    for name in ("map.png", "map.csv", "report.md"):
        (copy / name).unlink()
    done = command(str(plan_file), "--from-results", "--jobs", "2", "-o", str(copy))
    assert done.exit_code == 0, done.output
    assert "not read with --from-results: --jobs" in done.output
    assert {name: (copy / name).read_bytes() for name in told} == told
    number = len(read_curves(copy / FILE)[0])
    assert f"2 of 2 cells are complete, {number} runs, about 0.0 hours" in make(copy)
    assert not (copy / "runs").exists()
    assert {name: (copy / name).read_bytes() for name in told} == told


def test_a_map_that_was_stopped_goes_on_with_what_is_missing(made, tmp_path):
    out, _ = made
    copy = tmp_path / "copy"
    shutil.copytree(out, copy)
    (copy / FILE).unlink()  # killed before it was written
    cut_off, gone = sorted(path.parent for path in copy.glob("runs/*/summary.json"))[:2]
    (cut_off / "summary.json").write_text('{"status": "running"}')
    shutil.rmtree(gone)
    before = {path.parent.name: path.stat().st_mtime_ns for path in copy.glob("runs/*/summary.json")}
    make(copy)
    after = {path.parent.name: path.stat().st_mtime_ns for path in copy.glob("runs/*/summary.json")}
    assert {name for name in before if after[name] != before[name]} == {cut_off.name}
    assert len(after) == len(list(out.glob("runs/*/summary.json")))
    assert (copy / "map.csv").read_bytes() == (out / "map.csv").read_bytes()


def test_curves_of_another_metric_are_made_anew_from_the_runs(made, plan_file, tmp_path):
    out, _ = made
    copy = tmp_path / "copy"
    shutil.copytree(out, copy)
    other = tmp_path / "other.toml"
    other.write_text(tomli_w.dumps({**TINY, "metric": "loss"}))
    done = command(str(other), "--from-results", "-o", str(copy))
    assert (done.exit_code, done.output) == (
        1,
        f"error: --from-results: {copy / FILE} has accuracy, not loss\n",
    )
    said = make(copy, metric="loss")
    assert (
        f"{FILE} has accuracy, not loss: it is kept as curves-accuracy.parquet, and made anew from what runs holds"
        in said
    )
    curves, _ = read_curves(copy / FILE)
    assert metric_in(copy / FILE) == "loss"
    for key, curve in curves.items():
        (folder,) = copy.glob(f"runs/*-{key}")
        np.testing.assert_array_equal(curve.values, RecordedRun(folder).column("loss"))
    assert (copy / "curves-accuracy.parquet").read_bytes() == (out / FILE).read_bytes()  # nothing is lost
    assert set(stamps(out)) <= set(stamps(copy))  # another value may be best by it
    assert {name: stamps(copy)[name] for name in stamps(out)} == stamps(out)  # and none was made again
    assert command(str(other), "--from-results", "-o", str(copy)).exit_code == 0


@pytest.mark.parametrize("options", [("--from-results",), ("--engine", "sequential")])
def test_curves_of_something_else_are_left_as_they_are(options, plan_file, tmp_path):
    damaged, of_experiment = b"no parquet", SHIPPED.parent / "results" / "fedbuff-tuned" / FILE
    for content in (damaged, of_experiment.read_bytes()):
        (tmp_path / FILE).write_bytes(content)
        done = command(str(plan_file), *options, "-o", str(tmp_path))
        assert (done.exit_code, done.output) == (
            1,
            f"error: {tmp_path / FILE}: holds no curves of a map; another folder, -o, or without that file\n",
        )
        assert (tmp_path / FILE).read_bytes() == content


def test_a_folder_that_can_not_be_made_is_one_line(plan_file, tmp_path):
    (tmp_path / "file").touch()
    done = command(str(plan_file), "-o", str(tmp_path / "file" / "own"))
    assert (done.exit_code, done.output) == (
        1,
        f"error: [Errno 20] Not a directory: '{tmp_path / 'file' / 'own'}'\n",
    )


def stamps(folder: Path) -> dict[str, int]:
    return {path.parent.name: path.stat().st_mtime_ns for path in folder.glob("runs/*/summary.json")}


def test_a_metric_that_no_run_has_is_said_at_once_or_after_the_first(tmp_path):
    with pytest.raises(
        ConfigError, match="metric: 'acuracy' is measured in no run; allowed are loss, accuracy"
    ):
        checked("x", {**TINY, "metric": "acuracy"}, MapPlan)
    methods = {name: {**own, "metrics": "top5"} for name, own in TINY["methods"].items()}
    assert checked("x", {**TINY, "metric": "top5", "methods": methods}, MapPlan).metric == "top5"
    plan = checked("x", {**TINY, "metric": "personal-accuracy-mean"}, MapPlan)  # some methods have it
    runs = MapRuns(plan, tmp_path, engine="sequential", jobs=0, console=Console(file=io.StringIO()))
    with pytest.raises(
        ConfigError, match=r"metric = 'personal-accuracy-mean': .* has none; there are accuracy, l"
    ):
        runs.make()
    assert len(list(tmp_path.glob("runs/*/summary.json"))) == 4  # what the first cell begins with


def first_tries(plan: MapPlan) -> list[PlannedRun]:
    return [
        plan.run(spot, method, candidate, plan.tuning.seeds[0])
        for spot, method in plan.places
        for candidate in candidates(plan, spot.problem, method)
    ]


def test_what_is_tuned_may_be_a_whole_number():
    problem = {"target": 0.2, "tried": [5, 10], "keys": {"model": "logistic"}}
    base = {key: value for key, value in TINY["base"].items() if key != "local-steps"}
    content = {
        **TINY,
        "base": base,
        "tuning": {"key": "local-steps", "seeds": [9], "tries": 2},
        "problems": {"logistic": problem},
    }
    plan = checked("x", content, MapPlan)
    assert {run.config.local_steps for run in first_tries(plan)} == {5, 10}
    ones = {"whole": 1, "float": 1.0}
    keys = set()
    for tried in ones.values():  # of a key that is a float they are the same run
        problem = {**TINY["problems"]["logistic"], "tried": [tried]}
        keys.add(first_tries(checked("x", {**TINY, "problems": {"logistic": problem}}, MapPlan))[0].key)
    assert len(keys) == 1


def test_a_problem_that_names_its_data_is_given_the_folder(tmp_path):
    mnist = {**TINY["problems"]["logistic"], "keys": {"model": "logistic", "dataset": "mnist"}}
    embedded = {**mnist, "keys": {**mnist["keys"], "dataset": "digits"}}
    folder = str(tmp_path)

    def paths(base: dict[str, Any], **problems: Any) -> dict[str, set[str]]:
        path = tmp_path / "map.toml"
        path.write_text(tomli_w.dumps({**TINY, "base": {**TINY["base"], **base}, "problems": problems}))
        plan = _plan_of(path, folder, quick=False)
        runs = first_tries(plan)
        return {
            name: {run.config.data_path for run in runs if run.labels["problem"] == name} for name in problems
        }

    plain = TINY["problems"]["logistic"]
    assert paths({}, plain=plain, own=mnist) == {"plain": {""}, "own": {folder}}
    assert paths({"dataset": "mnist"}, plain=plain, own=embedded) == {"plain": {folder}, "own": {""}}
    with pytest.raises(ConfigError, match="needs no data but what comes with the app"):
        paths({}, plain=plain, own=embedded)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"seeds": [0, 1, 0]}, "seeds: 0 is there twice"),
        ({"tuning": {**TINY["tuning"], "seeds": [9, 9]}}, "tuning.seeds: 9 is there twice"),
        (
            {
                "methods": {
                    **TINY["methods"],
                    "fedavg": {"strategy": "fedavg", "same-upwards": True, "eval-every": [1, 2]},
                }
            },
            "methods.fedavg.eval-every: has several values, beside same-upwards",
        ),
    ],
)
def test_what_would_be_read_in_part_is_refused(changes, said):
    with pytest.raises(ConfigError, match=said):
        checked("x", {**TINY, **changes}, MapPlan)


def test_a_method_may_be_in_some_rows_alone(tmp_path):
    steps = {"strategy": "fednova", "step-heterogeneity": "speed", "only-upwards": ["5"]}
    content = {**TINY, "methods": {**TINY["methods"], "steps": steps}}
    plan = checked("x", content, MapPlan)
    assert {spot.upwards: plan.methods_of(spot) for spot in plan.spots} == {
        "1": ["fedavg", "async-fedavg"],
        "5": ["fedavg", "async-fedavg", "steps"],
    }
    assert plan.number_judged() == JUDGED + 2
    MapRuns(plan, tmp_path, engine="sequential", jobs=0, console=Console(file=io.StringIO())).make()
    write_report(plan, *read_curves(tmp_path / FILE), tmp_path)
    table = pd.read_csv(tmp_path / "map.csv", dtype={"upwards": str})
    assert table.groupby("upwards")["method"].agg(list).to_dict() == {
        "1": ["fedavg", "async-fedavg"],
        "5": ["fedavg", "async-fedavg", "steps"],
    }
    for row, methods in (("5", 3), ("1", 2)):
        quick = {"note": "", "upwards": [row]}
        assert len(checked("x", {**content, "quick": quick}, MapPlan).quick_content()["methods"]) == methods
    for wrong in ("5", ["50"], []):
        methods = {**TINY["methods"], "steps": {**steps, "only-upwards": wrong}}
        with pytest.raises(ConfigError, match=r"methods.steps.only-upwards: .* of labels upwards: 1, 5"):
            checked("x", {**TINY, "methods": methods}, MapPlan)


def test_what_can_not_be_is_said_before_a_run_begins(plan_file, tmp_path):
    out = tmp_path / "out"
    for arguments, said in (
        (("no.toml",), "no.toml: no such file"),
        ((str(plan_file), "--data-path", "/no/such"), "--data-path '/no/such': no such folder or file"),
        ((str(plan_file), "--data-path", "/"), "needs no data but what comes with the app"),
        ((str(plan_file), "--engine", "ray"), "--engine ray: allowed are sequential, vectorized"),
        ((str(plan_file), "--from-results"), f"--from-results: there is no {out / FILE}"),
    ):
        done = command(*arguments, "-o", str(out))
        assert (done.exit_code, done.output.startswith("error: ")) == (1, True)
        assert said in done.output
    wrong = tmp_path / "wrong.toml"
    wrong.write_text(tomli_w.dumps({**TINY, "base": {**TINY["base"], "batch-size": -1}}))
    done = command(str(wrong), "-o", str(out))
    assert (done.exit_code, "batch-size" in done.output) == (1, True)
    assert not list(out.glob("runs/*"))


def test_runs_with_a_key_that_is_gone_are_found_and_not_made(tmp_path):
    methods = {**TINY["methods"], "deadline": {"strategy": "fedavg", "round-deadline": 0.5, "late": "next"}}
    with pytest.raises(ConfigError, match=r"methods.deadline: late = 'next': is no key any more"):
        make(tmp_path, methods=methods)
    assert not list(tmp_path.glob("runs/*"))


def test_quick_leaves_what_it_names():
    whole = checked("x", TINY, MapPlan)
    small = checked("x", whole.quick_content(), MapPlan)
    assert (small.upwards.labels, small.seeds, small.title) == (["5"], [0], "tiny (one row)")
    assert small.methods["async-fedavg"]["eval-every"] == [6]
    away = {**TINY["problems"]["logistic"], "upwards": ["1"]}  # a problem without the row that is kept
    problems = {**TINY["problems"], "away": away}
    more = checked("x", {**TINY, "problems": problems}, MapPlan)
    assert checked("x", more.quick_content(), MapPlan).spots == small.spots
    with pytest.raises(ConfigError, match=r"has no \[quick\]"):
        small.quick_content()
    bad = checked("x", {**TINY, "quick": {"note": "", "methods": ["fedsgd"]}}, MapPlan)
    with pytest.raises(
        ConfigError, match=r"quick.methods: 'fedsgd' isn't there; allowed are fedavg, async-fedavg"
    ):
        bad.quick_content()


ROUNDS = ("fedavg", "fedavgm", "fedadam", "fedprox", "spectral", "fednova", "scaffold", "feddyn", "mifa")


@pytest.mark.parametrize("method", ROUNDS)
def test_a_round_is_as_long_whatever_the_others_need(method, tmp_path):
    """What ``same-upwards`` says in the shipped map, of real runs."""
    plan = read_file(SHIPPED, MapPlan)
    marked = [name for name, own in plan.methods.items() if "same-upwards" in own]
    assert [name for name in marked if not plan.is_added(name)] == list(ROUNDS)
    assert {plan.family(name) for name in marked} <= set(ROUNDS)  # with Adam the rounds are as long
    candidate, *_ = candidates(plan, "mnist", method)
    columns = []
    for scenario in ("F0", "F98"):
        run = plan.run(plan.spots[0], method, candidate, 0)
        changes = {
            "dataset": "digits",
            "time_scenario": scenario,
            "time_budget": 2.0,
            "results_dir": str(tmp_path),
            "run_name": scenario,
            "local_steps": 2,
        }
        config = run.config.model_copy(update=changes)
        path = run_on("vectorized", config, SimulationConfig.read({"num-supernodes": 5}), workers=1).path
        recorded = RecordedRun(path)
        columns.append((recorded.column("time").tolist(), recorded.column("accuracy").tolist()))
    assert columns[0] == columns[1]
    assert columns[0][0] == [0.0, 1.0, 2.0]
