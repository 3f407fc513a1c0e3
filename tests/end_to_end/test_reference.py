"""The whole app against a dozen lines of numpy: same data, same weights, float64, nothing shared but the files."""

import numpy as np
import pytest
import safetensors.numpy
from sklearn.datasets import load_digits

import run_simulation
from tests.end_to_end.server_step import server_step

pytestmark = pytest.mark.usefixtures("no_figures")

ROUNDS, STEPS, LR, CLIENTS = 6, 5, 0.5, 7


@pytest.mark.parametrize(("strategy", "alpha"), [("fedavg", 0.0), ("fedprox", 0.3)])
@pytest.mark.parametrize(
    ("weights", "optimizer", "server_lr"),
    [("samples", "sgd", 1.0), ("uniform", "sgd", 1.0), ("samples", "sgd", 0.5), ("samples", "momentum", 0.3),
     ("samples", "adagrad", 0.05), ("uniform", "adam", 0.05), ("samples", "yogi", 0.05)],
)  # fmt: skip
def test_full_batch_federated_descent_equals_numpy(
    pairs, tmp_path, strategy, alpha, weights, optimizer, server_lr
):
    config = {
        "strategy": strategy, "client-weights": weights, "server-optimizer": optimizer, "server-lr": server_lr,
        "dataset": "digits", "model": "logistic", "init": "zeros", "batch-size": 0, "local-epochs": 0,
        "local-steps": STEPS, "lr": LR, "l2": 0.01, "num-server-rounds": ROUNDS, "proximal-mu": alpha,
        "results-dir": str(tmp_path), "run-name": "run",
    }  # fmt: skip
    arguments = ["--engine", "sequential", "--run-config", pairs(config)]
    assert run_simulation.main([*arguments, "--federation-config", f"num-supernodes={CLIENTS}"]) == 0
    digits = load_digits()
    X, Y = np.c_[digits.data / 16, np.ones(len(digits.data))], np.eye(10)[digits.target]
    partition = np.load(tmp_path / "run" / "partition.npz")
    clients = np.split(partition["client_indices"], partition["client_offsets"][1:-1])
    p = np.array([len(rows) if weights == "samples" else 1 for rows in clients], dtype=float)
    p /= p.sum()

    W, step = np.zeros((10, 65)), server_step(optimizer, server_lr)  # the last column is the bias
    for _ in range(ROUNDS):
        delta = np.zeros_like(W)
        for p_i, rows in zip(p, clients, strict=True):
            w = W
            for _ in range(STEPS):
                z = X[rows] @ w.T
                e = np.exp(z - z.max(1, keepdims=True))
                residual = (e / e.sum(1, keepdims=True) - Y[rows]) / len(rows)
                w = w - LR * (residual.T @ X[rows] + 0.01 * w + alpha * (w - W))
            delta += p_i * (w - W)
        W = step(W, delta)

    model = safetensors.numpy.load_file(tmp_path / "run" / "model.safetensors")
    ours = np.c_[model["1.weight"], model["1.bias"]]
    assert np.linalg.norm(ours - W) < 1e-5 * np.linalg.norm(W)
    assert np.linalg.norm(W) > 0.1
