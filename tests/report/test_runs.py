"""``fedapp list``: how runs stand, what tells them apart, and what came of each device's work."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from fedapp.cli import app
from fedapp.report.client_tables import ClientsFile
from fedapp.report.differences import descriptions, differing
from fedapp.report.files import GONE, this_process
from fedapp.report.runs import client_tables_of, runs_in

CLIENTS: dict[str, Any] = {
    "participation": [9.0, 0.0],
    "tasks": [10.0, 4.0],
    "late": [1.0, 0.0],
    "failed": [0.0, 3.0],
    "refused": [0.0, 1.0],
    "discarded": [0.0, 0.0],
    "clipped": [2.0, 0.0],
}


def write_run(folder: Path, summary: Any, *evaluations: Any, config: str = "seed = 0\n") -> Path:
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(config)
    if summary is not None:
        (folder / "summary.json").write_text(json.dumps(summary))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in evaluations))
    return folder


def with_clients(run: Path, names: dict[int, str]) -> Path:
    """Add rows of the last evaluation's clients."""
    file = ClientsFile(run)
    file.append(40, 0.0, CLIENTS, names)
    file.publish(last=True)
    return run


@pytest.fixture
def results(tmp_path):
    run = write_run(
        tmp_path / "done",
        {"status": "finished", "strategy": "fedbuff", "aggregations": 40, "accuracy": 0.9123, "loss": 0.25},
        {"aggregation": 0},
        {"aggregation": 40},
    )
    with_clients(run, {0: "oslo"})
    write_run(
        tmp_path / "killed",
        {"status": "running", "strategy": "fedavg", "aggregations": 3, "process": this_process()},
        {"aggregation": 3, "loss": 1.0},
    )
    write_run(tmp_path / "young", None)
    (tmp_path / "no run").mkdir()
    return tmp_path


def shown(*arguments: str) -> list[list[str]]:
    done = CliRunner().invoke(app, ["list", *arguments], env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    return [line.split() for line in done.output.splitlines() if line.split()]


def test_every_run_of_a_folder_is_a_row(results):
    assert [path.name for path in runs_in(results)] == ["done", "killed", "young"]
    rows = shown(str(results))
    assert ["done", "finished", "fedbuff", "?", "40", "0.9123", "0.2500"] in rows
    assert ["killed", "failed", "fedavg", "?", "3", "-", "-"] in rows
    assert ["killed:", *GONE.split()] in rows
    assert ["young", "?", "?", "?", "?", "-", "-"] in rows
    assert json.loads((results / "killed" / "summary.json").read_text())["status"] == "failed"


def test_brackets_in_names_are_shown(tmp_path):
    names = ["cnn[iid]", "cnn[dir]", "[", "[red]"]
    for name in names:
        write_run(tmp_path / name, {"status": "finished", "strategy": "fedavg"})
    closing = 'optimizer-options = "[/x]"\n'  # markup that closes nothing is an error
    write_run(tmp_path / "other", {"status": "finished", "strategy": "fedavg"}, config=closing)
    rows = shown(str(tmp_path))
    assert {row[0] for row in rows if "finished" in row} == {*names, "other"}
    assert any("optimizer-options=[/x]" in row for row in rows)
    run = write_run(tmp_path / "devices", {"status": "finished", "strategy": "fedbuff"}, {"aggregation": 40})
    with_clients(run, {0: "oslo[1]", 1: "[/x]"})
    assert [row[:2] for row in shown(str(tmp_path / "devices"))[-2:]] == [["0", "oslo[1]"], ["1", "[/x]"]]


def test_a_runs_own_folder_shows_its_devices(results):
    rows = shown(str(results / "done"))
    assert [
        "client",
        "name",
        "tasks",
        "counted",
        "late",
        "failed",
        "refused",
        "too",
        "old",
        "clipped",
    ] in rows
    assert ["0", "oslo", "10", "9", "1", "0", "0", "0", "2"] in rows
    assert ["1", "4", "0", "0", "3", "1", "0", "0"] in rows
    assert ["devices"] not in shown(str(results / "killed"))


def test_devices_fit_a_narrow_terminal(results):
    console = Console(width=80, record=True, file=None)
    with console.capture() as capture:
        console.print(*client_tables_of(results / "done"))
    assert "…" not in capture.get()


def test_a_folder_without_runs_is_one_line(tmp_path):
    done = CliRunner().invoke(app, ["runs", str(tmp_path)])
    assert done.exit_code == 1
    assert done.output == f"error: {tmp_path}: holds no run, a folder with a config.toml\n"


def test_a_row_says_what_tells_a_run_from_the_others(tmp_path):
    shared = 'strategy = "fedavg"\ndataset = "digits"\nlr = 0.1\nbatch-size = 8\nresults-dir = "{0}"\n'
    for number in range(2):
        config = (
            shared.format(number)
            + f"seed = {number}\nnum-clients = {5 + number}\n[versions]\nray = '{number}'\n"
        )
        write_run(tmp_path / f"r{number}", {"status": "finished", "strategy": "fedavg"}, config=config)
    rows = shown(str(tmp_path))
    assert ["r0", "finished", "fedavg", "digits", "num-clients=5", "seed=0", "?", "-", "-"] in rows
    assert ["r1", "finished", "fedavg", "digits", "num-clients=6", "seed=1", "?", "-", "-"] in rows


def test_runs_on_data_of_ones_own_are_listed_by_their_files(tmp_path):
    for name in ("easy", "hard"):
        config = f'strategy = "fedavg"\ndataset = "npz"\ndata-path = "/data/{name}.npz"\n'
        write_run(tmp_path / name, {"status": "finished", "strategy": "fedavg"}, config=config)
    rows = shown(str(tmp_path))
    assert ["easy", "finished", "fedavg", "easy.npz", "data-path=easy.npz", "?", "-", "-"] in rows
    assert ["hard", "finished", "fedavg", "hard.npz", "data-path=hard.npz", "?", "-", "-"] in rows


def test_runs_of_a_sweep_are_listed_in_its_folder_and_counted_above_it(tmp_path):
    for number in range(3):
        write_run(tmp_path / "swept" / "runs" / f"r{number}", {"status": "finished", "strategy": "fedavg"})
    assert ["3", "runs", "of", "a", "sweep:", "fedapp", "list", str(tmp_path / "swept")] in shown(
        str(tmp_path)
    )
    rows = shown(str(tmp_path / "swept"))
    assert {row[0] for row in rows} >= {"r0", "r1", "r2"}


def test_the_former_name_still_lists(results):
    assert CliRunner().invoke(app, ["runs", str(results)]).exit_code == 0
    commands = re.findall(r"^│ (\S+)", CliRunner().invoke(app, ["--help"]).output, re.MULTILINE)
    assert "list" in commands
    assert "runs" not in commands


def test_a_config_that_cannot_be_read_makes_no_difference_between_the_others():
    configs = [{"strategy": "fedavg", "lr": 0.1, "seed": 0}, {"strategy": "fedavg", "lr": 0.2, "seed": 0}, {}]
    assert differing(configs) == ["lr"]
    assert descriptions(configs, ["lr"]) == ["lr=0.1", "lr=0.2", ""]


def test_runs_of_a_sweep_are_called_by_what_tells_them_apart(tmp_path):
    for lr, status in ((0.03, "finished"), (0.1, "failed")):
        write_run(
            tmp_path / "runs" / f"fedfix_lr-{lr}-5d41402abc",
            {"status": status, "strategy": "fedfix", "reason": "no luck" * (status == "failed")},
            config=f'strategy = "fedfix"\nlr = {lr}\n',
        )
    lines = shown(str(tmp_path))
    assert [line[0] for line in lines if "finished" in line or "failed" in line] == ["lr=0.03", "lr=0.1"]
    assert ["lr=0.1:", "no", "luck"] in lines
    assert not any("5d41402abc" in word for line in lines for word in line)


def test_a_damaged_table_of_clients_is_one_line(results):
    damaged = results / "done" / "clients.parquet"
    damaged.write_bytes(b"nothing of the kind")
    lines = shown(str(results / "done"))
    assert ["done", "finished"] in [line[:2] for line in lines]
    assert " ".join(" ".join(line) for line in lines).count(f"{damaged} can't be read (") == 1
