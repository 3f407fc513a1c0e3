"""The figures of the graph: what is written, how large, and from incomplete or odd grids."""

import math
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from studies.graphs.figures import GraphPanel, _power, draw_graph

MAX_BYTES = 150_000
NAMES = ["graph-misalignment.png", "graph-spectrum.png", "graph-homogeneity.png"]


def panel(class_imbalance: float, data_imbalance: float, clients: int = 30, seed: int = 0) -> GraphPanel:
    rng = np.random.default_rng([seed, int(class_imbalance), int(data_imbalance), clients])
    theta, phi = 6 / (1 + 0.1 * class_imbalance), 0.4 + 0.3 * data_imbalance
    upper = np.triu(rng.normal(theta, phi, (clients, clients)).clip(0.1), 1)
    A = upper + upper.T
    mis = np.exp(-A) * (1 - np.eye(clients))
    eigenvalues = np.linalg.eigvalsh(np.diag(A.sum(axis=1)) - A)
    return GraphPanel.of(class_imbalance, data_imbalance, mis, eigenvalues, theta / 2, theta, phi)


@pytest.mark.parametrize("clients", [30, pytest.param(250, marks=pytest.mark.thorough)])
def test_a_grid_gives_three_figures(tmp_path: Path, clients: int) -> None:
    grid = [panel(k, f, clients, seed) for k in (0, 1, 10, 100) for f in (0, 1) for seed in (0, 1)]
    paths = draw_graph(tmp_path, grid[::-1], "digits")
    assert paths == [tmp_path / name for name in NAMES]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(NAMES)
    for path in paths:
        assert path.stat().st_size <= MAX_BYTES
        with Image.open(path) as image:
            assert image.format == "PNG"
            assert image.width == 1200
            assert len(image.convert("RGB").getcolors(1 << 20) or ()) > 10


def test_a_single_run_has_no_homogeneity_curve(tmp_path: Path) -> None:
    assert draw_graph(tmp_path, [panel(10, 1)]) == [tmp_path / name for name in NAMES[:2]]


def test_settings_may_be_missing(tmp_path: Path) -> None:
    assert len(draw_graph(tmp_path, [panel(0, 0), panel(1, 0), panel(10, 1)])) == 3


@pytest.mark.parametrize("clients", [1, 5])
def test_equal_clients_and_small_networks(tmp_path: Path, clients: int) -> None:
    zeros = np.zeros((clients, clients))
    odd = GraphPanel.of(0.0, 0.0, zeros, np.zeros(clients), math.nan, 27.6, 0.0)
    opposite = GraphPanel.of(1.0, 0.0, 1 - np.eye(clients), np.zeros(clients), 0.0, 0.0, math.nan)
    for grid in ([odd], [opposite], [odd, opposite]):
        for path in draw_graph(tmp_path, grid):
            assert path.stat().st_size <= MAX_BYTES


def test_bad_grids(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has 0 and 0"):
        draw_graph(tmp_path, [])
    with pytest.raises(ValueError, match="has 7 and 1"):
        draw_graph(tmp_path, [panel(k, 0, 3) for k in range(7)])
    with pytest.raises(ValueError, match="must be square"):
        GraphPanel.of(0, 0, np.zeros((2, 3)), np.zeros(2), 1, 1, 1)
    assert not list(tmp_path.iterdir())


@pytest.mark.thorough
def test_the_largest_grid(tmp_path: Path) -> None:
    for path in draw_graph(tmp_path, [panel(k, f, 60) for k in (0, 1, 5, 10, 50, 100) for f in range(3)]):
        assert path.stat().st_size <= MAX_BYTES


def test_powers_of_ten_without_mathtext() -> None:
    assert [_power(1e-5), _power(3e-12)] == ["10⁻⁵", "3·10⁻¹²"]
