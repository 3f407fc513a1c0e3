"""Models of clients' own against numpy in float64: Ditto, FedAMP and fine-tuning, in the whole app."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedapp
from fedapp.report.client_tables import by_evaluation
from strategies.methods import fedamp
from strategies.methods.fedamp import attention
from tests.end_to_end.softmax import KEYS, Array, Problem, assert_close

ROUNDS, STEPS, CLIENTS, L2, ZERO = 5, 3, 7, 0.01, np.zeros((10, 65))
CONFIG = {
    **KEYS,
    "local-steps": STEPS,
    "l2": L2,
    "num-server-rounds": ROUNDS,
    "test-on": "own",
    "test-fraction": 0.3,
    "eval-every": ROUNDS,
}


def scores(problem: Problem, models: list[Array]) -> dict[str, Array]:
    """Return loss and accuracy of each client's model on its own test rows."""
    logs = [problem.log_probabilities(w, rows) for w, rows in zip(models, problem.test, strict=True)]
    rows = [problem.labels[rows] for rows in problem.test]
    return {
        "loss": np.array([-log[np.arange(len(y)), y].mean() for log, y in zip(logs, rows, strict=True)]),
        "accuracy": np.array([(log.argmax(1) == y).mean() for log, y in zip(logs, rows, strict=True)]),
    }


def assert_scores(path: Path, own: list[Array], w: Array) -> None:
    """Assert what is on record of clients' own models, and of the global one on clients' own test rows."""
    told, problem = by_evaluation(path)[ROUNDS], Problem(path)
    for prefix, models in (("personal-", own), ("", [w] * CLIENTS)):
        for name, values in scores(problem, models).items():
            assert told[f"{prefix}{name}"] == pytest.approx(values, rel=1e-5), f"{prefix}{name}"


def mean(problem: Problem, models: Any) -> Array:
    return np.einsum("i,ijk->jk", problem.p, list(models))


def alone(problem: Problem, steps: int) -> list[Array]:
    """Return the models of clients that train without the others."""
    return [problem.descend(i, ZERO, steps, l2=L2) for i in range(CLIENTS)]


@pytest.mark.parametrize(("engine", "pull"), [("sequential", 0.0), ("vectorized", 0.3)])
def test_ditto(run_app, engine, pull):
    path = run_app(CONFIG, CLIENTS, engine=engine, strategy="ditto", ditto_lambda=pull)
    problem, W, own = Problem(path), ZERO, [ZERO] * CLIENTS
    for _ in range(ROUNDS):
        own = [problem.descend(i, own[i], STEPS, l2=L2, pull=pull, anchor=W) for i in range(CLIENTS)]
        W = mean(problem, (problem.descend(i, W, STEPS, l2=L2) for i in range(CLIENTS)))
    assert_close(path, W)
    assert_scores(path, own, W)
    if not pull:
        assert_scores(path, alone(problem, ROUNDS * STEPS), W)


def test_ditto_with_a_pull_as_strong_as_its_step_bears_stays_at_the_global_model(run_app):
    # γ λ = 1: each step begins from W as it was sent, v = W − γ g(v), and one step away from it v ends.
    path = run_app(CONFIG, CLIENTS, strategy="ditto", ditto_lambda=1 / KEYS["lr"], local_steps=1)
    problem, W = Problem(path), ZERO
    for _ in range(ROUNDS):
        before, W = W, mean(problem, (problem.descend(i, W, 1, l2=L2) for i in range(CLIENTS)))
    assert_close(path, W)
    far = scores(problem, alone(problem, ROUNDS))["loss"]
    near = scores(problem, [before] * CLIENTS)["loss"]
    own = np.array(by_evaluation(path)[ROUNDS]["personal-loss"])
    assert np.abs(own - near).mean() < np.abs(far - near).mean()


@pytest.mark.parametrize(
    ("engine", "share", "sigma", "pull"),
    [("vectorized", 0.6, 2.0, 0.3), ("sequential", 1.0, 1e-9, 0.0)],
)
def test_fedamp(run_app, engine, share, sigma, pull):
    keys = {"strategy": "fedamp", "fedamp-alpha": share, "fedamp-sigma": sigma, "proximal-mu": pull}
    path = run_app(CONFIG | keys, CLIENTS, engine=engine)
    problem, own = Problem(path), np.zeros((CLIENTS, 10, 65))
    for _ in range(ROUNDS):
        squares = ((own[:, None] - own[None]) ** 2).sum((2, 3))
        xi = share / CLIENTS * np.exp(-squares / sigma)
        np.fill_diagonal(xi, 0.0)
        np.fill_diagonal(xi, 1 - xi.sum(1))
        means = np.einsum("ij,jkl->ikl", xi, own)
        own = np.array([problem.descend(i, means[i], STEPS, l2=L2, pull=pull) for i in range(CLIENTS)])
    W = mean(problem, own)
    assert_close(path, W)
    assert_scores(path, list(own), W)
    if sigma < 1e-6:  # nobody is like anybody
        assert_scores(path, alone(problem, ROUNDS * STEPS), W)


@pytest.mark.thorough  # 40 rounds
@pytest.mark.parametrize(
    ("sigma", "tenth", "last"), [(1.0, 0.05, 0.01), (10.0, 0.90, 0.95), (100.0, 0.99, 1.00)]
)
def test_fedamp_counts_others_as_much_as_the_guide_says(tmp_path, monkeypatch, sigma, tenth, last):
    shares = []

    def recording(*given):
        weights = attention(*given)
        others = ~np.eye(len(weights), dtype=bool)
        shares.append(len(weights) * weights[others].mean())  # 1: all are averaged
        return weights

    monkeypatch.setattr(fedamp, "attention", recording)
    fedapp.run(
        strategy="fedamp",
        fedamp_sigma=sigma,
        test_on="own",
        class_imbalance=20.0,
        figures=False,
        results_dir=tmp_path,
    )
    assert len(shares) == 40
    assert [shares[9], shares[-1]] == pytest.approx([tenth, last], abs=0.01)


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_fine_tuning(run_app, engine):
    keys = {"strategy": "fedprox", "proximal-mu": 0.3, "fine-tune-epochs": 4}
    path = run_app(CONFIG | keys, CLIENTS, engine=engine)
    problem, W = Problem(path), ZERO
    for _ in range(ROUNDS):
        W = mean(problem, (problem.descend(i, W, STEPS, l2=L2, pull=0.3) for i in range(CLIENTS)))
    assert_close(path, W)
    assert_scores(path, [problem.descend(i, W, 4, l2=L2) for i in range(CLIENTS)], W)
