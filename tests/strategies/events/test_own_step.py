"""The step size that an asynchronous method has by itself, ``server_lr = 0``: docs/theory.md derives it."""

from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strategies import REGISTRY, FedAvg
from strategies.events.contribution_weights import steady_step
from tests.selection import methods, spread
from tests.strategies.events.runs import CENTRES, SIZES, Record, bits, replay

weights = st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=30).map(np.array)


def test_the_step_by_hand():
    assert steady_step(np.array([0.5, 1.5, 2.0]), num_busy=3) == 1 / 4
    assert steady_step(np.ones(8), num_busy=8) == 1 / 8  # at every arrival
    assert steady_step(np.full(8, 1 / 2), num_busy=8) == 2 / 8  # a buffer of two
    assert steady_step(np.ones(8), num_busy=2) == 1 / 2  # two of eight at work
    assert (
        steady_step(np.array([1.0, 1.0, 1.0, 5.0]), num_busy=1) == 1 / 5
    )  # no contribution is more than a round
    assert steady_step(np.full(49, 1 / 49), num_busy=49) == 1  # whose sum isn't quite 1
    assert steady_step(np.full(4, 1 / 4), num_busy=2) == 1  # nor is a step
    assert steady_step(np.zeros(2), num_busy=2) == 1  # nobody's work is known to come


@given(weights, st.data())
def test_what_is_at_work_moves_the_model_by_a_round_at_most(d, data):
    at_work = data.draw(st.integers(1, len(d)))
    step = steady_step(d, at_work)
    assert 0 < step <= 1
    assert step * d.max() <= 1 + 1e-9
    assert at_work * step * d.mean() <= 1 + 1e-9
    # More at work never makes it longer.
    assert at_work == 1 or step <= steady_step(d, at_work - 1)


@given(
    st.lists(st.tuples(st.floats(0.01, 1), st.integers(1, 30)), min_size=1, max_size=6), st.floats(0.01, 1)
)
def test_the_mean_of_the_error_gets_smaller(clients, a):
    """e(n+1) = e(n) − η_g a Σ p_i e(n + 1 − P_i): the roots of its characteristic polynomial (docs/theory.md)."""
    p, P = np.array(clients).T
    p /= p.sum()
    coefficients = np.zeros(int(P.max()) + 1)  # of z^max P, …, z^0
    coefficients[0], coefficients[1] = 1, -1
    np.add.at(coefficients, P.astype(int), a * p * steady_step(p * P, len(p)))
    assert np.abs(np.roots(coefficients)).max(initial=0.0) < 1


@pytest.mark.parametrize(
    ("scheme", "options", "expected"),
    [  # p = (.1, .2, .3, .4), τ = (3, 7, 11, 15)/15 s: P = τ Σ 1/τ, Σ p τ = 11 / 15, Σ 1/τ = 9.5065
        ("async", {}, 1 / (15 * (1 / 3 + 1 / 7 + 1 / 11 + 1 / 15) * 11 / 15)),
        ("async", {"aggregation_weights": "identical"}, 1 / 4),
        # ⌈τ / .5⌉ = (1, 1, 2, 2)
        ("fedfix", {"fedfix_interval": 0.5}, 1 / (0.1 + 0.2 + 0.6 + 0.8)),
        ("fedbuff", {"buffer_size": 2, "aggregation_weights": "identical"}, 2 / 4),
        ("fedbuff", {"buffer_size": 4}, 1.0),
    ],
)
def test_a_run_has_it(scheme, options, expected, federation, start):
    run = start(scheme, federation(CENTRES, SIZES), 12, lr=0.25, server_lr=0.0, **options)
    assert run.strategy.default_server_lr() == pytest.approx(expected, rel=1e-12)
    d = run.seen[-1].clients["weight"]
    assert run.values == pytest.approx(replay(run.events(), d, server_lr=expected), rel=1e-11)


@pytest.mark.parametrize(
    ("scheme", "options"),
    [
        ("fedfix", {"fedfix_interval": 1.0}),
        ("fedfix", {"fedfix_interval": 3.0, "aggregation_weights": "observed"}),
        *(("fedbuff", {"buffer_size": 4, "aggregation_weights": w}) for w in ("time-based", "identical")),
        ("fedbuff", {"buffer_size": 4, "server_optimizer": "momentum"}),
        ("fedbuff", {"buffer_size": 4, "time_scenario": "F0"}),
    ],
)
def test_it_is_one_where_the_method_is_fedavg_bit_for_bit(
    scheme, options, federation, start, model, train_config
):
    common: dict[str, Any] = {"client_weights": "uniform"} | options
    run = start(scheme, federation(CENTRES, SIZES), 9, lr=0.25, server_lr=0.0, **common)
    seen: list[Any] = []
    optimizer = options.get("server_optimizer", "sgd")
    FedAvg(
        client_weights="uniform", server_optimizer=optimizer, observer=seen.append, fraction_evaluate=0.0
    ).start(federation(CENTRES, SIZES), model(1.0), num_rounds=9, train_config=train_config(1, 0.25))
    expected = [progress.arrays["w"].data for progress in seen]
    if options.get("aggregation_weights") == "observed":  # whose d_i and step each round differently
        assert run.values == pytest.approx([float(p.arrays["w"].numpy()[0]) for p in seen], rel=1e-12)
    else:
        assert bits(run) == expected


# The part of a round, least and most, where it isn't all of one. FADAS's steps are as long whatever the updates are,
# and FedAsync mixes models. AREA's model is the mean of models of different ages. A client may contribute twice in a
# round of Ringleader's. Two of four equal clients make a round of Rennala's, and no update is stale. CA²FL observes
# P_i.
OTHERS = {
    "fadas": None,
    "fedasync": None,
    "area": (0.5, 1.0),
    "ringleader": (0.5, 1.0),
    "rennala": (2.0, 2.0),
    "ca2fl": (0.95, 1.0),
}


@pytest.mark.parametrize("name", methods(has_rounds=False))
def test_one_contribution_of_every_client_moves_the_model_as_a_round_of_fedavg(
    name, federation, model, train_config
):
    if (allowed := OTHERS.get(name, (1.0, 1.0))) is None:
        pytest.skip("its steps aren't a multiple of the updates")
    kind, seen = REGISTRY[name], []
    given = {"buffer_size": 2, "max_local_steps": 1, "min_local_steps": 1, "fedfix_interval": 0.5}
    own = {key: value for key, value in given.items() if hasattr(kind.Config(), key)}
    kind(eval_every=1, time_scenario="F0", observer=seen.append, fraction_evaluate=0.0, **own).start(
        # A long way off and slowly: every update is 0.5, whatever model a client has.
        federation([1e9] * 4, [1] * 4, [1e-9] * 4, messages=False),
        model(0.0),
        num_rounds=80,
        train_config=train_config(1, 0.5),
    )
    counts = np.array([progress.clients["participation"] for progress in seen[1:]])
    values = np.array([float(progress.arrays["w"].numpy()[0]) for progress in seen[1:]])
    even = np.flatnonzero((counts == counts[:, :1]).all(axis=1))[5:]  # the caches are filled
    sweeps = counts[even[-1], 0] - counts[even[0], 0]
    part = (values[even[-1]] - values[even[0]]) / sweeps / 0.5
    assert sweeps >= 5
    assert allowed[0] - 1e-6 <= part <= allowed[1] + 1e-6


# ---- Steady, whoever is slow ---------------------------------------------------------------------------------

LAWS = {
    "equal": np.ones(10),
    "F80": np.linspace(0.2, 1, 10),
    "lognormal": np.exp(np.random.default_rng(3).normal(0, 1, 10)),
    "one is 50 times slower": np.array([0.1] * 9 + [5.0]),
}
# A scheme, its options, and the number of aggregations of a run.
SCHEMES: list[tuple[str, dict[str, Any], int]] = [
    ("async", {}, 300),
    *(
        ("fedfix", {"fedfix_interval": interval}, number)
        for interval, number in ((0.1, 300), (0.5, 80), (2.0, 30))
    ),
    *(("fedbuff", {"buffer_size": m}, 400 // m) for m in (2, 5, 8)),
]


@pytest.fixture
def play(federation, start, tmp_path):
    """Run clients that each go all the way to the common minimum, 0, with every task: nothing is harder."""

    def run(scheme: str, law: np.ndarray, rounds: int, **options: Any) -> Record:
        times = tmp_path / "times.csv"
        times.write_text("".join(f"{i},{seconds!r}\n" for i, seconds in enumerate(law.tolist())))
        common: dict[str, Any] = {"time_scenario": f"trace:{times}", "server_lr": 0.0, "eval_every": 10**6}
        grid = federation([0.0] * len(law), [1] * len(law), messages=False)
        return start(scheme, grid, rounds, lr=1.0, **common | options)

    return run


@pytest.mark.parametrize(("scheme", "law"), spread(list(product(range(len(SCHEMES)), LAWS)), 9))
def test_it_is_stable(play, scheme, law):
    name, options, number = SCHEMES[scheme]
    run = play(name, LAWS[law], number, **options)
    assert max(map(abs, run.values)) <= 1 + 1e-9
    assert abs(run.values[-1]) < 0.5


@pytest.mark.parametrize(
    ("scheme", "options", "server_lr"),
    [*((*SCHEMES[k][:2], 1.0) for k in (0, 1, 4, 5)), (*SCHEMES[5][:2], 0.5)],
)
def test_other_steps_are_not(play, scheme, options, server_lr):
    """The papers' step of 1, and m/C, which doesn't know that one is slow."""
    run = play(scheme, LAWS["one is 50 times slower"], 130, server_lr=server_lr, **options)
    assert max(map(abs, run.values)) > 10


def largest_root(a: float, P: int, step: float, beta: float = 0.9) -> float:
    """Return max |z| of the recursion with momentum for clients that each contribute once in P > 1 aggregations."""
    coefficients = np.zeros(P + 1)
    coefficients[:3] = 1, -1 - beta, beta
    coefficients[P] += a * step
    return float(np.abs(np.roots(coefficients)).max())


def test_momentum_has_a_tenth_of_the_step_where_updates_are_stale(play):
    assert largest_root(0.12, 10, 1 / 10) < 1 < largest_root(0.13, 10, 1 / 10)
    assert all(largest_root(a, P, 1 / P / 10) < 1 for a in (0.01, 0.1, 0.5, 1.0) for P in (2, 10, 100))
    for name, options, _ in (SCHEMES[0], SCHEMES[1], SCHEMES[4]):
        run = play(name, LAWS["F80"], 120, server_optimizer="momentum", **options)
        assert run.strategy.session.optimizer.lr == pytest.approx(run.strategy.default_server_lr() / 10)
        assert abs(run.values[-1]) < 0.5 < 2 > max(map(abs, run.values))
    longer = play("async", LAWS["equal"], 150, server_optimizer="momentum", server_lr=1 / 10)
    assert max(map(abs, longer.values)) > 10


@pytest.mark.parametrize("weights", ["time-based", "identical"])
def test_where_few_are_at_work_it_is_their_number_that_counts(play, weights):
    common = {"concurrency": 5, "aggregation_weights": weights}
    law = np.linspace(0.2, 1, 50)
    run, by_all = play("async", law, 60, **common), play("async", law, 60, server_lr=1 / 50, **common)
    assert max(map(abs, run.values)) <= 1 + 1e-9
    assert abs(run.values[-1]) < 0.01 < 0.1 < abs(by_all.values[-1])


def test_with_observed_periods_it_follows_slowly(play):
    looks: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "strategies.events.contribution_weights.steady_step",
            lambda d, num_busy: looks.append(1) or steady_step(d, num_busy),
        )
        run = play("async", LAWS["F80"], 1000, aggregation_weights="observed")
    assert len(looks) < 1000 / 10
    known = play("async", LAWS["F80"], 1)
    assert run.strategy.default_server_lr() == pytest.approx(known.strategy.default_server_lr(), rel=0.02)
