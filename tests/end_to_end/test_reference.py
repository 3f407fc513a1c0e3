"""The whole app against a dozen lines of numpy: same data, same weights, float64, nothing shared but the files."""

import numpy as np
import pytest

from tests.end_to_end.server_step import server_step
from tests.end_to_end.softmax import KEYS, Problem, assert_close

ROUNDS, CLIENTS, ZERO = 6, 7, np.zeros((10, 65))


@pytest.mark.parametrize(
    ("strategy", "alpha", "weights", "optimizer", "server_lr"),
    [
        ("fedprox", 0.3, "samples", "sgd", 1.0),
        ("fedavg", 0.0, "uniform", "sgd", 0.5),
        ("fedavg", 0.0, "samples", "momentum", 0.3),
        ("fedprox", 0.3, "samples", "adagrad", 0.05),
        ("fedavg", 0.0, "uniform", "adam", 0.05),
        ("fedprox", 0.3, "uniform", "yogi", 0.05),
    ],
)
def test_full_batch_federated_descent_equals_numpy(run_app, strategy, alpha, weights, optimizer, server_lr):
    config = {
        **KEYS,
        "strategy": strategy,
        "client-weights": weights,
        "server-optimizer": optimizer,
        "server-lr": server_lr,
        "local-steps": 5,
        "l2": 0.01,
        "num-server-rounds": ROUNDS,
        "proximal-mu": alpha,
    }
    path = run_app(config, CLIENTS)
    problem = Problem(path)
    p = problem.p if weights == "samples" else np.full(CLIENTS, 1 / CLIENTS)
    W, step = ZERO, server_step(optimizer, server_lr)
    for _ in range(ROUNDS):
        W = step(W, sum(p[i] * (problem.descend(i, W, 5, l2=0.01, pull=alpha) - W) for i in range(CLIENTS)))
    assert_close(path, W)


@pytest.mark.parametrize(
    ("strategy", "momentum", "alpha", "optimizer"),
    [
        ("fednova", 0.0, 0.0, "sgd"),
        ("fednova", 0.6, 0.0, "fedexp"),
        ("scaffold", 0.6, 0.0, "sgd"),
        ("scaffold", 0.0, 0.0, "fedexp"),
        ("feddyn", 0.0, 0.3, "sgd"),
        ("mifa", 0.0, 0.0, "sgd"),
        ("fedavg", 0.0, 0.0, "fedexp"),
    ],
)
def test_methods_for_clients_of_unequal_steps_equal_numpy(run_app, strategy, momentum, alpha, optimizer):
    K, lr = np.array([1, 2, 3, 4, 5, 6, 9]), 0.2
    config = {
        **KEYS,
        "strategy": strategy,
        "local-steps": 1,
        "step-heterogeneity": f"list:{','.join(map(str, K))}",
        "lr": lr,
        "momentum": momentum,
        "feddyn-alpha": alpha or 0.01,
        "num-server-rounds": ROUNDS,
        "server-optimizer": optimizer,
    }
    path = run_app(config, CLIENTS)
    problem = Problem(path)
    # ‖a_i‖₁ as Wang et al. 2020, section 3, have it
    norms = (K - momentum * (1 - momentum**K) / (1 - momentum)) / (1 - momentum)

    W, H, before, own = ZERO, ZERO, ZERO, np.zeros((CLIENTS, 10, 65))
    for _ in range(ROUNDS):
        common = np.einsum("i,ijk->jk", problem.p, own)
        constant = {"scaffold": common - own, "feddyn": -own}.get(strategy, np.zeros_like(own))
        deltas = np.array(
            [
                problem.descend(i, W, K[i], lr=lr, pull=alpha, momentum=momentum, constant=constant[i]) - W
                for i in range(CLIENTS)
            ]
        )
        if strategy == "scaffold":
            own = own - common - deltas / (lr * norms)[:, None, None]
        if strategy == "feddyn":
            own, H = own - alpha * deltas, H - alpha * np.einsum("i,ijk->jk", problem.p, deltas)
        if strategy == "fednova":
            deltas = (problem.p @ norms) * deltas / norms[:, None, None]
        update, rate = np.einsum("i,ijk->jk", problem.p, deltas), 1.0
        if optimizer == "fedexp":
            rate = max(1.0, problem.p @ (deltas**2).sum((1, 2)) / (2 * ((update**2).sum() + 1e-3)))
        before, W = W, W + rate * update - (H / alpha if alpha else 0)
    assert_close(path, (before + W) / 2 if optimizer == "fedexp" else W, rel=2e-5)
