"""Server optimizers, two steps by hand, and in the loops: what they act on, and when a run begins anew."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord
from flwr.serverapp.strategy import Strategy
from hypothesis import given
from hypothesis import strategies as st

from strategies import REGISTRY, FedAvg
from strategies.core.conflicts import ConflictError
from strategies.updates.server_optimizer import FEDEXP, OPTIMIZERS, make_optimizer
from tests.selection import methods

MODEL, FIRST, SECOND = np.array([1.0, -2.0]), np.array([0.5, -1.0]), np.array([1.0, 0.0])


def two_steps(name: str, lr: float) -> list[list[float]]:
    optimizer = make_optimizer(name, lr)
    one = optimizer.step(MODEL, FIRST)
    return [one.tolist(), optimizer.step(one, SECOND).tolist()]


def test_sgd_by_hand():
    # 1 + .5·.5 = 1.25, −2 − .5·1 = −2.5; then 1.25 + .5·1 = 1.75, −2.5 + 0.
    assert two_steps("sgd", 0.5) == [[1.25, -2.5], [1.75, -2.5]]


def test_momentum_by_hand():
    # v = (.5, −1), θ = (1, −2) + .5 v = (1.25, −2.5);
    # v = .9 (.5, −1) + (1, 0) = (1.45, −.9), θ = (1.25 + .725, −2.5 − .45).
    one, two = two_steps("momentum", 0.5)
    assert one == [1.25, -2.5]
    assert two == pytest.approx([1.975, -2.95], rel=1e-14)


def test_nesterov_by_hand():
    # v = (.5, −1), θ = (1, −2) + .5 ((.5, −1) + .9 v) = (1.475, −2.95);
    # v = (1.45, −.9), θ = (1.475, −2.95) + .5 ((1, 0) + .9 v) = (2.6275, −3.355).
    one, two = two_steps("nesterov", 0.5)
    assert one == pytest.approx([1.475, -2.95], rel=1e-14)
    assert two == pytest.approx([2.6275, -3.355], rel=1e-14)


def test_nesterov_is_torchs_outer_optimizer_and_moves_as_far_as_momentum_in_the_end():
    torch = pytest.importorskip("torch")
    theta = torch.tensor(MODEL, requires_grad=True)
    outer = torch.optim.SGD([theta], lr=0.7, momentum=0.9, nesterov=True)
    ours, model = make_optimizer("nesterov", 0.7), MODEL
    for update in (FIRST, SECOND, *[np.zeros(2)] * 300):
        theta.grad = -torch.tensor(
            update
        )  # DiLoCo's outer gradient: the model that was sent − the trained one
        outer.step()
        model = ours.step(model, update)
        np.testing.assert_allclose(model, theta.detach().numpy(), rtol=1e-13)
    np.testing.assert_allclose(model, MODEL + 0.7 * ours.gain * (FIRST + SECOND), rtol=1e-12)


# m = .1 (.5, −1) = (.05, −.1), then .9 (.05, −.1) + .1 (1, 0) = (.145, −.09), over √v + .001; v begins as 1e-6. Δ² is
# (.25, 1), then (1, 0).
@pytest.mark.parametrize(
    ("name", "first", "second"),
    [
        ("adagrad", [0.250001, 1.000001], [1.250001, 1.000001]),  # v + Δ²
        ("adam", [0.00250099, 0.01000099], [0.0124759801, 0.0099009801]),  # .99 v + .01 Δ²
        ("amsgrad", [0.00250099, 0.01000099], [0.0124759801, 0.01000099]),  # as Adam's, and never falls
        (
            "yogi",
            [0.002501, 0.010001],
            [0.012501, 0.010001],
        ),  # up by .01 Δ² where Δ² is above v, down where below
    ],
)
def test_adaptive_steps_by_hand(name, first, second):
    moments = zip(([0.05, -0.1], [0.145, -0.09]), (first, second), strict=True)
    steps = [0.1 * np.array(m) / (np.sqrt(v) + 0.001) for m, v in moments]
    expected = [MODEL + steps[0], MODEL + steps[0] + steps[1]]
    np.testing.assert_allclose(two_steps(name, 0.1), expected, rtol=1e-14)


def test_yogis_second_moment_goes_both_ways_and_stays_where_it_is_reached():
    # v = 1: Δ² = 4 is above, v = 1 + .01·4; Δ² = .25 below, v = 1 − .01·.25; Δ² = 1 is v.
    v = make_optimizer("yogi", 1.0).second_moment(np.ones(3), np.array([4.0, 0.25, 1.0]))
    assert v == pytest.approx([1.04, 0.9975, 1.0], rel=1e-14)


@given(st.lists(st.lists(st.floats(-1e6, 1e6), min_size=3, max_size=3).map(np.array), min_size=2, max_size=6))
def test_sgd_with_rate_one_adds_the_updates_bit_for_bit(client_vectors):
    optimizer, model, expected = make_optimizer("sgd", 1.0), client_vectors[0], client_vectors[0]
    for update in client_vectors[1:]:
        model, expected = optimizer.step(model, update), expected + update
    assert model.tobytes() == expected.tobytes()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_no_argument_is_written_to(name):
    optimizer, model, update = make_optimizer(name, 0.3), MODEL.copy(), FIRST.copy()
    for _ in range(3):
        optimizer.step(model, update)
    assert model.tolist() == MODEL.tolist()
    assert update.tolist() == FIRST.tolist()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_two_optimizers_share_no_state(name):
    make_optimizer(name, 0.3).step(MODEL, 100 * FIRST)
    assert two_steps(name, 0.3) == two_steps(name, 0.3)


def test_an_unknown_optimizer_is_refused_with_what_is_allowed():
    allowed = "allowed are sgd, momentum, nesterov, adagrad, adam, amsgrad, yogi, fedexp$"
    with pytest.raises(ValueError, match=rf"^server_optimizer = 'lamb': {allowed}"):
        make_optimizer("lamb", 1.0)


@pytest.mark.parametrize("name", ["fedavg", "scaffold", "async-fedavg", "fedasync", "fadas"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_an_adaptive_step_is_short_where_nobody_says_how_long_it_is(
    name, optimizer, federation, model, train_config
):
    if optimizer == FEDEXP and name not in SUMS:
        return
    own, adaptive = (
        {"buffer_size": 2} if name == "fadas" else {},
        optimizer in ("adagrad", "adam", "amsgrad", "yogi"),
    )
    strategy = REGISTRY[name](server_optimizer=optimizer, **own)
    strategy.start(federation(), model(1.0), num_rounds=2, train_config=train_config())
    # 1 / Σ p_i τ_i Σ 1/τ_i with p = (1, 2, 5)/8 and τ = (.2, .6, 1); m/C
    of_the_method = {"async-fedavg": 1 / (0.8 * 23 / 3), "fadas": 2 / 3}.get(name, 1.0)
    if optimizer in (
        "momentum",
        "nesterov",
    ):  # which move ten times as far in the end: a tenth, without rounds
        of_the_method = {"async-fedavg": 0.1, "fadas": 0.1}.get(name, 1.0) * of_the_method
    sgd_of_fadas = name == "fadas" and optimizer == "sgd"  # is amsgrad
    assert strategy.session.optimizer.lr == pytest.approx(
        0.01 if adaptive or sgd_of_fadas else of_the_method, rel=1e-12
    )


# ---- In the loops; for the event loop also events/test_objective.py ----------------------------------------


def adam_by_hand(model: float, updates: Callable[[float], float], steps: int, lr: float) -> float:
    m, v = 0.0, 1e-6
    for _ in range(steps):
        update = updates(model)
        m, v = 0.9 * m + 0.1 * update, 0.99 * v + 0.01 * update**2
        model += lr * m / (math.sqrt(v) + 1e-3)
    return model


def test_a_synchronous_strategy_hands_the_optimizer_the_weighted_sum(
    federation, model, values_of, train_config
):
    # Σ p_i Δ_i = −.5 (w − .25), by hand in test_round.py.
    strategy = FedAvg(FedAvg.Config(server_optimizer="adam", server_lr=0.1))
    result = strategy.start(federation(), model(1.0), num_rounds=3, train_config=train_config())
    expected = adam_by_hand(1.0, lambda w: -0.5 * (w - 0.25), 3, 0.1)
    assert values_of(result.arrays) == pytest.approx([expected], rel=1e-14)


def test_a_robust_rule_hands_it_its_result(federation, model, values_of, train_config):
    # Δ = 1, .5, −1 at w = 1; the median is client 1's, −.5 (w − 2): .5, then 1.25 → .375. v = .5, .45 + .375.
    strategy = FedAvg(
        FedAvg.Config(
            client_weights="uniform", aggregation_rule="median", server_optimizer="momentum", server_lr=0.5
        )
    )
    result = strategy.start(federation(), model(1.0), num_rounds=2, train_config=train_config())
    assert values_of(result.arrays) == pytest.approx([1.25 + 0.5 * 0.825], rel=1e-14)


def test_it_acts_on_the_sum_with_its_noise(federation, model, values_of, train_config):
    def moved(**options: Any) -> float:
        strategy = FedAvg(
            FedAvg.Config(client_weights="uniform", dp="central", dp_clipping_norm=9.0, seed=1, **options)
        )
        strategy.run_options.deterministic_noise = True
        result = strategy.start(federation(), model(1.0), num_rounds=1, train_config=train_config())
        return values_of(result.arrays)[0] - 1.0

    plain, scaled = moved(), moved(server_lr=0.25)
    assert abs(plain - 1 / 6) > 0.01  # the mean of Δ, without its noise
    assert scaled == pytest.approx(0.25 * plain, rel=1e-12)


def test_a_round_with_no_valid_reply_takes_no_step(federation, model, values_of, train_config):
    grid = federation()

    def break_and_mend(progress: Any) -> None:
        for partition in range(3):
            grid.spoil(partition, "raise" if progress.aggregation == 1 else None)

    config = FedAvg.Config(server_optimizer="momentum")
    broken = FedAvg(config, observer=break_and_mend).start(
        grid, model(1.0), num_rounds=3, train_config=train_config()
    )
    whole = FedAvg(config).start(federation(), model(1.0), num_rounds=2, train_config=train_config())
    assert values_of(broken.arrays) == values_of(whole.arrays)


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name != FEDEXP])  # a mean: see below
def test_flowers_own_loop_steps_alike_and_a_second_run_begins_anew(
    name, federation, model, same_bytes, train_config
):
    options: dict[str, Any] = {"num_rounds": 4, "timeout": 10.0, "train_config": train_config(2)}
    strategy = FedAvg(FedAvg.Config(server_optimizer=name, server_lr=0.3))
    runs: list[ArrayRecord] = [
        strategy.start(federation(), model(0.3, 0.8), **options).arrays,
        strategy.start(federation(), model(0.3, 0.8), **options).arrays,
        Strategy.start(strategy, federation(), model(0.3, 0.8), **options).arrays,
    ]
    assert same_bytes(runs[0], runs[1])
    assert same_bytes(runs[0], runs[2])


@pytest.mark.parametrize("name", REGISTRY)
def test_no_optimizer_is_without_effect_on_any_strategy(name, federation, model, train_config):
    # amsgrad is adam until updates shrink: the test below has enough of them for that.
    possible = [other for other in OPTIMIZERS if other != "amsgrad" and (other != FEDEXP or name in SUMS)]
    finals = set()
    for optimizer in possible:
        own = {"buffer_size": 2} if hasattr(REGISTRY[name].Config(), "buffer_size") else {}
        strategy = REGISTRY[name](server_optimizer=optimizer, server_lr=0.1, fraction_evaluate=0.0, **own)
        result = strategy.start(federation(), model(1.0), num_rounds=4, train_config=train_config())
        finals.add(result.arrays["w"].data)
    assert len(finals) == len(possible)


# ---- FedExP ------------------------------------------------------------------------------------------------

# Strategies whose round moves the model by Σ d_i × updates.
SUMS = methods("has_rounds", "steps_by_plain_sum")


def test_the_less_updates_agree_the_further_they_go_by_hand(go_fedexp):
    # p = (1, 2, 5)/8, Δ = (1, .5, −1) at w = 1: Δ̄ = −3/8, Σ p Δ² = (1 + .5 + 5)/8 = .8125.
    first = 1 - 0.375 * (0.8125 / (2 * (0.375**2 + 1e-3)))
    deltas = [0.5 * (c - first) for c in (3.0, 2.0, -1.0)]
    p = (1 / 8, 2 / 8, 5 / 8)
    mean = sum(d * x for d, x in zip(p, deltas, strict=True))
    squares = sum(d * x**2 for d, x in zip(p, deltas, strict=True))
    rate = squares / (2 * (mean**2 + 1e-3))
    assert rate > 1
    second = first + rate * mean
    # What is told and returned is the mean of the last two models; the rounds go on from the last.
    assert go_fedexp(2) == pytest.approx([1.0, (1 + first) / 2, (first + second) / 2], rel=1e-12)
    # Clients that agree: Σ d Δ² = Δ̄², and η_g = max(1, ½) = 1.
    assert go_fedexp(1, centres=(3.0, 3.0, 3.0)) == pytest.approx([1.0, 1.5], rel=1e-12)


@pytest.fixture
def go_fedexp(federation, model, train_config, values_of):
    def run(rounds: int, centres: Any = (3.0, 2.0, -1.0), **options: Any) -> list[float]:
        seen: list[float] = []
        strategy = FedAvg(
            server_optimizer=FEDEXP, observer=lambda p: seen.append(values_of(p.arrays)[0]), **options
        )
        result = strategy.start(
            federation(centres), model(1.0), num_rounds=rounds, train_config=train_config()
        )
        assert seen[-1] == values_of(result.arrays)[0]
        return seen

    return run


def test_a_round_without_replies_leaves_the_mean_as_it_is(federation, model, train_config, values_of):
    grid, seen = federation(), []

    def spoil_from_the_second(progress: Any) -> None:
        seen.append(values_of(progress.arrays)[0])
        for partition in range(3):
            grid.spoil(partition, "raise")

    strategy = FedAvg(server_optimizer=FEDEXP, observer=None)
    strategy.run_options.observer = lambda p: spoil_from_the_second(p) if p.aggregation else None
    strategy.start(grid, model(1.0), num_rounds=2, train_config=train_config())
    assert seen[0] == seen[1] != 1.0


@pytest.mark.parametrize("name", [name for name in REGISTRY if name not in SUMS])
def test_where_no_round_is_summed_fedexp_is_refused(name):
    with pytest.raises(ConflictError) as raised:
        REGISTRY[name](REGISTRY[name].Config(server_optimizer=FEDEXP))
    assert raised.value.keys == ("server_optimizer", "strategy")


def test_in_flowers_own_loop_it_says_that_the_result_is_the_last_model(
    federation, model, train_config, values_of, caplog
):
    strategy = FedAvg(server_optimizer=FEDEXP)
    result = Strategy.start(strategy, federation(), model(1.0), num_rounds=1, train_config=train_config())
    assert values_of(result.arrays) == pytest.approx(
        [1 - 0.375 * 0.8125 / (2 * (0.375**2 + 1e-3))], rel=1e-12
    )
    assert "its result is the mean of the last two models" in caplog.text
