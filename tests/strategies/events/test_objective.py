"""What a scheme minimises, and server optimizers in the loop."""

from typing import Any

import numpy as np
import pytest

from tests.selection import only, spread
from tests.strategies.events.runs import ASYNC_F80, CENTRES, SIZES, SUM, TAU, P, bits, replay

pytestmark = pytest.mark.timeout(600)


def test_example_1_of_the_paper(federation, start):
    """Odd and even clients take turns, each pair with both kinds of data: eq. 22 holds, and it converges to θ*."""
    # F0, m = 2: clients 0 and 1 are in aggregations 1, 3, …; 2 and 3 in 2, 4, …; kinds of data at 1 and 4: θ* = 2.5.
    run = start(
        "fedbuff",
        federation([1.0, 4.0, 1.0, 4.0], [1] * 4),
        60,
        lr=0.2,
        steps=2,
        time_scenario="F0",
        aggregation_weights="identical",
    )
    assert [list(staleness) for _, staleness in run.events()] == [[0, 1], [2, 3]] * 30
    phi, theta = 1 - (1 - 0.2) ** 2, run.values  # φ = 1 − (1 − η)^K
    assert theta[1] == pytest.approx(1 + phi * 1.5)
    for n in range(59):
        assert theta[n + 2] - theta[n + 1] + phi * theta[n] == pytest.approx(phi * 2.5, abs=1e-12)
    assert theta[-1] == pytest.approx(2.5, abs=1e-5)


@pytest.mark.parametrize(
    ("scenario", "weights", "limit"),
    [
        ("F0", "identical", 3.0),  # they take turns: q̃ = (1/2, 1/2) = p
        ("F50", "identical", 2.0),  # client 0 answers twice as often: q̃ = (2/3, 1/3), and 0·2/3 + 6/3
        ("F50", "time-based", 3.0),
    ],
)
def test_example_2_of_the_paper(federation, start, caplog, scenario, weights, limit):
    run = start(
        "async",
        federation([0.0, 6.0], [1, 1], messages=False),
        600,
        lr=0.02,
        time_scenario=scenario,
        eval_every=600,
        aggregation_weights=weights,
    )
    assert np.mean(run.values[-6:]) == pytest.approx(limit, abs=0.06)  # eq. 30, for a small step
    said = [r.message for r in caplog.records if "this run minimised" in r.message]
    assert len(said) == (limit != 3.0)
    if said:
        assert "distance is 0.167" in said[0]  # ½ (2/3 − 1/2 + 1/2 − 1/3) = 1/6
        assert "client 0 counted most in excess, 0.6667 for 0.5000" in said[0]


@pytest.mark.parametrize(
    ("scheme", "weights"),
    [
        ("async", "time-based"),
        ("async", "identical"),
        ("fedfix", "time-based"),
        ("fedbuff", "time-based"),
        ("fedbuff", "identical"),
    ],
)
@pytest.mark.parametrize("sizes", only([SIZES, (1, 1, 1, 1)], 1))
def test_quadratics_converge_to_the_optimum_of_the_expected_shares(
    federation, start, caplog, scheme, weights, sizes
):
    rounds, centres = 500 if scheme == "async" else 300, [8.0, 3.0, 0.0, -9.0]
    grid = federation(centres, sizes, messages=False)
    run = start(scheme, grid, rounds, lr=0.02, eval_every=rounds, aggregation_weights=weights)
    p = np.array(sizes) / sum(sizes)
    if weights == "time-based":
        q = p
    elif scheme == "async":
        q = (1 / TAU) / (1 / TAU).sum()
    else:  # how often each is in a buffer of the schedule
        counts = np.array(run.evaluations[-1].clients["participation"])
        assert counts[0] > 2 * counts[3]
        q = counts / counts.sum()
    optimum, federated = q @ centres, p @ centres
    if weights == "identical":
        assert abs(optimum - federated) > 2
    assert np.mean(run.values[-30:]) == pytest.approx(optimum, abs=0.3)
    assert run.evaluations[-1].clients["expected-share"] == pytest.approx(q.tolist(), rel=1e-9)
    said = [r.message for r in caplog.records if "this run minimised" in r.message]
    assert len(said) == (weights == "identical")


@pytest.mark.parametrize(
    ("scheme", "scenario"),
    spread(
        [
            ("async", "F80"),
            ("fedfix", "F80"),
            ("fedbuff", "F80"),
            ("async", "trace"),
            ("fedfix", "trace"),
            ("fedbuff", "trace"),
            ("fedbuff", "exponential"),
        ],
        4,
    ),
)
def test_expected_shares_are_those_observed_in_the_long_run(federation, start, tmp_path, scheme, scenario):
    if scenario == "trace":
        # Client 0: τ = 1 s, mostly .25 s. With Δt = .5: (1 + 1 + 1 + 7)/4 = 2.5 intervals a task, and not ⌈1/.5⌉ = 2;
        # client 1: 1.1 s is 3 intervals.
        (tmp_path / "times.csv").write_text("0,.25\n0,.25\n0,.25\n0,3.25\n1,1.1\n2,0.9\n3,1.5\n")
        scenario = f"trace:{tmp_path / 'times.csv'}"
    grid = federation([0.0] * 4, SIZES, messages=False)
    run = start(scheme, grid, 300, lr=0.01, time_scenario=scenario, eval_every=300, limit=240)
    last = run.evaluations[-1].clients
    assert last["observed-share"] == pytest.approx(last["expected-share"], abs=0.012)


# ---- Server optimizers in the loop ------------------------------------------------------------


def test_sgd_with_rate_one_is_the_plain_sum(federation, start):
    one = start("async", federation(CENTRES, SIZES), 8, lr=0.25)
    two = start("async", federation(CENTRES, SIZES), 8, lr=0.25, server_lr=1.0, server_optimizer="sgd")
    assert bits(one) == bits(two)


def test_the_server_rate_scales_every_move(federation, start):
    run = start("async", federation(CENTRES, SIZES), 14, lr=0.25, server_lr=0.3)
    assert run.values == pytest.approx(replay(ASYNC_F80, SUM * TAU * P, server_lr=0.3), rel=1e-11)


def test_momentum_and_adam_take_the_place_of_the_server_rate(federation, start):
    # F0, all four in each: Σ p c = .4 − .6 + 2.4 = 2.2. Update 1: .25 (2.2 − 1) = .3.
    common: dict[str, Any] = {"lr": 0.25, "buffer_size": 4, "time_scenario": "F0", "server_lr": 0.1}
    run = start("fedbuff", federation(CENTRES, SIZES), 2, server_optimizer="momentum", **common)
    # θ = 1 + .1·.3 = 1.03; update .25·1.17 = .2925, v = .9·.3 + .2925 = .5625, θ = 1.08625.
    assert run.values == pytest.approx([1.0, 1.03, 1.08625], rel=1e-12)
    run = start("fedbuff", federation(CENTRES, SIZES), 2, server_optimizer="adam", **common)
    # m = .03, v = .99e-6 + .01·.09 = .00090099: θ = 1 + .1·.03 / (√.00090099 + .001).
    first = 1 + 0.003 / (0.00090099**0.5 + 0.001)
    update = 0.25 * (2.2 - first)
    m, v = 0.9 * 0.03 + 0.1 * update, 0.99 * 0.00090099 + 0.01 * update**2
    assert run.values == pytest.approx([1.0, first, first + 0.1 * m / (v**0.5 + 0.001)], rel=1e-12)


def test_an_interval_without_arrivals_leaves_model_and_momentum_alone(federation, start):
    # Δt = .1, τ = 1 s each (F0): only every tenth interval has something in it, and is an aggregation.
    run = start(
        "fedfix",
        federation(CENTRES, SIZES),
        2,
        lr=0.25,
        time_scenario="F0",
        fedfix_interval=0.1,
        server_optimizer="momentum",
    )
    # d = 10 p, Σ p Δ = .25 (c̄ − w) with c̄ = 2.2: 1 + 10·.3 = 4; v = .9·3 + 10·.25 (2.2 − 4) = −1.8.
    assert run.values == pytest.approx([1.0, 4.0, 2.2])
    assert [p.time for p in run.seen] == pytest.approx([0.0, 1.0, 2.0])
