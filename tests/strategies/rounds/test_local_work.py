"""Clients that take different numbers of steps: where every strategy ends, on quadratics J_k = a_k/2 (w − c_k)².

004, eqs. 5.12 and 5.26. As μ → 0 the model goes to Σ p_k E_k a_k c_k / Σ p_k E_k a_k with
a common step size, and with μ_k = μ / E_k to Σ p_k a_k c_k / Σ p_k a_k.
"""

from itertools import product

import numpy as np
import pytest
from flwr.app import ArrayRecord

from strategies import REGISTRY
from tests.selection import spread

A = np.array([1.0, 2.0, 0.5])
C = np.array([3.0, 2.0, -1.0])
E = np.array([1, 2, 7])
UNIFORM = np.full(3, 1 / 3)
# Of the fixture `tied`, the directions that the spectral method's weights come from.
TIED = np.array([3, 4, 5]) / 12


def limit(client_weights: np.ndarray, *, normalize: bool) -> float:
    """Where the model goes as μ → 0."""
    weight = client_weights * A * (1 if normalize else E)
    return float(weight @ C / weight.sum())


@pytest.fixture
def final_model(federation, model, train_config, values_of, tied):
    """Run a strategy on the three clients until it stands still and return its model."""

    def run(
        name: str, *, lr: float, normalize: bool, rounds: int, begin: float = 0.0, **config: object
    ) -> float:
        grid = federation(C, (1, 1, 1), A, directions=tied, num_partitions=3)
        for client, steps in enumerate(E.tolist()):
            grid.node(client).context.node_config["local-steps"] = steps
        strategy = REGISTRY[name]
        settings = strategy.Config(eval_every=rounds, **config)
        message = train_config(lr=lr, **{"normalize-steps": normalize})
        start: ArrayRecord = model(begin)
        return values_of(
            strategy(settings).start(grid, start, num_rounds=rounds, train_config=message).arrays
        )[0]

    return run


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize(("name", "alpha"), [("fedavg", 0.0), ("fedprox", 0.5)])
def test_the_fixed_point_for_any_step_size(final_model, name, alpha, normalize):
    # From w̄, E steps move client k by −s_k (w̄ − c_k), s_k = a/(a+α) (1 − (1 − μ_k (a+α))^E): each step takes
    # e = w − w̄ to (1 − μ_k (a+α)) e − μ_k a (w̄ − c_k). At the fixed point Σ s_k (w̄ − c_k) = 0.
    lr = 0.2
    step = lr / E if normalize else lr
    s = A / (A + alpha) * (1 - (1 - step * (A + alpha)) ** E)
    more = {"proximal_mu": alpha} if name == "fedprox" else {}
    rounds = 150 if normalize else 60
    found = final_model(name, lr=lr, normalize=normalize, rounds=rounds, client_weights="uniform", **more)
    assert found == pytest.approx(s @ C / s.sum(), rel=1e-12)


@pytest.mark.parametrize("normalize", [False, True])
def test_half_the_step_size_is_half_as_far_from_the_limit(final_model, normalize):
    expected = limit(UNIFORM, normalize=normalize)
    # Σ a c = 3 + 4 − 0.5 = 6.5 over Σ a = 3.5; Σ E a c = 3 + 8 − 3.5 = 7.5 over Σ E a = 1 + 4 + 3.5 = 8.5
    assert expected == pytest.approx(6.5 / 3.5 if normalize else 7.5 / 8.5)
    common: dict[str, object] = {"begin": expected, "client_weights": "uniform"}
    far, near = (
        abs(
            final_model("fedavg", lr=lr, normalize=normalize, rounds=200 if normalize else 80, **common)
            - expected
        )
        for lr in (0.04, 0.02)
    )
    assert far / near == pytest.approx(2, rel=0.1)
    assert near < 0.06


# Methods in which all arrivals count alike, or late ones less, go by p where clients are equally fast.
ALIKE: dict[str, dict[str, object]] = {
    "fedasync": {"time_scenario": "F0", "mixing_alpha": 0.3},
    "delay-adaptive": {"time_scenario": "F0"},
    "ringmaster": {"time_scenario": "F0"},
    "rennala": {"time_scenario": "F0", "buffer_size": 3},
    "fadas": {"time_scenario": "F0", "buffer_size": 3},
}


# FedCompass sets the clients' numbers of steps itself: where steps aren't normalised, its limit is that of its own.
LIMITS = [case for case in product(REGISTRY, [False, True]) if case != ("fedcompass", False)]


@pytest.mark.parametrize(("name", "normalize"), spread(LIMITS, 7))
def test_every_strategy_goes_to_the_limit(final_model, name, normalize):
    tied = REGISTRY[name]().config.client_weights == "adjacency"
    client_weights, more = (TIED, {}) if tied else (UNIFORM, {"client_weights": "uniform"})
    more |= ALIKE.get(name, {})
    if hasattr(REGISTRY[name].Config(), "buffer_size") and "buffer_size" not in more:
        more["buffer_size"] = 2
    if name == "feddyn":
        more["feddyn_alpha"] = 1.0
    # What they are made for: whatever the steps, the minimum is that of all.
    unbiased = normalize or name in ("fednova", "scaffold", "feddyn")
    expected, other = (limit(client_weights, normalize=n) for n in (unbiased, not unbiased))
    lr, rounds = (0.05, 160) if REGISTRY[name].has_rounds else (0.03, 450)
    rounds = 1500 if name == "fedasync" else rounds  # a model is mixed in thirds
    found = final_model(name, lr=lr, normalize=normalize, rounds=rounds, **more)
    # Σ p a c / Σ p a = 1.86 and Σ p E a c / Σ p E a = 0.88 (spectral 1.64 and 0.64): close to its own at a small μ
    assert abs(found - expected) < 0.15 * abs(other - expected)
