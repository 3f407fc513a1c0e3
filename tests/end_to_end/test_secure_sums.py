"""Secure sums on Ray and on real SuperNodes: the bits of the sequential engine, whatever masks the clients drew."""

import os
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
from dp_accounting.pld import PLDAccountant

from tests.end_to_end.processes import ROOT, toml_pairs
from tests.runs import count_of, lines_of, summary_of, vector_of
from tests.waiting import wait_until

CONFIG = {"num-server-rounds": 2, "secure-sums": True, "secure-clipping": 0.5}


@pytest.mark.thorough
@pytest.mark.ci
def test_ray_gives_the_bits_of_the_sequential_engine(simulate) -> None:
    on_ray = simulate(CONFIG)
    assert on_ray.returncode == 0, on_ray.output
    assert summary_of(on_ray.path)["engine"] == "ray"
    assert on_ray.model == simulate(CONFIG, engine="sequential").model


@pytest.mark.thorough
@pytest.mark.ci
@pytest.mark.timeout(400)
def test_devices_give_the_bits_of_the_sequential_engine(devices, simulate, tmp_path: Path) -> None:
    place = {"results-dir": str(tmp_path), "run-name": "run"}
    devices.start_run(CONFIG | place, tmp_path / "log").wait(timeout=300)
    output = (tmp_path / "log").read_text()
    assert f"Run directory: {tmp_path / 'run'}" in output, output
    assert summary_of(tmp_path / "run")["engine"] == "deployment"
    assert [line.get("participants", 3) for line in lines_of(tmp_path / "run")] == [3, 3, 3], output
    other = simulate(CONFIG, federation="num-supernodes=3", engine="sequential")
    assert (tmp_path / "run" / "model.safetensors").read_bytes() == other.model
    # A plain run's model differs by the steps of the quantisation alone.
    plain = simulate({**CONFIG, "secure-sums": False}, federation="num-supernodes=3", engine="sequential")
    assert 0 < np.abs(vector_of(plain.path) - vector_of(other.path)).max() < 1e-6


ROUNDS, RATE, TARGET, DELTA = 8, 0.05, 4.0, 1e-5


@pytest.mark.thorough
@pytest.mark.timeout(900)
def test_a_thousand_clients_mask_within_a_budget_and_after_a_kill(tmp_path, real_data):
    if not (real_data / "mnist.npz").is_file():
        pytest.skip("no mnist.npz")
    config = {
        "secure-sums": True,
        "dp": "central",  # without a norm: it adapts
        "client-weights": "uniform",
        "participation": "poisson",
        "fraction-train": RATE,
        "dp-target-epsilon": TARGET,
        "num-server-rounds": ROUNDS,
        "dataset": "mnist",
        "data-path": str(real_data / "mnist.npz"),
        "model": "logistic",
        "eval-every": 2,
        "checkpoint-every": 2,
        "client-records": "never",
        "figures": False,
        "results-dir": str(tmp_path),
    }

    def command(**given):
        clients = [] if "resume" in given else ["--federation-config", "num-supernodes=1000"]
        pairs = toml_pairs(given if "resume" in given else config | given)
        return [
            sys.executable,
            "run_simulation.py",
            "--run-config",
            pairs,
            "--engine",
            "sequential",
            *clients,
        ]

    killed = tmp_path / "killed"
    with subprocess.Popen(command(**{"run-name": "killed"}), cwd=ROOT, stdout=subprocess.DEVNULL) as process:
        wait_until(lambda: count_of(killed) > 2 or process.poll() is not None, seconds=500)
        os.kill(process.pid, signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    subprocess.run(command(resume=str(killed)), cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    subprocess.run(command(**{"run-name": "whole"}), cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    np.testing.assert_array_equal(vector_of(killed), vector_of(tmp_path / "whole"))
    summary, lines = summary_of(killed), lines_of(killed)
    assert (summary["status"], summary["num-clients"], summary["aggregations"]) == ("finished", 1000, ROUNDS)
    assert lines[-1]["accuracy"] > lines[0]["accuracy"] + 0.3
    assert lines[-1]["dp-clipping-norm"] != lines[1]["dp-clipping-norm"]
    noise = tomllib.loads((killed / "config.toml").read_text("utf-8"))["dp-noise-multiplier"]
    accountant = PLDAccountant()
    accountant.compose(PoissonSampledDpEvent(RATE, GaussianDpEvent(noise)), ROUNDS)
    assert summary["dp-epsilon"] == pytest.approx(accountant.get_epsilon(DELTA), rel=2e-3)
