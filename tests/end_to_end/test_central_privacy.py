"""Central privacy on Ray, on real SuperNodes, and on MNIST with 1,000 clients: one command, killed and resumed."""

import os
import signal
import subprocess
import sys
import tomllib

import numpy as np
import pytest
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
from dp_accounting.pld import PLDAccountant

from fedapp.server.sampled_gaussian import Sampling, sampled_epsilon
from tests.end_to_end.processes import ROOT, toml_pairs
from tests.runs import count_of, lines_of, summary_of, vector_of
from tests.waiting import wait_until

CENTRAL = {"dp": "central", "client-weights": "uniform"}
POISSON = {**CENTRAL, "participation": "poisson", "fraction-train": 0.5}
TREE = {**CENTRAL, "dp-mechanism": "tree", "dp-clipping-norm": 0.5}
DISTRIBUTED = {**CENTRAL, "dp-mechanism": "distributed", "dp-clipping-norm": 0.5, "secure-sums": True}
DELTA = 1e-5


@pytest.mark.thorough
@pytest.mark.ci
@pytest.mark.parametrize(
    "own", [POISSON, {**TREE, "participation": "turns", "fraction-train": 0.5}, DISTRIBUTED]
)
def test_ray_gives_the_bits_and_the_account_of_the_sequential_engine(simulate, own):
    config = {"num-server-rounds": 4, **own}
    on_ray, other = simulate(config), simulate(config, engine="sequential")
    assert on_ray.returncode == 0, on_ray.output
    assert (summary_of(on_ray.path)["engine"], summary_of(other.path)["engine"]) == ("ray", "sequential")
    assert on_ray.model == other.model
    assert summary_of(on_ray.path)["dp-epsilon"] == summary_of(other.path)["dp-epsilon"]


# Three devices of which none moves the model: what is left of a run is noise, of deviation z S d each round.
STILL = {"model": "logistic", "init": "zeros", "lr": 1e-9, "num-server-rounds": 2, "dp-clipping-norm": 0.5}


@pytest.mark.thorough
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("own", "sampling", "deviation"),
    [
        # Two rounds' noises, whoever was drawn:
        pytest.param(POISSON, Sampling(0.5), 0.5 / (0.5 * 3) * 2**0.5, marks=pytest.mark.ci),
        (TREE, Sampling(restart=0), 0.5 / 3),  # one node over both rounds
        pytest.param(DISTRIBUTED, Sampling(), 0.5 / 3 * 2**0.5, marks=pytest.mark.ci),  # of three parts each
    ],
)
def test_devices_models_have_the_noise_of_their_account(devices, tmp_path, own, sampling, deviation):
    config = {**own, **STILL, "results-dir": str(tmp_path), "run-name": "run"}
    devices.start_run(config, tmp_path / "log").wait(timeout=500)
    output = (tmp_path / "log").read_text()
    summary = summary_of(tmp_path / "run")
    assert (summary["status"], summary["engine"], summary["aggregations"]) == ("finished", "deployment", 2), (
        output
    )
    assert summary["dp-epsilon"] == sampled_epsilon(1.0, DELTA, 2, sampling)
    noise = vector_of(tmp_path / "run")
    assert noise.std() == pytest.approx(deviation, rel=4 / (2 * len(noise)) ** 0.5)  # four standard errors
    assert abs(noise.mean()) < 4 * deviation / len(noise) ** 0.5


RATE, TARGET = 0.05, 4.0
PLAIN = {"local-epochs": 1, "batch-size": 10, "lr": 0.1, "eval-every": 10, "checkpoint-every": 5}
MASKED = {"secure-sums": True, "eval-every": 2, "checkpoint-every": 2}


@pytest.mark.thorough
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("engine", "rounds", "own", "accuracy"),
    [
        ("vectorized", 100, PLAIN, (0.87, 0.89)),
        ("sequential", 8, MASKED, (0.4, 1.0)),
    ],
    ids=["plain", "masked"],
)
def test_mnist_of_a_thousand_clients_has_a_budget_from_one_command_and_after_a_kill(
    tmp_path, real_data, engine, rounds, own, accuracy
):
    if not (real_data / "mnist.npz").is_file():
        pytest.skip("no mnist.npz")
    config = {
        **CENTRAL,  # without a norm: it adapts
        "participation": "poisson",
        "fraction-train": RATE,
        "dp-target-epsilon": TARGET,
        "num-server-rounds": rounds,
        "dataset": "mnist",
        "data-path": str(real_data / "mnist.npz"),
        "model": "logistic",
        "client-records": "never",
        "figures": False,
        "results-dir": str(tmp_path),
        **own,
    }

    def command(**given):
        clients = [] if "resume" in given else ["--federation-config", "num-supernodes=1000"]
        pairs = toml_pairs(given if "resume" in given else config | given)
        return [sys.executable, "run_simulation.py", "--engine", engine, "--run-config", pairs, *clients]

    killed = tmp_path / "killed"
    with subprocess.Popen(command(**{"run-name": "killed"}), cwd=ROOT, stdout=subprocess.DEVNULL) as process:
        wait_until(lambda: count_of(killed) > 2 or process.poll() is not None, seconds=500)
        os.kill(process.pid, signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    assert summary_of(killed)["status"] == "running"
    subprocess.run(command(resume=str(killed)), cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    subprocess.run(command(**{"run-name": "whole"}), cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    np.testing.assert_array_equal(vector_of(killed), vector_of(tmp_path / "whole"))

    summary, lines = summary_of(killed), lines_of(killed)
    assert (summary["status"], summary["num-clients"], summary["aggregations"]) == ("finished", 1000, rounds)
    assert accuracy[0] <= summary["accuracy"] <= accuracy[1]
    assert lines[-1]["dp-clipping-norm"] != lines[1]["dp-clipping-norm"]
    # An account of dp-accounting's own, at the noise that the run's config says.
    noise = tomllib.loads((killed / "config.toml").read_text("utf-8"))["dp-noise-multiplier"]
    accountant = PLDAccountant()
    accountant.compose(PoissonSampledDpEvent(RATE, GaussianDpEvent(noise)), rounds)
    assert summary["dp-epsilon"] == pytest.approx(accountant.get_epsilon(DELTA), rel=2e-3)
    assert 0.99 * TARGET < summary["dp-epsilon"] <= TARGET
