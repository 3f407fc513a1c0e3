"""Runs that are made, found again, repeated and reported, in real worker processes."""

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedapp.cli import app
from fedapp.config import ConfigError
from fedapp.sweeps.point import is_finished
from fedapp.sweeps.runner import only_one, perform, run_missing
from studies.reproduce.plan import folder_of_plans
from studies.reproduce.store import FILE

ENGINE = {"engine": "sequential"}


def stamps(folder: Path) -> dict[str, int]:
    return {path.parent.name: path.stat().st_mtime_ns for path in folder.glob("*/summary.json")}


def test_only_what_is_not_there_is_run_and_failures_do_not_stop_the_rest(plan, tmp_path):
    cases = [{"label": "good"}, {"label": "bad", "dataset": "mnist"}]
    planned = plan(grid={"seed": [0, 1], "case": cases}).runs("/nowhere")
    good, bad = planned[::2], planned[1::2]
    failures = run_missing(planned, tmp_path, **ENGINE, jobs=1)
    assert sorted(failures) == sorted(run.name for run in bad)
    assert all("no such file" in reason for reason in failures.values())
    assert [is_finished(tmp_path / run.name) for run in good] == [True, True]
    before = stamps(tmp_path)

    (tmp_path / good[1].name / "summary.json").write_text(
        '{"status": "running"}'
    )  # killed, with no checkpoint
    assert run_missing(good, tmp_path, **ENGINE, jobs=1) == {}
    assert is_finished(tmp_path / good[1].name)
    after = stamps(tmp_path)
    assert after[good[0].name] == before[good[0].name]
    assert after[good[1].name] != before[good[1].name]


def test_no_time_is_no_run(plan, tmp_path):
    assert run_missing(plan().runs(), tmp_path, **ENGINE, jobs=1, minutes=0) == {}
    assert stamps(tmp_path) == {}


def test_a_part_of_the_grid_can_be_run(plan, tmp_path):
    planned = plan().runs()
    run_missing(planned, tmp_path, **ENGINE, jobs=1, only="*seed-1*")
    assert list(stamps(tmp_path)) == [planned[1].name]
    with pytest.raises(ConfigError, match="--only seed-9: no run has such a name"):
        run_missing(planned, tmp_path, **ENGINE, jobs=1, only="seed-9")


def test_a_run_is_found_under_another_name_and_run_once_for_all_its_points(plan, tmp_path):
    twice = [{"label": "one"}, {"label": "the same"}]
    planned = plan(grid={"case": twice}).runs()
    run_missing(planned, tmp_path, **ENGINE, jobs=1)
    before = stamps(tmp_path)
    assert len(before) == 1
    run_missing(plan(grid={"case": [{"label": "renamed"}]}).runs(), tmp_path, **ENGINE, jobs=1)
    assert stamps(tmp_path) == before


@pytest.mark.figures
def test_a_run_that_was_killed_goes_on_from_its_checkpoint(plan, tmp_path):
    base = {**plan().base, "num-server-rounds": 6, "checkpoint-every": 1, "figures": True}
    planned = plan(base=base).runs()[0]
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert perform(planned, whole, "sequential") == ""
    shutil.copytree(whole, cut)
    run = cut / planned.name
    # What a kill after the last checkpoint leaves behind: no word of an end.
    summary = json.loads((run / "summary.json").read_text())
    (run / "summary.json").write_text(json.dumps({**summary, "status": "running"}))
    stamp = (run / "partition.png").stat().st_ino
    assert perform(planned, cut, "sequential") == ""
    assert json.loads((run / "summary.json").read_text())["status"] == "finished"
    assert (run / "model.safetensors").read_bytes() == (
        whole / planned.name / "model.safetensors"
    ).read_bytes()
    assert (run / "metrics.jsonl").read_text() == (whole / planned.name / "metrics.jsonl").read_text()
    assert (run / "partition.png").stat().st_ino != stamp  # it did go on


def test_two_processes_do_not_share_a_folder(tmp_path):
    with only_one(tmp_path), pytest.raises(ConfigError, match="another process"), only_one(tmp_path):
        pass


def command(*arguments: str):
    return CliRunner().invoke(app, ["reproduce", *arguments])


def test_the_command_makes_a_report_and_makes_it_again_from_the_curves_alone(plan_file, tmp_path):
    axis = [{"label": name, "strategy": name, "fraction-train": 1.0} for name in ("fedavg", "fedprox")]
    claim = {"text": "nobody looks at this one", "rule": "never"}
    path = plan_file(grid={"seed": [0, 1], "strategy": axis}, claims={"000-0": claim})
    arguments = [path, "--quick", "--engine", "sequential", "--out", str(tmp_path / "out")]
    result = command(*arguments)
    assert result.exit_code == 0, result.output
    folder = tmp_path / "out" / "mine-quick"
    report = (folder / "report.md").read_text()
    assert "**Quick**: one seed" in report
    assert "- 2 of 2 runs, seeds 0, " in report
    assert "Full settings" not in report
    assert "| 000-0 | nobody looks at this one | never | **not run** |" in report
    assert (folder / "comparison.png").stat().st_size < 150_000
    assert len((folder / "table.csv").read_text().splitlines()) == 1 + 2 * 4
    assert str(tmp_path) not in report

    made = {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}
    assert set(made) == {"report.md", "claims.csv", "table.csv", "comparison.png", FILE}
    shutil.rmtree(folder / "runs")
    for name in set(made) - {FILE}:
        (folder / name).unlink()
    assert command(*arguments, "--from-results").exit_code == 0
    assert {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()} == made
    assert command(*arguments).exit_code == 0  # what is in the file isn't run again
    assert not list(folder.glob("runs/*/summary.json"))
    assert (folder / FILE).read_bytes() == made[FILE]


def test_the_command_says_what_is_missing(plan_file, tmp_path):
    result = command(plan_file(), "--from-results", "--out", str(tmp_path / "out"))
    assert result.exit_code == 1
    assert "there is no" in str(result.exception) + result.output
    arguments = ("--from-results", "--data-path", "/no/such", "--out", str(tmp_path / "out"))
    result = CliRunner().invoke(app, ["reproduce", plan_file(), *arguments])
    assert "not read with --from-results: --data-path" in result.output
    assert "there is no" in result.output
    assert "no such folder" not in result.output
    assert command("--summary", "--out", str(tmp_path / "out")).exit_code == 0
    assert "Nothing is there yet." in (tmp_path / "out" / "README.md").read_text()


def test_the_command_lists_experiments_and_names_what_is_wrong(tmp_path):
    listed = CliRunner().invoke(app, ["reproduce", "--list"])
    assert listed.exit_code == 0
    assert "003-table-4-2" in listed.output
    assert "[003-3-direction," in listed.output
    unknown = CliRunner().invoke(app, ["reproduce", "004", "--out", str(tmp_path)])
    assert unknown.exit_code == 1
    assert "NAME = '004': allowed are 000-femnist" in str(unknown.exception) + unknown.output
    assert "\nmap " not in listed.output
    a_map = CliRunner().invoke(app, ["reproduce", "map", "--out", str(tmp_path)])
    assert a_map.exit_code == 1
    assert a_map.output.startswith("error: NAME = 'map': is a map, for fedapp map; allowed are 000-femnist")
    engine = CliRunner().invoke(app, ["reproduce", "compare", "--engine", "ray"])
    assert engine.exit_code == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--list", "--quick"], "--list: doesn't read --quick"),
        (["--summary", "--jobs", "2"], "--summary: doesn't read --jobs"),
        (["001-floor", "--only", "x"], "001-floor: is a study without runs, which doesn't read --only"),
        (["--quick"], "--quick: of which experiment? --list names them"),
        (["000-femnist", "--data-path", "/no/such"], "--data-path '/no/such': no such folder"),
        (
            ["001-floor", "--data-path", "/"],
            "--data-path '/': 001-floor needs no data but what comes with the app",
        ),
        (
            ["compare", "--data-path", "/"],
            "--data-path '/': compare needs no data but what comes with the app",
        ),
    ],
)
def test_an_option_that_would_go_unread_is_refused_before_anything_starts(arguments, said, tmp_path):
    out = [] if "--list" in arguments or arguments == ["--quick"] else ["--out", str(tmp_path / "out")]
    done = CliRunner().invoke(app, ["reproduce", *arguments, *out])
    assert (done.exit_code, done.output) == (1, f"error: {said}\n")
    assert not (tmp_path / "out").exists()


def test_a_run_that_diverged_to_its_end_is_kept_and_not_repeated(plan, tmp_path):
    planned = plan(base={**plan().base, "lr": 1e4, "model": "mlp"}).runs()[:1]
    (told,) = run_missing(planned, tmp_path, **ENGINE, jobs=1).values()
    assert told.startswith("diverged: the loss came to")
    assert json.loads((tmp_path / planned[0].name / "summary.json").read_text())["status"] == "diverged"
    assert is_finished(tmp_path / planned[0].name)
    before = (tmp_path / planned[0].name / "metrics.jsonl").stat().st_mtime_ns
    assert list(run_missing(planned, tmp_path, **ENGINE, jobs=1).values()) == [told]
    assert (tmp_path / planned[0].name / "metrics.jsonl").stat().st_mtime_ns == before


def test_data_that_are_not_at_hand_are_said_once_before_any_run(tmp_path):
    experiment = tmp_path / "mine.toml"
    text = (folder_of_plans() / "compare.toml").read_text("utf-8")
    experiment.write_text(text.replace('dataset = "digits"', 'dataset = "cifar10"', 1), "utf-8")
    (tmp_path / "data").mkdir()
    arguments = [
        "reproduce",
        str(experiment),
        "--data-path",
        str(tmp_path / "data"),
        "--out",
        str(tmp_path / "out"),
    ]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 1
    assert done.output.count("error: ") == 1
    assert "data-path" in done.output
    assert not (tmp_path / "out" / "mine" / "runs").exists()


def test_where_every_run_fails_the_command_does(tmp_path):
    experiment = tmp_path / "mine.toml"
    text = (folder_of_plans() / "compare.toml").read_text("utf-8")
    experiment.write_text(text.replace("[base]\n", "[base]\nmin-clients = 1000\n", 1), "utf-8")
    arguments = [
        "reproduce",
        str(experiment),
        "--quick",
        "--engine",
        "sequential",
        "--out",
        str(tmp_path / "out"),
    ]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 1
    assert "error: every run failed, " in done.output
    assert "failed or diverged, see above)" in done.output
    assert "min-clients = 1000: there are" in done.output
