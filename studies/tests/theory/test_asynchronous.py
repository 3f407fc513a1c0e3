"""Fraboni et al.: terms and windows by hand, and async FedAvg and FedFix below theorem 1 in its proof's numbers."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strategies import AsyncFedAvg, FedFix, Progress
from studies.theory import asynchronous, representation, sampling
from studies.theory.constants import AssumptionError, Constants, StepSizeError
from studies.theory.problems import quadratics

BY_HAND = Constants(num_clients=4, L=2.0, distance2=6.0)


def values(terms: asynchronous.Terms) -> list[float]:
    return [float(t) for t in (terms.initial, terms.local, terms.noise, terms.staleness, terms.window)]


def test_terms_by_hand() -> None:
    # K = 4, N = 9: √(KN) = 6. Σ = 3.
    terms = asynchronous.synchronous_terms(9, BY_HAND, local_steps=4, noise=3.0)
    assert values(terms) == pytest.approx([1.0, 1.0, 1 / 8, 0.0, 0.0])
    # R = 1, τ_M/τ_0 = 5, W = 13: 5·4/6, 125·(4/9)·16·4, 12/6
    terms = asynchronous.asynchronous_terms(
        9, BY_HAND, local_steps=4, noise=3.0, residual=1.0, spread=5.0, window=13
    )
    assert values(terms) == pytest.approx([1.0, 1.0, 20 / 6, 32000 / 9, 2.0])
    # P = 2: level 1 + 2·3/4 = 2.5: (3/9)·4, 2.5/6, (4/9)·4·2.5, (2−1)/6
    terms = asynchronous.fedfix_terms(9, BY_HAND, local_steps=4, noise=3.0, residual=1.0, periods=2, window=2)
    assert values(terms) == pytest.approx([1.0, 4 / 3, 2.5 / 6, 40 / 9, 1 / 6])
    many = asynchronous.synchronous_terms([9, 36], BY_HAND, local_steps=4, noise=3.0)
    assert many.initial == pytest.approx([1.0, 0.5])


def test_windows_by_hand() -> None:
    # lcm(2, 3) = 6: 3 + 2 aggregations. F0 with 4 clients: 4. ⅓ and ½ in units of 1/6: lcm(2, 3) = 6 of them: 3 + 2.
    assert asynchronous.asynchronous_window([2, 3]) == 5
    assert asynchronous.asynchronous_window([1.0] * 4) == 4
    assert asynchronous.asynchronous_window([1 / 3, 0.5]) == 5
    assert asynchronous.asynchronous_window([0.2, 0.6, 1.0]) == 23  # 1, 3, 5 fifths: lcm 15: 15 + 5 + 3
    for unit in (1e-300, 4e-5, 1e5):  # only ratios matter
        assert asynchronous.asynchronous_window([2 * unit, 3 * unit]) == 5
    assert asynchronous.asynchronous_window([4e-5, 1.0]) == 25_001
    assert (
        asynchronous.asynchronous_window([1.6e-4, 1.0]) == 6_251
    )  # 6,250 and 1: with 1/10,000 for it 10,001
    assert asynchronous.fedfix_window([1, 2, 3]) == 6
    with pytest.raises(
        AssumptionError, match=r"Fraboni et al\. 2023, eq\. 35: task times must be above 0, one is 0"
    ):
        asynchronous.asynchronous_window([1, 0])
    with pytest.raises(AssumptionError, match=r"eq\. 35: there must be a task time"):
        asynchronous.asynchronous_window([])
    for counts in ([], [2, 0]):
        with pytest.raises(
            AssumptionError, match=r"section 4\.4: there must be numbers of periods of 1 or more"
        ):
            asynchronous.fedfix_window(counts)


def test_the_window_of_many_clients_is_beyond_floats() -> None:
    times = np.linspace(0.2, 1, 250)
    window = asynchronous.asynchronous_window(times.tolist())
    assert len(str(window)) == 358
    level = {"local_steps": 4, "noise": 3.0, "residual": 1.0}
    terms = asynchronous.asynchronous_terms([9, 36], BY_HAND, **level, spread=5.0, window=window)
    assert terms.window.tolist() == [np.inf, np.inf]
    assert terms.initial == pytest.approx([1.0, 0.5])
    counts = np.arange(1, 1000).tolist()
    fixed = asynchronous.fedfix_terms(
        9, BY_HAND, **level, periods=999, window=asynchronous.fedfix_window(counts)
    )
    assert fixed.window == np.inf
    chosen = sampling.chosen_terms(9, BY_HAND, lr=0.1, local_steps=4, noise=3.0, window=window)
    assert chosen.window == np.inf
    weights = {"mean_weight": 1.0, "largest_weight": 1.0}
    assert representation.window_term(lr=0.1, local_steps=4, window=window, gradient=2.0, **weights) == np.inf
    assert representation.window_term(lr=0.1, local_steps=4, window=window, gradient=0.0, **weights) == 0


def test_the_explicit_bound_by_hand() -> None:
    # L = 2, K = 2, η_l = .001, η_g = 1, τ = 0, ρ = 1, α = 1, β = 0: D = 6·1e-6·4 = 2.4e-5, X = .001 (τ = 0).
    # 6/(.001·2·10) = 300; 4DR = 9.6e-5; 6·1e-6·2·3 = 3.6e-5; 12·2·.001·2·1 = .048; 3·2.4e-5·.001·3 = 2.16e-7;
    # 6·.001·1.5 = .009
    bound = asynchronous.explicit_bound(
        10, BY_HAND, lr=0.001, local_steps=2, delay=0, residual=1.0, noise=3.0, squared_noise=1.5
    )
    assert bound == pytest.approx(300 + 9.6e-5 + 3.6e-5 + 0.048 + 2.16e-7 + 0.009, rel=1e-12)
    # τ = 1, ρ = 2, η_g = ½, η_l = 1/4000: η̃ = 1/8000, X = η̃ + 16·2·2·η̃² = 1.25e-4 + 1e-6; K = 1: D = 0
    # 6/(1.25e-4·1) + 12·2·2·X·2·1 + 6·4·X·1.5
    bound = asynchronous.explicit_bound(
        1,
        BY_HAND,
        lr=1 / 4000,
        local_steps=1,
        delay=1,
        residual=1.0,
        noise=3.0,
        squared_noise=1.5,
        server_lr=0.5,
        weight=2.0,
    )
    assert bound == pytest.approx(48_000 + (96 + 36) * 1.26e-4)


def test_ranges() -> None:
    # min(1, 1/(3·4·1·3))/(48·2·2) = 1/6912
    with pytest.raises(StepSizeError, match=r"Fraboni et al. 2023, theorem 1: .*0\.0002 .*= 0\.000144676\]"):
        asynchronous.explicit_bound(
            1, BY_HAND, lr=2e-4, local_steps=2, delay=2, residual=0, noise=0, squared_noise=0, weight=2.0
        )
    with pytest.raises(
        AssumptionError, match=r"Fraboni et al\. 2023, eq\. 38: spread 0\.5 and window 1 must be 1 or more"
    ):
        asynchronous.asynchronous_terms(1, BY_HAND, local_steps=1, noise=0, residual=0, spread=0.5, window=1)
    with pytest.raises(
        AssumptionError, match=r"Fraboni et al\. 2023, eq\. 42: noise and residual must be 0 or more"
    ):
        asynchronous.fedfix_terms(1, BY_HAND, local_steps=1, noise=-1, residual=0, periods=1, window=1)


# ---- Runs below the bound ---------------------------------------------------------------------------------------


def schedule(times: np.ndarray, count: int, interval: float | None) -> list[list[int]]:
    """Who contributes to each aggregation: one arrival after the other, or all of an interval (FedFix)."""
    if interval is None:
        arrivals = sorted((n * t, i) for i, t in enumerate(times) for n in range(1, count + 1))
        return [[i] for _, i in arrivals[:count]]
    periods = np.ceil(times / interval - 1e-9).astype(int)
    return [[i for i, period in enumerate(periods) if n % period == 0] for n in range(1, count + 1)]


@settings(deadline=None, max_examples=25)
@given(
    num_clients=st.integers(1, 5),
    K=st.integers(1, 5),
    share=st.floats(0.2, 1.0),
    server_lr=st.sampled_from([1.0, 0.3]),
    interval=st.sampled_from([None, 0.3, 0.5, 1.0]),
    heterogeneity=st.floats(0.0, 3.0),
    sigma2=st.sampled_from([0.0, 1.0]),
    seed=st.integers(0, 10**6),
)
def test_async_and_fedfix_stay_below(
    aggregate: Callable,
    num_clients: int,
    K: int,
    share: float,
    server_lr: float,
    interval: float | None,
    heterogeneity: float,
    sigma2: float,
    seed: int,
) -> None:
    rng = np.random.default_rng(seed)
    times = rng.uniform(0.2, 1.0, num_clients)
    problem = quadratics(
        rng, num_clients=num_clients, num_parameters=2, L=2.0, mu=0.3, heterogeneity=heterogeneity
    )
    p = problem.weights
    d = np.sum(1 / times) * times * p if interval is None else np.ceil(times / interval - 1e-9) * p
    who = schedule(times, 60, interval)
    start, N, repeats = np.array([3.0, -3.0]), len(who), 100 if sigma2 else 1

    def run(lr: float) -> tuple[np.ndarray, int]:
        return aggregate(
            problem, start, who, d, lr, K, rng, server_lr=server_lr, sigma2=sigma2, repeats=repeats
        )

    q = np.array([[d[i] if i in clients else 0.0 for i in range(num_clients)] for clients in who])  # q_i(n)
    weight = float(q.sum(axis=1).max())
    _, delay = run(1e-9)
    lr = share * min(1, 1 / (3 * max(1, weight) ** 2 * server_lr * (delay + 1))) / (48 * K * 2.0)
    inner, _ = run(lr)

    a, c = problem.curvatures, problem.centres

    def loss(weights: np.ndarray, w: np.ndarray) -> np.ndarray:
        return np.sum(weights[:, None] * a * (w[..., None, :] - c) ** 2, axis=(-2, -1)) / 2

    def best(weights: np.ndarray) -> np.ndarray:
        return (weights @ (a * c)) / (weights @ a)

    surrogate = best(q.mean(axis=0))
    used = [n for n in range(N) if q[n].any()]
    gap = sum(float(np.mean(loss(q[n], inner[n]) - loss(q[n], surrogate))) for n in used) / N
    own = {n: best(q[n]) for n in used}
    residual = sum(float(loss(q[n], surrogate) - loss(q[n], own[n])) for n in used) / N
    squares = {n: np.sum((a * (own[n] - c)) ** 2, axis=1) + sigma2 for n in used}
    shares = {n: q[n] / q[n].sum() for n in used}
    constants = Constants(num_clients=num_clients, L=2.0, distance2=float(np.sum((start - surrogate) ** 2)))
    bound = asynchronous.explicit_bound(
        N,
        constants,
        lr=lr,
        local_steps=K,
        delay=delay,
        residual=max(residual, 0.0),
        server_lr=server_lr,
        noise=sum(shares[n] @ squares[n] for n in used) / N,
        weight=weight,
        squared_noise=sum(shares[n] ** 2 @ squares[n] for n in used) / N,
    )
    assert gap <= bound
    if interval is not None and interval >= times.max():  # all in every round: the bound is on f − f* itself
        assert gap >= 0
        assert residual == pytest.approx(0, abs=1e-12)


def test_schedules_by_hand() -> None:
    assert schedule(np.array([0.5, 0.9]), 4, None) == [[0], [1], [0], [0]]  # 0.5, 0.9, 1.0, 1.5
    assert schedule(np.array([0.5, 0.9]), 4, 0.5) == [[0], [0, 1], [0], [0, 1]]


@pytest.mark.parametrize("times", [(1, 1, 1), (1, 2, 5), (2, 3, 5), (1, 5, 5, 5)])
def test_table_2_and_eq_34_in_runs_of_async_fedavg(
    federation: Callable, model: Callable, train_config: Callable, tmp_path: Path, times: tuple[int, ...]
) -> None:
    M, smallest, largest = len(times), min(times), max(times)
    cycle = math.lcm(*times)  # ν seconds, in which client i contributes ν/τ_i times
    window = sum(cycle // time for time in times)
    assert window == asynchronous.asynchronous_window(times)
    seen = _progress(AsyncFedAvg, federation, model, train_config, tmp_path, times, rounds=3 * window)
    counts = np.array([p.clients["participation"] for p in seen[1:]])
    for cycles in (1, 2, 3):
        assert seen[cycles * window].time == pytest.approx(cycles * cycle)  # N = Σ T/τ_i (eq. 39)
        assert counts[cycles * window - 1].tolist() == [cycles * cycle // time for time in times]
    # Eq. 34 with its number: while the slowest works, another ends at most ⌈τ_M/τ_0⌉ tasks.
    delay = max(p.metrics.get("staleness-max", 0) for p in seen[1:])
    assert M - 1 <= delay <= (M - 1) * math.ceil(largest / smallest)
    assert M <= window <= M * largest ** (M - 1)  # as the text says; the table has τ_M^M
    weights = sum(1 / time for time in times) * np.array(times) / M  # eq. 36, p = 1/M
    assert weights.max() <= largest / smallest * (1 + 1e-12)  # β


@pytest.mark.parametrize(
    ("times", "interval"), [((1, 2, 5), 1.0), ((1, 2, 5), 2.0), ((1, 3, 4), 5.0), ((1, 1), 0.1)]
)
def test_table_2_in_runs_of_fedfix(
    federation: Callable,
    model: Callable,
    train_config: Callable,
    tmp_path: Path,
    times: tuple[int, ...],
    interval: float,
) -> None:
    periods = [math.ceil(time / interval) for time in times]
    window = asynchronous.fedfix_window(periods)
    cycle = window * interval
    seen = _progress(
        *(FedFix, federation, model, train_config, tmp_path, times),
        rounds=3
        * (window if interval >= min(times) else 1),  # an interval without arrivals is no aggregation
        fedfix_interval=interval,
    )
    at = {round(p.time / cycle, 6): p.clients["participation"] for p in seen[1:]}
    for cycles in (1, 2, 3):
        assert at[cycles] == [cycles * window // period for period in periods]
    if interval >= min(times):
        assert max(p.metrics.get("staleness-max", 0) for p in seen[1:]) == max(periods) - 1
    assert window <= max(periods) ** len(times)
    # The table's largest τ and W have τ_0 where the text has Δt: with shorter intervals both are too small.
    printed = (max(times) // min(times), len(times) * math.ceil(max(times) / min(times)) ** len(times))
    assert (max(periods) - 1 > printed[0], window > printed[1]) == (interval < min(times),) * 2


def test_example_1_converges_for_partial_steps_alone() -> None:
    """Eq. 22's roots have modulus √φ above φ = 1/4: clients that end at their own optimum (φ = 1) never settle."""
    for phi, error in ((0.25, 0.0), (0.9, 0.0), (1.0, 2.5)):
        models = [0.0, 0.0]
        for _ in range(600):  # eq. 21, optima of the two kinds of data at 1 and 4
            models.append(models[-1] + 0.5 * phi * ((1 - models[-2]) + (4 - models[-2])))
        assert max(abs(np.array(models[-6:]) - 2.5)) == pytest.approx(error, abs=1e-6)


def test_example_2_is_of_the_models_that_clients_begin_with(
    federation: Callable, model: Callable, train_config: Callable, tmp_path: Path
) -> None:
    """For a step that isn't short the global model swings round eq. 30's limit; the models begun with don't."""
    weights, optima, lr = np.array([0.75, 0.25]), np.array([0.0, 6.0]), 0.4
    seen = _progress(
        AsyncFedAvg, federation, model, train_config, tmp_path, (1, 1), rounds=400, sizes=(3, 1), lr=lr
    )
    after_0, after_1 = (seen[n].arrays["w"].numpy()[0] for n in (-2, -1))
    # Client 0 begins with the model that its own contribution made, as client 1's came with the next.
    assert weights @ (after_0, after_1) == pytest.approx(weights @ optima)  # eq. 30: 1.5
    assert abs(after_0 - after_1) > 0.5
    assert after_0 - after_1 == pytest.approx(2 * weights[0] * lr * (optima[0] - after_0))


def _progress(
    kind: type[AsyncFedAvg | FedFix],
    federation: Callable,
    model: Callable,
    train_config: Callable,
    tmp_path: Path,
    times: Sequence[float],
    *,
    rounds: int,
    sizes: Sequence[int] | None = None,
    lr: float = 0.01,
    **settings: float,
) -> list[Progress]:
    """Run on quadratics of one parameter, with these task times; return what the observer was told."""
    trace = tmp_path / "times.csv"
    trace.write_text("".join(f"{client},{time}\n" for client, time in enumerate(times)))
    seen: list[Progress] = []
    strategy = kind(kind.Config(server_lr=1.0, eval_every=1, time_scenario=f"trace:{trace}", **settings))
    strategy.run_options.observer = seen.append
    optima = [0.0, 6.0, 3.0, 1.0][: len(times)]
    strategy.start(
        federation(optima, sizes or [1] * len(times), messages=False),
        model(5.0),
        num_rounds=rounds,
        timeout=20,
        train_config=train_config(1, lr),
    )
    return seen
