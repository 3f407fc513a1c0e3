"""The bound on the norm of a client's update: what it does to a model, and in whole runs."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fedapp.client_app import app
from fedapp.config import RunConfig
from fedapp.engine.sequential import SequentialGrid
from fedapp.report import read_metrics
from fedapp.server import prepare, run
from strategies.flower.arrays import clip_update

VECTORS = hnp.arrays(np.float64, 5, elements=st.floats(-1e6, 1e6))


def test_a_long_update_is_shortened_in_its_direction():
    base, model = np.array([1.0, 1.0]), np.array([4.0, 5.0])  # Δ = (3, 4), ‖Δ‖ = 5
    assert clip_update(model, base, 2.5)
    assert model.tolist() == [2.5, 3.0]  # w̄ + Δ / 2
    assert base.tolist() == [1.0, 1.0]
    assert not clip_update(model, base, 2.5)
    assert model.tolist() == [2.5, 3.0]


@given(VECTORS, VECTORS, st.floats(1e-3, 1e3))
def test_no_update_is_longer_than_the_bound(base, model, bound):
    before = model.copy()
    outside = clip_update(model, base, bound)
    assert np.linalg.norm(model - base) <= bound * (1 + 1e-6) + 1e-9
    assert outside == (np.linalg.norm(before - base) > bound)
    if not outside:
        assert np.array_equal(model, before)


def trained(tmp_path: Path, **values: Any) -> tuple[np.ndarray, np.ndarray, list[dict[str, Any]]]:
    """Return the first and the last model (D,) of a run of one aggregation with 3 clients, and its metrics."""
    given = {"model": "logistic", "num-server-rounds": 1, "results-dir": str(tmp_path), **values}
    experiment = prepare(RunConfig.load(given), 3)
    first = {name: value.numpy().copy() for name, value in experiment.model.state_dict().items()}
    directory = run(SequentialGrid(app, 3), experiment)
    last = safetensors.numpy.load_file(directory.path / "model.safetensors")
    flat = [np.concatenate([state[name].ravel() for name in sorted(first)]) for state in (first, last)]
    return flat[0], flat[1], read_metrics(directory.path)


@pytest.mark.parametrize("strategy", ["fedavg", "async-fedavg"])
def test_a_run_moves_by_no_more_than_the_bound_and_counts(strategy, tmp_path):
    common = {"strategy": strategy, "aggregation-weights": "identical"}
    first, free, metrics = trained(tmp_path, **common)
    assert "clipped-updates" not in metrics[-1]
    assert np.linalg.norm(free - first) > 0.05
    _, last, metrics = trained(tmp_path, **common, **{"update-norm-bound": 0.01})
    assert (
        0 < np.linalg.norm(last - first) <= 0.01 * (1 + 1e-3)
    )  # Σ p_i ‖Δ_i‖, or d = 1 for the one that came
    assert metrics[-1]["clipped-updates"] == (3 if strategy == "fedavg" else 1)
    _, same, metrics = trained(tmp_path, **common, **{"update-norm-bound": 1e6})
    assert np.allclose(same, free)
    assert metrics[-1].get("clipped-updates", 0) == 0
