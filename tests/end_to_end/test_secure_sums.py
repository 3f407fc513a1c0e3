"""Secure sums on Ray and on real SuperNodes: the bits of the sequential engine, whatever masks the clients drew."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.runs import lines_of, summary_of, vector_of

CONFIG = {"num-server-rounds": 2, "secure-sums": True, "secure-clipping": 0.5}
# Without rounds: on devices in real time, where a buffer of all three has one result.
BUFFERS = {**CONFIG, "strategy": "fedbuff", "buffer-size": 3}


@pytest.mark.thorough
@pytest.mark.ci
@pytest.mark.parametrize("config", [CONFIG, BUFFERS])
def test_ray_gives_the_bits_of_the_sequential_engine(simulate, config: dict[str, Any]) -> None:
    on_ray = simulate(config)
    assert on_ray.returncode == 0, on_ray.output
    assert summary_of(on_ray.path)["engine"] == "ray"
    assert on_ray.model == simulate(config, engine="sequential").model


@pytest.mark.thorough
@pytest.mark.timeout(400)
@pytest.mark.parametrize("config", [pytest.param(CONFIG, marks=pytest.mark.ci), BUFFERS])
def test_devices_give_the_bits_of_the_sequential_engine(
    devices, simulate, tmp_path: Path, config: dict[str, Any]
) -> None:
    place = {"results-dir": str(tmp_path), "run-name": "run"}
    devices.start_run(config | place, tmp_path / "log").wait(timeout=300)
    output = (tmp_path / "log").read_text()
    assert f"Run directory: {tmp_path / 'run'}" in output, output
    assert summary_of(tmp_path / "run")["engine"] == "deployment"
    lines, worked = lines_of(tmp_path / "run"), "contributions" if config is BUFFERS else "participants"
    assert [line.get(worked, 3) for line in lines] == [3, 3, 3], output
    other = simulate(config, federation="num-supernodes=3", engine="sequential")
    assert (tmp_path / "run" / "model.safetensors").read_bytes() == other.model
    # A plain run's model differs by the steps of the quantisation alone.
    plain = simulate({**config, "secure-sums": False}, federation="num-supernodes=3", engine="sequential")
    assert 0 < np.abs(vector_of(plain.path) - vector_of(other.path)).max() < 1e-6
