"""The whole app against a dozen lines of numpy: same data, same weights, float64, nothing shared but the files."""

import numpy as np
import pytest
import safetensors.numpy
from sklearn.datasets import load_digits

ROUNDS, STEPS, LR, CLIENTS = 6, 5, 0.5, 7


@pytest.mark.parametrize("alpha", [0.0, 0.3])
@pytest.mark.parametrize("weights", ["samples", "uniform"])
def test_full_batch_federated_descent_equals_numpy(simulate, alpha, weights):
    run = simulate(
        {
            "strategy": "fedprox", "proximal-mu": alpha, "client-weights": weights, "dataset": "digits",
            "model": "logistic", "init": "zeros", "batch-size": 0, "local-epochs": 0, "local-steps": STEPS,
            "lr": LR, "l2": 0.01, "num-server-rounds": ROUNDS,
        },
        federation=f"num-supernodes={CLIENTS}",
        engine="sequential",
    )  # fmt: skip
    assert run.returncode == 0, run.output
    digits = load_digits()
    X, Y = digits.data / 16, np.eye(10)[digits.target]
    partition = np.load(run.path / "partition.npz")
    clients = np.split(partition["client_indices"], partition["client_offsets"][1:-1])
    p = np.array([len(rows) if weights == "samples" else 1 for rows in clients], dtype=float)
    p /= p.sum()

    W, b = np.zeros((10, 64)), np.zeros(10)
    for _ in range(ROUNDS):
        dW, db = np.zeros_like(W), np.zeros_like(b)
        for p_i, rows in zip(p, clients, strict=True):
            w, c = W.copy(), b.copy()
            for _ in range(STEPS):
                z = X[rows] @ w.T + c
                e = np.exp(z - z.max(1, keepdims=True))
                residual = (e / e.sum(1, keepdims=True) - Y[rows]) / len(rows)
                w, c = (
                    w - LR * (residual.T @ X[rows] + 0.01 * w + alpha * (w - W)),
                    c - LR * (residual.sum(0) + 0.01 * c + alpha * (c - b)),
                )
            dW, db = dW + p_i * (w - W), db + p_i * (c - b)
        W, b = W + dW, b + db

    model = safetensors.numpy.load_file(run.path / "model.safetensors")
    ours, expected = (
        np.concatenate([v.ravel() for v in (model["1.bias"], model["1.weight"])]),
        np.append(b, W),
    )
    assert np.linalg.norm(ours - expected) < 1e-5 * np.linalg.norm(expected)
    assert np.linalg.norm(expected) > 0.1
