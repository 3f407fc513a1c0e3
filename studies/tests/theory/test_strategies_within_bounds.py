"""The real strategies, on Flower's Message API, between their bounds.

Clients are quadratics with one parameter and no gradient noise. The strategies' global models equal those of the
numpy driver, so that the bounds, some of which speak of local iterates, hold for the strategies themselves.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from strategies import AsyncFedAvg, FedAvg, FedFix, FedProx, Progress, Spectral
from studies.theory import asynchronous, convex, lojasiewicz, perturbed
from studies.theory.constants import Constants
from studies.theory.problems import Quadratics, lower_bound_problem

Make = Callable[..., Any]

CENTRES = np.array([3.0, 2.0, -1.0, 0.5])
START, ROUNDS = 6.0, 25


class Run:
    """A strategy run on quadratic clients of equal size; all that its observer was told."""

    def __init__(
        self, strategy: Any, grid: Any, model: Any, config: Any, rounds: int = ROUNDS, start: float = START
    ) -> None:
        self.seen: list[Progress] = []
        strategy.run_options.observer = self.seen.append
        strategy.start(grid, model(start), num_rounds=rounds, timeout=20, train_config=config)
        assert len(self.seen) == rounds + 1

    @property
    def models(self) -> np.ndarray:
        """w̄_t, shape (T + 1,)."""
        return np.array([progress.arrays["w"].numpy()[0] for progress in self.seen])

    def gaps(self, problem: Quadratics) -> np.ndarray:
        """f(w̄_t) − f*, written out for one parameter."""
        p, a, c = problem.weights, problem.curvatures[:, 0], problem.centres[:, 0]
        best = (p @ (a * c)) / (p @ a)
        return 0.5 * (p @ a) * (self.models - best) ** 2


def clients(
    federation: Make, problem: Quadratics, directions: Sequence[Sequence[float]] | None = None
) -> Any:
    curvatures, centres = problem.curvatures[:, 0].tolist(), problem.centres[:, 0].tolist()
    return federation(centres, [1] * len(centres), curvatures, directions=directions)


def quadratic(curvatures: Sequence[float] | float = 1.0, weights: np.ndarray | None = None) -> Quadratics:
    return Quadratics(np.broadcast_to(curvatures, 4)[:, None], CENTRES[:, None], weights)


def constants_of(problem: Quadratics, trajectory: Any, start: float = START) -> Constants:
    p, a, c = problem.weights, problem.curvatures[:, 0], problem.centres[:, 0]
    best = (p @ (a * c)) / (p @ a)
    lowest, first = (0.5 * p @ (a * (w - c) ** 2) for w in (best, start))
    spread = (a * (start - c) - p @ (a * (start - c))) ** 2  # constant where the curvatures are equal
    return Constants(
        num_clients=len(p),
        L=a.max(),
        mu=a.min(),
        S=p @ p,
        G2=trajectory.gradient_bound(problem, 0.0),
        Gamma=lowest,
        Delta=first - lowest,
        distance2=(start - best) ** 2,
        zeta2=spread.max(),
        mean_zeta2=p @ spread,
    )


@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize("share", [0.2, 1.0])
def test_fedavg_below_the_bounds_of_000_and_001(
    federation: Make, model: Make, train_config: Make, drive: Make, steps: int, share: float
) -> None:
    problem = quadratic()
    for lr, kind in ((share / 4, "convex"), (share / (18 * steps), "pl")):
        run = Run(FedAvg(), clients(federation, problem), model, train_config(steps, lr))
        trajectory = drive(problem, [START], ROUNDS, steps, lr)
        np.testing.assert_allclose(run.models, trajectory.models[0, :, 0], rtol=1e-12)
        c, rounds = constants_of(problem, trajectory), np.arange(ROUNDS + 1)
        if kind == "convex":
            sums = np.cumsum(trajectory.shadow_gaps(problem).sum(axis=1))
            bound = convex.convex_bound(rounds[1:], c, lr=lr, local_steps=steps)
            assert (sums / (rounds[1:] * steps) <= bound).all()
        else:
            values = run.gaps(problem) + c.Gamma  # f_c* = 0, so F − F* is F
            assert (values <= lojasiewicz.pl_bound(rounds, c, mu=2.0, lr=lr, local_steps=steps)).all()


@pytest.mark.parametrize("alpha", [0.0, 0.1, 3.0])
@pytest.mark.parametrize("steps", [1, 4])
def test_fedprox_below_its_bounds(
    federation: Make, model: Make, train_config: Make, drive: Make, alpha: float, steps: int
) -> None:
    problem, rounds = quadratic([0.5, 1.0, 2.0, 1.5]), np.arange(ROUNDS + 1)
    strategy = FedAvg if alpha == 0 else FedProx
    config = FedAvg.Config() if alpha == 0 else FedProx.Config(proximal_mu=alpha)
    for lr in (0.02, 1 / (2 * (2 + alpha) * steps)):
        run = Run(strategy(config), clients(federation, problem), model, train_config(steps, lr))
        trajectory = drive(problem, [START], ROUNDS, steps, lr, alpha=alpha)
        np.testing.assert_allclose(run.models, trajectory.models[0, :, 0], rtol=1e-12)
        c, gaps = constants_of(problem, trajectory), run.gaps(problem)
        assert (gaps <= perturbed.fedprox_bound(rounds, c, lr=lr, local_steps=steps, alpha=alpha)).all()
        if lr != 0.02:
            assert (
                gaps <= perturbed.fedprox_fixed_bound(rounds, c, lr=lr, local_steps=steps, alpha=alpha)
            ).all()


def adjacency_of(directions: np.ndarray) -> np.ndarray:
    """A_ij = −ln ¼‖m_i − m_j‖², written out."""
    return np.array(
        [
            [0.0 if i == j else -np.log(np.sum((m - n) ** 2) / 4) for j, n in enumerate(directions)]
            for i, m in enumerate(directions)
        ]
    )


@pytest.mark.parametrize("beta", [0.2, 0.7])
@pytest.mark.parametrize("steps", [1, 4])
def test_spectral_below_its_bounds(
    federation: Make, model: Make, train_config: Make, drive: Make, beta: float, steps: int
) -> None:
    directions = np.array([[1.0, 0, 0], [0.8, 0.6, 0], [0.6, 0, 0.8], [0, 1.0, 0]])
    adjacency = adjacency_of(directions)
    problem = quadratic([0.5, 1.0, 2.0, 1.5], adjacency.sum(axis=1) / adjacency.sum())
    neighbours, rounds = adjacency / adjacency.sum(axis=1, keepdims=True), np.arange(ROUNDS + 1)
    for lr in (0.02, 1 / (4 * steps)):
        strategy = Spectral(Spectral.Config(perturbation_beta=beta))
        grid = clients(federation, problem, directions.tolist())
        run = Run(strategy, grid, model, train_config(steps, lr))
        trajectory = drive(problem, [START], ROUNDS, steps, lr, beta=beta, neighbours=neighbours)
        np.testing.assert_allclose(run.models, trajectory.models[0, :, 0], atol=1e-6)  # u travels as float32
        c, gaps = constants_of(problem, trajectory), run.gaps(problem)
        assert (gaps <= perturbed.spectral_bound(rounds, c, lr=lr, local_steps=steps, beta=beta)).all()
        if lr != 0.02:
            assert (
                gaps <= perturbed.spectral_fixed_bound(rounds, c, lr=lr, local_steps=steps, beta=beta)
            ).all()


@pytest.mark.parametrize("alpha", [0.0, 1.0])
@pytest.mark.parametrize("start", [2.0, -0.5])
def test_fedprox_above_its_lower_bound(
    federation: Make, model: Make, train_config: Make, alpha: float, start: float
) -> None:
    mu, pull, steps = 2.0, 3.0, 4
    problem, rounds = lower_bound_problem(mu, pull, 4, start), np.arange(ROUNDS + 1)
    c = Constants(num_clients=4, L=mu, S=0.25, Delta=3 * mu * start**2 / 8)
    for share in (0.1, 1.0):
        lr = share / (steps * (alpha + mu))
        strategy = FedProx(FedProx.Config(proximal_mu=alpha))
        run = Run(strategy, clients(federation, problem), model, train_config(steps, lr), start=start)
        bound = perturbed.fedprox_lower_bound(rounds, c, lr=lr, local_steps=steps, pull=pull, alpha=alpha)
        gaps = 3 * mu * run.models**2 / 8
        assert (gaps >= bound - 1e-12).all()
        assert bound[0] <= gaps[0] == pytest.approx(c.Delta)


@pytest.mark.parametrize("beta", [0.2, 0.8])
def test_spectral_above_its_lower_bound(
    federation: Make, model: Make, train_config: Make, beta: float
) -> None:
    # The theorem wants u_i = w̄. Two pairs of equal clients: mis is 1/16 within a pair and 1/4 across, so A is twice
    # as large within, and client i's neighbours are its twin by half and the other pair by half, which is w̄.
    gram = np.array(
        [
            [1, 7 / 8, 1 / 2, 1 / 2],
            [7 / 8, 1, 1 / 2, 1 / 2],
            [1 / 2, 1 / 2, 1, 7 / 8],
            [1 / 2, 1 / 2, 7 / 8, 1],
        ]
    )
    directions = np.linalg.cholesky(gram)
    adjacency = adjacency_of(directions)
    rows = adjacency / adjacency.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(rows[0], [0, 0.5, 0.25, 0.25])
    mu, pull, steps, start = 2.0, 3.0, 4, 2.0
    problem, rounds = lower_bound_problem(mu, pull, 4, start), np.arange(ROUNDS + 1)
    c = Constants(num_clients=4, L=mu, S=0.25, Delta=3 * mu * start**2 / 8)
    for share in (0.1, 1.0):
        lr = share / (steps * mu)
        strategy = Spectral(Spectral.Config(perturbation_beta=beta))
        grid = clients(federation, problem, directions.tolist())
        run = Run(strategy, grid, model, train_config(steps, lr), start=start)
        bound = perturbed.spectral_lower_bound(rounds, c, lr=lr, local_steps=steps, pull=pull, beta=beta)
        assert (3 * mu * run.models**2 / 8 >= bound - 1e-6).all()


@pytest.mark.parametrize("interval", [None, 0.35, 1.0])
@pytest.mark.parametrize("server_lr", [1.0, 0.25])
def test_async_and_fedfix_below_theorem_1(
    federation: Make, model: Make, train_config: Make, interval: float | None, server_lr: float
) -> None:
    # With K = 1 the models that the theorem speaks of are the global ones. F80: τ from 0.2 to 1.
    problem, N = quadratic([0.5, 1.0, 2.0, 1.5]), 60
    a, c, times = problem.curvatures[:, 0], problem.centres[:, 0], np.linspace(0.2, 1, 4)
    d = np.sum(1 / times) * times / 4 if interval is None else np.ceil(times / interval) / 4
    weight = d.max() if interval is None else d.sum()

    def run(lr: float) -> tuple[Run, np.ndarray, int]:
        """Return a run, its q_i(n), shape (N, 4), and its largest staleness."""
        if interval is None:
            strategy: Any = AsyncFedAvg(AsyncFedAvg.Config(server_lr=server_lr, eval_every=1))
        else:
            strategy = FedFix(FedFix.Config(fedfix_interval=interval, server_lr=server_lr, eval_every=1))
        record = Run(strategy, clients(federation, problem), model, train_config(1, lr), rounds=N)
        counts = np.array([[0.0] * 4, *(p.clients["participation"] for p in record.seen[1:])])
        delay = max(int(p.metrics.get("staleness-max", 0)) for p in record.seen[1:])
        return record, np.diff(counts, axis=0) * d, delay

    _, _, delay = run(1e-6)
    lr = min(1, 1 / (3 * max(1, weight) ** 2 * server_lr * (delay + 1))) / (48 * 2.0)
    record, q, _ = run(lr)
    used = q.any(axis=1)
    own = (q[used] @ (a * c)) / (q[used] @ a)
    surrogate = (q.sum(axis=0) @ (a * c)) / (q.sum(axis=0) @ a)

    def loss(weights: np.ndarray, w: np.ndarray | float) -> np.ndarray:
        return 0.5 * np.sum(weights * a * (np.reshape(w, (-1, 1)) - c) ** 2, axis=1)

    gap = np.sum(loss(q[used], record.models[:-1][used]) - loss(q[used], surrogate)) / N
    residual = np.sum(loss(q[used], surrogate) - loss(q[used], own)) / N
    squares, shares = (a * (own[:, None] - c)) ** 2, q[used] / q[used].sum(axis=1, keepdims=True)
    bound = asynchronous.explicit_bound(
        N,
        Constants(num_clients=4, L=2.0, distance2=(START - surrogate) ** 2),
        lr=lr,
        local_steps=1,
        delay=delay,
        residual=residual,
        noise=np.sum(shares * squares) / N,
        squared_noise=np.sum(shares**2 * squares) / N,
        server_lr=server_lr,
        weight=weight,
    )
    assert 0 < gap <= bound
    # Time-based weights make the surrogate the federated objective, once every cycle is whole.
    if interval == 1.0:
        assert surrogate == pytest.approx((a @ c) / a.sum())
