"""A plain numpy driver of every method on quadratics, and the grid on which the real strategies run them.

The driver keeps every local iterate, which the bounds speak of and a server never sees. That the real strategies do
what the driver does is tested in ``test_strategies_within_bounds.py``.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pytest

from studies.theory.problems import Quadratics
from tests.strategies.conftest import (  # noqa: F401
    federation,
    model,
    quick_polls,
    task_identity,
    train_config,
)


@dataclass(frozen=True)
class Trajectory:
    """Every model of R repetitions of a run of T rounds: arrays with the repetitions first."""

    models: np.ndarray  # (R, T + 1, D): w̄_{t,0}
    locals: np.ndarray  # (R, T, E + 1, C, D): w_{t,k}^i
    points: np.ndarray  # (R, T, E, C, D): where gradients were taken

    def gaps(self, problem: Quadratics) -> np.ndarray:
        """E f(w̄_t) − f*, shape (T + 1,): a mean over the repetitions."""
        return objective_gaps(problem, self.models).mean(axis=0)

    def shadow_gaps(self, problem: Quadratics) -> np.ndarray:
        """E f(x̄^(t,k)) − f* of the mean local models after k = 1..E steps, shape (T, E)."""
        shadow = np.einsum("i,rtkid->rtkd", problem.weights, self.locals[:, :, 1:])
        return objective_gaps(problem, shadow).mean(axis=0)

    def gradient_bound(self, problem: Quadratics, sigma2: float) -> float:
        """G²: the largest E‖g_i‖² of any step of any client."""
        squares = np.sum(problem.gradients(self.points) ** 2, axis=-1)
        return float(squares.mean(axis=0).max()) + sigma2


def objective_gaps(problem: Quadratics, models: np.ndarray) -> np.ndarray:
    """f − f* at models (..., D), written out here and not taken from the problem."""
    differences = models[..., None, :] - problem.centres
    values = 0.5 * np.sum(problem.curvatures * differences**2, axis=-1) @ problem.weights
    a, c, p = problem.curvatures, problem.centres, problem.weights
    best = (p @ (a * c)) / (p @ a)
    return values - 0.5 * float(p @ np.sum(a * (best - c) ** 2, axis=1))


Drive = Callable[..., Trajectory]


@pytest.fixture(scope="session")
def drive() -> Drive:
    """Run FedAvg, FedProx (alpha) or the spectral method (beta, neighbours) on quadratics."""

    def run(
        problem: Quadratics,
        start: Sequence[float],
        rounds: int,
        steps: int,
        lr: float | Sequence[float],
        *,
        alpha: float = 0.0,
        beta: float = 1.0,
        neighbours: np.ndarray | None = None,  # row-stochastic (C, C)
        sigma2: float = 0.0,
        seed: int = 0,
        repeats: int = 1,
    ) -> Trajectory:
        C, D = problem.centres.shape
        rng = np.random.default_rng(seed)
        rates = np.broadcast_to(lr, rounds)
        w = np.broadcast_to(np.asarray(start, dtype=float), (repeats, D))
        u = np.broadcast_to(w[:, None], (repeats, C, D))
        models, locals_, points = [w], [], []
        for rate in rates:
            local, inner, at = np.broadcast_to(w[:, None], (repeats, C, D)), [], []
            inner.append(local)
            for _ in range(steps):
                point = beta * local + (1 - beta) * u
                noise = np.sqrt(sigma2 / D) * rng.normal(size=local.shape) if sigma2 else 0.0
                gradient = problem.curvatures * (point - problem.centres) + noise
                local = local - rate * (gradient + alpha * (local - w[:, None]))
                inner.append(local)
                at.append(point)
            w = np.einsum("i,rid->rd", problem.weights, local)
            if neighbours is not None:
                u = np.einsum("ij,rjd->rid", neighbours, local)
            models.append(w)
            locals_.append(np.stack(inner, axis=1))
            points.append(np.stack(at, axis=1))
        return Trajectory(np.stack(models, 1), np.stack(locals_, 1), np.stack(points, 1))

    return run


@pytest.fixture(scope="session")
def aggregate() -> Callable[..., tuple[np.ndarray, int]]:
    """Run an asynchronous scheme: every aggregation n adds Σ d_i Δ_i of who[n], each from the model it was last sent.

    Returns θ^{n,k}, shape (N, K, R, D), and the largest staleness.
    """

    def run(
        problem: Quadratics,
        start: Sequence[float],
        who: Sequence[Sequence[int]],
        d: Sequence[float],
        lr: float,
        steps: int,
        rng: np.random.Generator,
        *,
        server_lr: float = 1.0,
        sigma2: float = 0.0,
        repeats: int = 1,
    ) -> tuple[np.ndarray, int]:
        theta = np.tile(np.asarray(start, dtype=float), (repeats, 1))
        everyone = range(problem.num_clients)
        sent, version = dict.fromkeys(everyone, theta), dict.fromkeys(everyone, 0)
        delay, inner, D = 0, [], problem.num_parameters
        for n, clients in enumerate(who):
            virtual = [theta]
            local = {i: sent[i] for i in clients}
            for _ in range(steps):
                total = np.zeros_like(theta)
                for i in clients:
                    gradient = problem.curvatures[i] * (local[i] - problem.centres[i])
                    gradient = gradient + np.sqrt(sigma2 / D) * rng.normal(size=gradient.shape)
                    local[i] = local[i] - lr * gradient
                    total += d[i] * gradient
                virtual.append(virtual[-1] - server_lr * lr * total)
            inner.append(virtual[:-1])
            theta = virtual[-1]
            for i in clients:
                delay = max(delay, n - version[i])
                sent[i], version[i] = theta, n + 1
        return np.array(inner), delay

    return run


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(7)
