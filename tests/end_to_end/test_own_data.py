"""Data from a function of one's own, standardized inputs and changed images, on Ray and on SuperNodes."""

import json

import numpy as np
import pytest
import safetensors.numpy

WINE = {
    "dataset": "custom.wine:load",
    "normalize": "standardize",
    "model": "logistic",
    "num-server-rounds": 3,
}
CHANGED = {
    "augment": "flip+crop",
    "model": "cnn",
    "local-epochs": 0,
    "local-steps": 3,
    "num-server-rounds": 2,
}


def vector(model: bytes) -> np.ndarray:
    arrays = safetensors.numpy.load(model)
    return np.concatenate([arrays[name].ravel() for name in sorted(arrays)])


@pytest.mark.thorough
@pytest.mark.parametrize("config", [WINE, CHANGED], ids=["own function", "augment"])
def test_ray_gives_the_bits_of_the_sequential_engine_and_vectorized_nearly(config, simulate):
    runs = {engine: simulate(config, engine=engine) for engine in ("sequential", "ray", "vectorized")}
    assert all(run.returncode == 0 for run in runs.values()), [run.output for run in runs.values()]
    assert runs["ray"].model == runs["sequential"].model
    one, other = (vector(runs[engine].model) for engine in ("vectorized", "sequential"))
    assert np.linalg.norm(one - other) <= 1e-5 * np.linalg.norm(other)


@pytest.mark.thorough
@pytest.mark.timeout(400)
def test_devices_put_their_sums_together(devices, simulate, tmp_path):
    place = {"results-dir": str(tmp_path), "run-name": "run"}
    devices.start_run(WINE | place, tmp_path / "log").wait(timeout=300)
    output = (tmp_path / "log").read_text()
    assert "standardized by 3 clients' inputs; 142 values a feature" in output, output
    other = simulate(WINE, federation="num-supernodes=3", engine="sequential")
    found, expected = (
        json.loads((path / "preparation.json").read_text()) for path in (tmp_path / "run", other.path)
    )
    for name in ("mean", "deviation"):
        assert found[name] == pytest.approx(expected[name], rel=1e-12)
    model = (tmp_path / "run" / "model.safetensors").read_bytes()
    assert vector(model) == pytest.approx(vector(other.model), abs=1e-6)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["engine"], summary["accuracy"] > 0.8) == ("deployment", True)
