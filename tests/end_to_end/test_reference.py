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
    [
        ("samples", "sgd", 1.0),
        ("uniform", "sgd", 1.0),
        ("samples", "sgd", 0.5),
        ("samples", "momentum", 0.3),
        ("samples", "adagrad", 0.05),
        ("uniform", "adam", 0.05),
        ("samples", "yogi", 0.05),
    ],
)
def test_full_batch_federated_descent_equals_numpy(
    pairs, tmp_path, strategy, alpha, weights, optimizer, server_lr
):
    config = {
        "strategy": strategy,
        "client-weights": weights,
        "server-optimizer": optimizer,
        "server-lr": server_lr,
        "dataset": "digits",
        "model": "logistic",
        "init": "zeros",
        "batch-size": 0,
        "local-epochs": 0,
        "local-steps": STEPS,
        "lr": LR,
        "l2": 0.01,
        "num-server-rounds": ROUNDS,
        "proximal-mu": alpha,
        "results-dir": str(tmp_path),
        "run-name": "run",
    }
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


@pytest.mark.parametrize(
    ("strategy", "momentum", "alpha", "optimizer"),
    [
        ("fednova", 0.0, 0.0, "sgd"),
        ("fednova", 0.6, 0.0, "sgd"),
        ("fednova", 0.6, 0.0, "fedexp"),
        ("scaffold", 0.0, 0.0, "sgd"),
        ("scaffold", 0.6, 0.0, "sgd"),
        ("scaffold", 0.0, 0.0, "fedexp"),
        ("feddyn", 0.0, 0.3, "sgd"),
        ("mifa", 0.0, 0.0, "sgd"),
        ("fedavg", 0.0, 0.0, "fedexp"),
    ],
)
def test_methods_for_clients_of_unequal_steps_equal_numpy(
    pairs, tmp_path, strategy, momentum, alpha, optimizer
):
    steps, lr = (1, 2, 3, 4, 5, 6, 9), 0.2
    config = {
        "strategy": strategy,
        "dataset": "digits",
        "model": "logistic",
        "init": "zeros",
        "batch-size": 0,
        "local-epochs": 0,
        "local-steps": 1,
        "step-heterogeneity": f"list:{','.join(map(str, steps))}",
        "lr": lr,
        "momentum": momentum,
        "feddyn-alpha": alpha or 0.01,
        "num-server-rounds": ROUNDS,
        "server-optimizer": optimizer,
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
    K = np.array(steps)
    # ‖a_i‖₁ as Wang et al. 2020, section 3, have it
    norms = (K - momentum * (1 - momentum**K) / (1 - momentum)) / (1 - momentum)

    W, H, before = np.zeros((10, 65)), np.zeros((10, 65)), np.zeros((10, 65))
    own = np.zeros((CLIENTS, 10, 65))
    for _ in range(ROUNDS):
        common, deltas = np.einsum("i,ijk->jk", p, own), np.zeros_like(own)
        constant = {"scaffold": common - own, "feddyn": -own}.get(strategy, np.zeros_like(own))
        for i, rows in enumerate(clients):
            w, v = W, np.zeros_like(W)
            for _ in range(K[i]):
                z = X[rows] @ w.T
                e = np.exp(z - z.max(1, keepdims=True))
                residual = (e / e.sum(1, keepdims=True) - Y[rows]) / len(rows)
                v = momentum * v + residual.T @ X[rows] + alpha * (w - W) + constant[i]
                w = w - lr * v
            deltas[i] = w - W
        if strategy == "scaffold":
            own = own - common - deltas / (lr * norms)[:, None, None]
        if strategy == "feddyn":
            own, H = own - alpha * deltas, H - alpha * np.einsum("i,ijk->jk", p, deltas)
        if strategy == "fednova":
            deltas = (p @ norms) * deltas / norms[:, None, None]
        update = np.einsum("i,ijk->jk", p, deltas)
        rate = 1.0
        if optimizer == "fedexp":
            rate = max(1.0, p @ (deltas**2).sum((1, 2)) / (2 * ((update**2).sum() + 1e-3)))
        before, W = W, W + rate * update - (H / alpha if alpha else 0)

    model = safetensors.numpy.load_file(tmp_path / "run" / "model.safetensors")
    ours, expected = (
        np.c_[model["1.weight"], model["1.bias"]],
        (before + W) / 2 if optimizer == "fedexp" else W,
    )
    assert np.linalg.norm(ours - expected) < 2e-5 * np.linalg.norm(expected)
    assert np.linalg.norm(W) > 0.1
