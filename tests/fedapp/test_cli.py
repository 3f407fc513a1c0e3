"""The command ``fedapp``."""

import os
import re
import subprocess
import sys
import sysconfig
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from fedapp.cli import _add_commands, app
from strategies import REGISTRY
from strategies.clients import graph


def run(*arguments: str):
    return CliRunner().invoke(app, list(arguments))


def test_graph_prints_writes_and_draws_a_grid(tmp_path: Path) -> None:
    done = run(
        "graph",
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
        (("--class-imbalance", "a"), "'a': must be numbers with commas between them"),
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
    done = run("graph", "--out", str(tmp_path), *arguments)
    assert done.exit_code == 1
    assert f"error: {message}" in done.output
    assert isinstance(done.exception, SystemExit)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_graph_repeats_with_seeds_from_the_given_one_on(tmp_path: Path) -> None:
    options = ("--num-clients", "6", "--class-imbalance", "1", "--data-imbalance", "0", "--seeds", "2")
    done = run("graph", *options, "-c", "seed=3", "--out", str(tmp_path))
    assert done.exit_code == 0, done.output
    folders = [path for path in tmp_path.iterdir() if path.is_dir()]
    assert {path.name for path in folders} == {"class-1-data-0-seed-3", "class-1-data-0-seed-4"}


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
    done = run("graph", "-c", read, *arguments)
    assert done.exit_code == 0, done.output
    assert "not read" not in done.output
    done = run("graph", "-c", f"{read} message-epsilon=1.0 lr=0.5", *arguments)
    assert "not read by fedapp graph: message-epsilon = 1.0, lr = 0.5" in done.output


def test_keys_are_told_by_name() -> None:
    done = run("keys", "lr", "eval-every")
    assert done.exit_code == 0
    assert re.findall(r"^\S+$", done.output, re.MULTILINE) == ["lr", "eval-every"]
    assert "default: 0.1" in done.output
    assert max(map(len, run("keys").output.splitlines())) <= 80


def test_a_part_of_a_name_tells_all_that_have_it() -> None:
    found = re.findall(r"^\S+$", run("keys", "epsilon", "server-").output, re.MULTILINE)
    assert found == ["message-epsilon", "server-lr", "server-optimizer", "num-server-rounds", "server-device"]


def test_no_such_key_and_all_as_markdown() -> None:
    done = run("keys", "learning-rate")
    assert (done.exit_code, done.output.startswith("error: unknown key 'learning-rate'")) == (1, True)
    assert run("keys", "--markdown", "lr").exit_code == 1
    assert run("keys", "--markdown").output.startswith("# Keys of the run config")


def test_the_version() -> None:
    assert re.match(r"fedapp \d+\.\d+\.\d+, flwr \d+", run("--version").output)


def test_without_a_package_that_brings_commands_the_others_work(repository: Path, tmp_path: Path) -> None:
    # As in an image: the distribution's metadata, and of its packages not all. -S leaves out what a .pth file adds.
    for package in ("fedapp", "strategies", "custom"):
        (tmp_path / package).symlink_to(repository / package)
    paths = os.pathsep.join([str(tmp_path), sysconfig.get_path("purelib"), sysconfig.get_path("platlib")])

    def without(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-S", "-m", "fedapp.cli", *arguments],
            cwd=tmp_path,
            text=True,
            capture_output=True,
            env={**os.environ, "PYTHONPATH": paths},
            check=False,
        )

    assert "reproduce" in {entry.name for entry in entry_points(group="fedapp.commands")}
    told = without("--version")
    assert (told.returncode, told.stderr) == (0, "")
    assert told.stdout.startswith("fedapp ")
    assert "No such command 'reproduce'" in without("reproduce").stderr


def test_a_package_that_is_there_and_broken_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "brings_a_command.py").write_text("import there_is_no_such_module\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="there_is_no_such_module"):
        _add_commands([EntryPoint("other", "brings_a_command:other", "fedapp.commands")])


def test_methods_are_told_in_short_in_full_and_of_ones_own() -> None:
    done = run("methods")
    assert done.exit_code == 0
    assert set(re.findall(r"^(\S+)$", done.output, re.M)) == set(REGISTRY)
    assert max(map(len, done.output.splitlines())) <= 80
    full = run("methods", "fedfix").output
    assert "own keys: aggregation-weights, arrival-weight-bound, fedfix-interval" in full
    assert "Fraboni et al. 2023, section 4.4:" in full
    assert "own keys:" in run("methods", "custom.half_life:HalfLife").output
    assert "error: strategy = 'fedfax': must be one of" in run("methods", "fedfax").output
    assert (
        "error: --markdown: is of all methods, not of fedfix" in run("methods", "fedfix", "--markdown").output
    )
