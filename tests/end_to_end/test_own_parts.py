"""A model of one's own, with batch normalisation and dropout: the same bits on Ray and on devices."""

import json

import pytest

CONFIG = {"model": "custom.nets:ConvNet", "num-server-rounds": 2, "metrics": "accuracy,f1-macro", "lr": 0.05}


@pytest.mark.ci
@pytest.mark.thorough
def test_a_model_of_ones_own_on_ray(simulate):
    runs = [simulate(CONFIG, engine=engine) for engine in ("ray", "sequential")]
    assert all(run.returncode == 0 for run in runs), [run.output for run in runs]
    assert runs[0].model == runs[1].model
    metrics = [(run.path / "metrics.jsonl").read_text() for run in runs]
    assert metrics[0] == metrics[1]
    assert json.loads(metrics[0].splitlines()[-1])["f1-macro"] > 0.1


@pytest.mark.ci
@pytest.mark.thorough
@pytest.mark.timeout(400)
def test_a_model_of_ones_own_on_devices(devices, simulate, tmp_path):
    place = {"results-dir": str(tmp_path), "run-name": "run", "clock": "virtual"}
    devices.start_run(CONFIG | place, tmp_path / "log").wait(timeout=300)
    output = (tmp_path / "log").read_text()
    assert f"Run directory: {tmp_path / 'run'}" in output, output
    other = simulate(CONFIG, federation="num-supernodes=3", engine="sequential")
    assert (tmp_path / "run" / "model.safetensors").read_bytes() == other.model
