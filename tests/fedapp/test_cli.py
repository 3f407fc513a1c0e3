"""The command ``fedapp``."""

import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from fedapp.cli import app
from strategies import graph


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
    ],
)
def test_graph_refuses_with_one_line(arguments: tuple[str, ...], message: str, tmp_path: Path) -> None:
    done = run("graph", *arguments, "--out", str(tmp_path))
    assert done.exit_code == 1
    assert message in done.output
