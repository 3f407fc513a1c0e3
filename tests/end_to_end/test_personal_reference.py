"""Models of clients' own against numpy in float64: Ditto, FedAMP and fine-tuning, in the whole app."""

from collections.abc import Callable

import numpy as np
import pytest
import safetensors.numpy
from sklearn.datasets import load_digits

import run_simulation
from fedapp.report.clients import by_evaluation

pytestmark = pytest.mark.usefixtures("no_figures")

ROUNDS, STEPS, LR, CLIENTS, L2 = 5, 3, 0.5, 7, 0.01

Array = np.ndarray


class Problem:
    """Softmax regression on each client's rows, by the run's partition; W is (10, 65), the last column the bias."""

    def __init__(self, partition: dict[str, Array], clients: int = CLIENTS) -> None:
        digits = load_digits()
        self.X = np.c_[digits.data / 16, np.ones(len(digits.data))]
        self.labels, self.Y = digits.target, np.eye(10)[digits.target]
        self.train = np.split(partition["client_indices"], partition["client_offsets"][1:-1])
        self.test = np.split(partition["test_indices"], partition["test_offsets"][1:-1])
        assert len(self.train) == len(self.test) == clients
        assert not set(partition["client_indices"]) & set(partition["test_indices"])
        self.p = np.array([len(rows) for rows in self.train]) / len(partition["client_indices"])

    def log_probabilities(self, w: Array, rows: Array) -> Array:
        z = self.X[rows] @ w.T
        z = z - z.max(1, keepdims=True)
        return z - np.log(np.exp(z).sum(1, keepdims=True))

    def descend(self, i: int, w: Array, steps: int, pull: float = 0.0, anchor: Array | None = None) -> Array:
        rows, anchor = self.train[i], w if anchor is None else anchor
        for _ in range(steps):
            residual = (np.exp(self.log_probabilities(w, rows)) - self.Y[rows]) / len(rows)
            w = w - LR * (residual.T @ self.X[rows] + L2 * w + pull * (w - anchor))
        return w

    def scores(self, models: list[Array]) -> dict[str, Array]:
        """Loss and accuracy of each client's model on its own test rows."""
        logs = [self.log_probabilities(w, rows) for w, rows in zip(models, self.test, strict=True)]
        rows = [self.labels[rows] for rows in self.test]
        return {
            "loss": np.array([-log[np.arange(len(y)), y].mean() for log, y in zip(logs, rows, strict=True)]),
            "accuracy": np.array([(log.argmax(1) == y).mean() for log, y in zip(logs, rows, strict=True)]),
        }


Run = Callable[..., tuple[Problem, Array, dict[str, list[float]]]]


@pytest.fixture
def go(pairs, tmp_path) -> Run:
    def run(engine: str = "sequential", **given):
        config = {
            "dataset": "digits",
            "model": "logistic",
            "init": "zeros",
            "batch-size": 0,
            "local-epochs": 0,
            "local-steps": STEPS,
            "lr": LR,
            "l2": L2,
            "num-server-rounds": ROUNDS,
            "test-on": "own",
            "test-fraction": 0.3,
            "eval-every": ROUNDS,
            "results-dir": str(tmp_path),
            "run-name": "run",
            **{key.replace("_", "-"): value for key, value in given.items()},
        }
        arguments = ["--engine", engine, "--run-config", pairs(config)]
        assert run_simulation.main([*arguments, "--federation-config", f"num-supernodes={CLIENTS}"]) == 0
        path = tmp_path / "run"
        model = safetensors.numpy.load_file(path / "model.safetensors")
        with np.load(path / "partition.npz") as partition:
            problem = Problem(dict(partition))
        return problem, np.c_[model["1.weight"], model["1.bias"]], by_evaluation(path)[ROUNDS]

    return run


def assert_close(ours: Array, expected: Array) -> None:
    assert np.linalg.norm(ours - expected) < 1e-5 * np.linalg.norm(expected)
    assert np.linalg.norm(expected) > 0.1


def assert_scores(told: dict[str, list[float]], problem: Problem, own: list[Array], w: Array) -> None:
    for prefix, models in (("personal-", own), ("", [w] * CLIENTS)):
        for name, values in problem.scores(models).items():
            assert told[f"{prefix}{name}"] == pytest.approx(values, rel=1e-5), f"{prefix}{name}"


@pytest.mark.parametrize(
    ("engine", "pull"), [("sequential", 0.3), ("sequential", 0.0), ("vectorized", 0.3), ("vectorized", 1.9)]
)
def test_ditto(go: Run, engine: str, pull: float) -> None:
    problem, ours, told = go(engine, strategy="ditto", ditto_lambda=pull)
    W, own = np.zeros((10, 65)), [np.zeros((10, 65))] * CLIENTS
    for _ in range(ROUNDS):
        own = [problem.descend(i, own[i], STEPS, pull, W) for i in range(CLIENTS)]
        W = np.einsum("i,ijk->jk", problem.p, [problem.descend(i, W, STEPS) for i in range(CLIENTS)])
    assert_close(ours, W)
    assert_scores(told, problem, own, W)
    if not pull:  # training alone
        alone = [problem.descend(i, np.zeros((10, 65)), ROUNDS * STEPS) for i in range(CLIENTS)]
        assert_scores(told, problem, alone, W)


def test_ditto_with_a_pull_as_strong_as_its_step_bears_stays_at_the_global_model(go: Run) -> None:
    # γ λ = 1: each step begins from W as it was sent, v = W − γ g(v), and one step away from it v ends.
    problem, ours, told = go(strategy="ditto", ditto_lambda=1 / LR, local_steps=1)
    W = np.zeros((10, 65))
    for _ in range(ROUNDS):
        before, W = W, np.einsum("i,ijk->jk", problem.p, [problem.descend(i, W, 1) for i in range(CLIENTS)])
    assert_close(ours, W)
    far = problem.scores([problem.descend(i, np.zeros((10, 65)), ROUNDS) for i in range(CLIENTS)])["loss"]
    near = problem.scores([before] * CLIENTS)["loss"]
    own = np.array(told["personal-loss"])
    assert np.abs(own - near).mean() < np.abs(far - near).mean()


@pytest.mark.parametrize(
    ("engine", "share", "sigma", "pull"),
    [("sequential", 1.0, 0.5, 0.3), ("vectorized", 0.6, 2.0, 0.3), ("sequential", 1.0, 1e-9, 0.0)],
)
def test_fedamp(go: Run, engine: str, share: float, sigma: float, pull: float) -> None:
    problem, ours, told = go(
        engine, strategy="fedamp", fedamp_alpha=share, fedamp_sigma=sigma, proximal_mu=pull
    )
    own = np.zeros((CLIENTS, 10, 65))
    for _ in range(ROUNDS):
        squares = ((own[:, None] - own[None]) ** 2).sum((2, 3))
        xi = share / CLIENTS * np.exp(-squares / sigma)
        np.fill_diagonal(xi, 0.0)
        np.fill_diagonal(xi, 1 - xi.sum(1))
        means = np.einsum("ij,jkl->ikl", xi, own)
        own = np.array([problem.descend(i, means[i], STEPS, pull) for i in range(CLIENTS)])
    W = np.einsum("i,ijk->jk", problem.p, own)
    assert_close(ours, W)
    assert_scores(told, problem, list(own), W)
    if sigma < 1e-6:  # nobody is like anybody: training alone
        assert_scores(
            told, problem, [problem.descend(i, np.zeros((10, 65)), ROUNDS * STEPS) for i in range(CLIENTS)], W
        )


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_fine_tuning(go: Run, engine: str) -> None:
    problem, ours, told = go(engine, strategy="fedprox", proximal_mu=0.3, fine_tune_epochs=4)
    W = np.zeros((10, 65))
    for _ in range(ROUNDS):
        W = np.einsum("i,ijk->jk", problem.p, [problem.descend(i, W, STEPS, 0.3, W) for i in range(CLIENTS)])
    assert_close(ours, W)
    assert_scores(told, problem, [problem.descend(i, W, 4) for i in range(CLIENTS)], W)
