"""Compressed updates: the app against float64 numpy, and the same bits on Ray and on devices."""

import json

import numpy as np
import pytest
import safetensors.numpy
from sklearn.datasets import load_digits

import run_simulation

pytestmark = pytest.mark.usefixtures("no_figures")

ROUNDS, STEPS, LR, CLIENTS, SHARE = 6, 5, 0.5, 7, 0.1


def test_the_largest_values_with_error_feedback_equal_numpy(pairs, tmp_path):
    # Of no client are two values that nearly make it so close that float32 would take the other.
    config = {
        "strategy": "fedavg",
        "dataset": "digits",
        "model": "logistic",
        "init": "zeros",
        "batch-size": 0,
        "local-epochs": 0,
        "local-steps": STEPS,
        "lr": LR,
        "num-server-rounds": ROUNDS,
        "compression": f"topk:{SHARE}",
        "results-dir": str(tmp_path),
        "run-name": "run",
    }
    arguments = ["--engine", "sequential", "--run-config", pairs(config)]
    assert run_simulation.main([*arguments, "--federation-config", f"num-supernodes={CLIENTS}"]) == 0
    digits = load_digits()
    X, Y = np.c_[digits.data / 16, np.ones(len(digits.data))], np.eye(10)[digits.target]
    partition = np.load(tmp_path / "run" / "partition.npz")
    clients = np.split(partition["client_indices"], partition["client_offsets"][1:-1])
    p = np.array([len(rows) for rows in clients]) / sum(map(len, clients))

    W, left_out = np.zeros((10, 65)), np.zeros((CLIENTS, 10, 65))
    for _ in range(ROUNDS):
        before = W
        for i, rows in enumerate(clients):
            w = before
            for _ in range(STEPS):
                z = X[rows] @ w.T
                e = np.exp(z - z.max(1, keepdims=True))
                w = w - LR * (e / e.sum(1, keepdims=True) - Y[rows]).T @ X[rows] / len(rows)
            v = left_out[i] + w - before
            kept = np.where(np.abs(v) >= np.sort(np.abs(v), axis=None)[-round(SHARE * v.size)], v, 0.0)
            W, left_out[i] = W + p[i] * kept, v - kept

    model = safetensors.numpy.load_file(tmp_path / "run" / "model.safetensors")
    ours = np.c_[model["1.weight"], model["1.bias"]]
    assert np.linalg.norm(ours - W) < 1e-5 * np.linalg.norm(W)
    assert np.linalg.norm(W) > 0.1
    assert np.linalg.norm(left_out) > 0.1


# Flower keeps a client's state from round to round, on Ray and on devices; and a second run begins without.
CONFIG = {"model": "logistic", "compression": "topk:0.05", "num-server-rounds": 3, "checkpoint-every": 1}


@pytest.mark.thorough
@pytest.mark.timeout(1200)
def test_ray_gives_the_same_bits_and_resumes_to_them(simulate):
    two = "num-supernodes=2"
    whole = simulate(CONFIG, federation=two, engine="sequential")
    part = simulate({**CONFIG, "num-server-rounds": 2}, federation=two)
    assert part.returncode == 0, part.output
    assert list((part.path / "checkpoint").glob("*/left-out.npy"))
    place = {"results-dir": str(part.path.parent), "run-name": part.path.name}
    again = simulate({"resume": str(part.path), "num-server-rounds": 3, **place}, federation=two)
    assert again.returncode == 0, again.output
    assert (part.path / "model.safetensors").read_bytes() == whole.model


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_deployed_supernodes_give_the_same_bits_as_a_simulation(devices, simulate, tmp_path):
    for name in ("one", "other"):
        place = {"results-dir": str(tmp_path), "run-name": name}
        devices.start_run(CONFIG | place, tmp_path / f"{name}.log").wait(timeout=500)
        output = (tmp_path / f"{name}.log").read_text()
        assert (tmp_path / name / "model.safetensors").exists(), output
    summary = json.loads((tmp_path / "one" / "summary.json").read_text())
    assert (summary["engine"], summary["status"]) == ("deployment", "finished")
    lines = [json.loads(line) for line in (tmp_path / "one" / "metrics.jsonl").read_text().splitlines()]
    # 650 values: 33 of four bytes, and as many indices of ten bits.
    assert lines[-1]["bytes-up"] == 3 * 3 * (33 * 4 + 42)
    other = simulate(CONFIG, federation="num-supernodes=3", engine="sequential")
    for name in ("one", "other"):
        assert (tmp_path / name / "model.safetensors").read_bytes() == other.model
