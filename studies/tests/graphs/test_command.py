"""The command ``fedapp graph``."""

import re
from pathlib import Path

import numpy as np
import pytest
import typer
from PIL import Image
from typer.testing import CliRunner

from strategies.clients import graph
from studies.graphs.command import graph_command

app = typer.Typer()
app.command()(graph_command)


def run(*arguments: str):
    return CliRunner().invoke(app, list(arguments))


def test_graph_prints_writes_and_draws_a_grid(tmp_path: Path) -> None:
    done = run(
        "--num-clients",
        "12",
        "--class-imbalance",
        "0,100",
        "--data-imbalance",
        "0",
        "--out",
        str(tmp_path),
    )
    assert done.exit_code == 0, done.output
    found = {}
    for kappa in ("0", "100"):
        arrays = np.load(tmp_path / f"class-{kappa}-data-0-seed-0" / "graph.npz")
        assert arrays["messages"].shape == (12, 64)
        assert np.array_equal(arrays["misalignment"], graph.misalignment(arrays["messages"]))
        assert arrays["eigenvalues"] == pytest.approx(
            np.linalg.eigvalsh(graph.laplacian(arrays["adjacency"])), abs=1e-8
        )
        found[kappa] = graph.homogeneity(arrays["adjacency"])
        assert f"{found[kappa]:.4f}" in done.output
    assert found["0"] > found["100"]
    figures = re.findall(r"\S+\.png", done.output)
    assert len(figures) == 3
    assert all(Image.open(figure).width >= 1000 for figure in figures)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--class-imbalance", "a"), "--class-imbalance 'a': must be numbers with commas between them"),
        (
            ("--class-imbalance", "0,1,2,3,4,5,6"),
            "--class-imbalance '0,1,2,3,4,5,6': must be at most 6 numbers",
        ),
        (("--data-imbalance", "0,1,2,3"), "--data-imbalance '0,1,2,3': must be at most 3 numbers, are 4"),
        (("--class-imbalance", "-1"), "class-imbalance = -1.0: must be a number >= 0"),
        (("--run-config", "datset=1"), "unknown key 'datset': did you mean 'dataset'?"),
        (("--num-clients", "900"), "num-supernodes = 900: 'digits' has 1438 training rows"),
        (("-c", "seed=abc"), "seed = 'abc': must be a"),
        (("-c", "seed=1.7"), "seed = 1.7: must be a"),
        (("-c", "seed=true"), "seed = True: must be a"),
        (("--out", "file"), "--out file: can't be written to (File exists)"),
        (("--out", "file/folder"), "--out file/folder: can't be written to (Not a directory)"),
    ],
)
def test_graph_refuses_with_one_line(
    arguments: tuple[str, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("in the way")
    done = run("--out", str(tmp_path), *arguments)
    assert done.exit_code == 1
    assert f"error: {message}" in done.output
    assert isinstance(done.exception, SystemExit)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_graph_repeats_with_seeds_from_the_given_one_on(tmp_path: Path) -> None:
    options = ("--num-clients", "6", "--class-imbalance", "1", "--data-imbalance", "0", "--seeds", "2")
    done = run(*options, "-c", "seed=3", "--out", str(tmp_path))
    assert done.exit_code == 0, done.output
    folders = [path for path in tmp_path.iterdir() if path.is_dir()]
    assert {path.name for path in folders} == {"class-1-data-0-seed-3", "class-1-data-0-seed-4"}


def test_a_value_that_is_given_twice_is_one_setting(tmp_path: Path) -> None:
    options = ("--num-clients", "6", "--class-imbalance", "1,1.0,10", "--data-imbalance", "0,0")
    done = run(*options, "--out", str(tmp_path))
    assert done.exit_code == 0, done.output
    folders = {path.name for path in tmp_path.iterdir() if path.is_dir()}
    assert folders == {"class-1-data-0-seed-0", "class-10-data-0-seed-0"}
    assert len(re.findall(r"^│", done.output, re.MULTILINE)) == len(folders)


def test_graph_names_what_it_does_not_read_and_nothing_that_it_reads(tmp_path: Path) -> None:
    table = tmp_path / "table.csv"
    table.write_text("a,b,kind,who\n" + "".join(f"{k},{k * k % 7},{k % 3},{k % 5}\n" for k in range(60)))
    read = f"dataset=files data-path='{table}' input-column='a,b' label-column=kind group-column=who"
    read += " loss=cross-entropy"
    arguments = (
        "--num-clients",
        "4",
        "--class-imbalance",
        "1",
        "--data-imbalance",
        "0",
        "--out",
        str(tmp_path),
    )
    done = run("-c", read, *arguments)
    assert done.exit_code == 0, done.output
    assert "not read" not in done.output
    done = run("-c", f"{read} message-epsilon=1.0 lr=0.5", *arguments)
    assert "not read by fedapp graph: message-epsilon = 1.0, lr = 0.5" in done.output
