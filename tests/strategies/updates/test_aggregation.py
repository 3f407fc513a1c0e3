"""Flower's robust rules over a round's updates, by hand, and what they are refused for."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from strategies import FedAvg, FedProx, RunError, Spectral
from strategies.core.conflicts import ConflictError
from strategies.flower import messages
from strategies.updates.aggregation import (
    MEAN,
    RULES,
    RobustRule,
    WeightedSum,
    added_in_order,
    block_size,
    robust_rule,
)
from strategies.updates.safeguards import bounded

Make = Callable[..., Any]
ROBUST = [rule for rule in RULES if rule != MEAN]


def least_updates(name: str, faulty: int) -> int:
    rule = robust_rule(name, faulty)
    assert rule is not None
    return rule.least


def together(rule: str, faulty: int, updates: list[list[float]]) -> list[float] | None:
    made = robust_rule(rule, faulty)
    assert made is not None
    gathered = RobustRule(made)
    for update in updates:
        gathered.add(1 / len(updates), np.array(update))
    result = gathered.result([1 / len(updates)] * len(updates))
    return None if result is None else result.tolist()


def test_rules_by_hand():
    five = [[1.0, 0.0], [2.0, 1.0], [3.0, 5.0], [4.0, 2.0], [1e6, -1e6]]
    assert together("median", 1, five) == [3.0, 1.0]  # by coordinate
    assert together("trimmed-mean", 1, five) == [3.0, 1.0]  # (2 + 3 + 4) / 3 and (0 + 1 + 2) / 3
    assert together("trimmed-mean", 0, five[:4]) == [2.5, 2.0]  # nothing is cut off: the mean
    line = [[0.0], [1.0], [2.5], [4.5], [1e3]]
    # n − f − 2 = 2 nearest: 0: 1 + 2.5², 1: 1 + 1.5² = 3.25, 2.5: 1.5² + 2² = 6.25, …: Krum takes 1
    assert together("krum", 1, line) == [1.0]
    # the n − f = 4 with the least scores: all but 1000; (0 + 1 + 2.5 + 4.5) / 4
    assert together("multi-krum", 1, line) == [2.0]
    # Scores over n − f − 2 = 4 nearest: 30, 15, 10, 10, 16.25, 41, …; the θ = n − 2f = 5 least are −1 to 3, their
    # median 1, and the β = θ − 2f = 3 nearest to it 0, 1, 2
    assert together("bulyan", 1, [[-1.0], [0.0], [1.0], [2.0], [3.0], [4.5], [1e6]]) == [1.0]


def test_too_few_updates_are_none():
    assert [least_updates(rule, 1) for rule in ROBUST] == [3, 3, 5, 5, 7]
    for rule in ROBUST:
        enough = [[float(i)] for i in range(least_updates(rule, 1))]
        assert together(rule, 1, enough) is not None
        assert together(rule, 1, enough[1:]) is None


@given(
    rule=st.sampled_from(ROBUST),
    faulty=st.integers(0, 2),
    extra=st.integers(0, 4),
    lie=st.floats(1e3, 1e12),
    data=st.data(),
)
def test_no_lie_gets_far(rule, faulty, extra, lie, data):
    """With as many liars as a rule bears, it stays within what honest clients sent."""
    number = least_updates(rule, faulty) + extra
    honest = data.draw(hnp.arrays(np.float64, (number - faulty, 3), elements=st.floats(-1, 1)))
    lies = [[lie, -lie, lie]] * faulty
    result = together(rule, faulty, [*honest.tolist(), *lies])
    assert result is not None
    assert np.all(np.abs(result) <= 1 + 1e-9)


@given(hnp.arrays(np.float64, st.integers(1, 6), elements=st.floats(0.1, 5)), st.data())
def test_the_sum_shares_missing_weights(weights, data):
    there = data.draw(hnp.arrays(np.bool_, len(weights)).filter(np.any))
    gathered = WeightedSum(2)
    for weight in weights[there]:
        gathered.add(float(weight), np.ones(2))
    result = gathered.result(weights.tolist())
    assert result == pytest.approx(np.full(2, weights.sum()))
    assert gathered.sensitivity(weights.tolist()) == pytest.approx(
        weights[there].max() * weights.sum() / weights[there].sum()
    )


@given(
    hnp.arrays(np.float64, st.integers(1, 6), elements=st.floats(0.1, 5)),
    st.floats(0.1, 10),
    st.booleans(),
    st.data(),
)
def test_no_update_moves_the_sum_beyond_the_bound_also_with_the_weight_of_others(
    weights, bound, blocks, data
):
    there = data.draw(hnp.arrays(np.bool_, len(weights)).filter(np.any))
    # One axis a client: the sum's coordinates are what each moves it by.
    lengths = data.draw(hnp.arrays(np.float64, len(weights), elements=st.floats(0, 10)))
    gathered = WeightedSum(len(weights), bound=bound)
    for place in np.flatnonzero(there):
        weight, update = float(weights[place]), np.eye(len(weights))[place] * lengths[place]
        if blocks:
            own = bounded(weight, update, bound)
            gathered.add_block(weight * own, 0.0, [weight], float(weight * own.max()))
        else:
            gathered.add(weight, update)
    gathered.end()
    total = gathered.total.tobytes()
    result = gathered.result(weights.tolist())
    assert result is not None
    assert result.max() <= bound * (1 + 1e-12)
    if there.all():  # nothing is shared out, whatever the rounding of norms
        assert result.tobytes() == total
    moves = np.where(there, np.minimum(weights * lengths, bound), 0.0)
    share = weights.sum() / weights[there].sum()
    if moves.max() * share <= bound or there.all():  # nothing to hold back: what there is without a bound
        np.testing.assert_allclose(result, share * moves, rtol=1e-12, atol=1e-300)
    else:
        np.testing.assert_allclose(result * moves.max(), moves * bound, rtol=1e-12, atol=1e-300)


@pytest.mark.parametrize("strategy", [FedAvg, FedProx])
def test_a_liar_decides_the_mean_and_not_the_median(strategy, federation, model, train_config):
    # Clients go from w to (w + centre) / 2 of centres 3, 2, −1: Δ = 1, .5, −1 from w = 1, median .5.
    options = {"client_weights": "uniform", "aggregation_rule": "median"}
    run = strategy(strategy.Config(**options))
    result = run.start(federation(), model(1.0), num_rounds=1, timeout=10.0, train_config=train_config())
    assert result.arrays["w"].numpy() == pytest.approx([1.5])


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"aggregation_rule": "krum", "faulty_clients": 1},
            "aggregation_rule = 'krum', faulty_clients = 1: needs 5 clients",
        ),
        (
            {"participation": "uniform", "over_select": 0.5},
            "over_select = 0.5: all 3 clients are asked without it",
        ),
        ({"participation": "fixed:6,7"}, "participation = 'fixed:6,7': none of these clients is there"),
        (
            {"participation": "fixed:6,7", "availability": "diurnal:0.5,100"},
            "participation = 'fixed:6,7': none of these clients is there",
        ),
    ],
)
def test_too_few_clients_are_an_error_before_any_trains(options, text, federation, model, train_config):
    grid, strategy = federation(), FedAvg(client_weights="uniform", **options)
    with pytest.raises(RunError, match=text):
        strategy.start(grid, model(1.0), num_rounds=2, timeout=10.0, train_config=train_config())
    assert grid.asked(messages.TRAIN, 1) == []


def test_a_round_with_too_few_valid_replies_keeps_the_model(federation, model, train_config, caplog):
    grid = federation()
    grid.spoil(1, "raise")
    config = FedAvg.Config(client_weights="uniform", aggregation_rule="trimmed-mean", faulty_clients=1)
    strategy = FedAvg(config)
    with pytest.raises(RunError, match=r"^no client's work was accepted in 1 aggregations"):
        strategy.start(grid, model(1.0), num_rounds=1, timeout=10.0, train_config=train_config())
    assert strategy.session.run.result.arrays["w"].numpy().tolist() == [1.0]
    assert (
        "round 1: 2 valid replies are fewer than the 3 for aggregation_rule = 'trimmed-mean', faulty_clients = 1, "
        "the model stays as it is"
    ) in caplog.text


@pytest.mark.parametrize(
    ("strategy", "options", "keys"),
    [
        (FedAvg, {"aggregation_rule": "krum"}, {"aggregation_rule", "client_weights"}),
        (FedAvg, {"dp": "central"}, {"dp", "client_weights"}),
        (
            FedAvg,
            {"dp": "central", "client_weights": "uniform", "participation": "md"},
            {"dp", "participation"},
        ),
        (
            FedProx,
            {"aggregation_rule": "krum", "client_weights": "uniform", "dp": "central"},
            {"aggregation_rule", "dp"},
        ),
        (Spectral, {"aggregation_rule": "krum"}, {"aggregation_rule", "strategy"}),
        (Spectral, {"dp": "central"}, {"dp", "strategy"}),
    ],
)
def test_what_the_maths_does_not_allow_is_refused(strategy, options, keys):
    with pytest.raises(ConflictError) as raised:
        strategy(strategy.Config(**options))
    assert set(raised.value.keys) == keys


def test_a_rule_for_more_clients_than_there_are_is_refused():
    config = FedAvg.Config(client_weights="uniform", aggregation_rule="bulyan", faulty_clients=1)
    FedAvg(config).check(7)
    with pytest.raises(ValueError, match="needs 7 clients a round or more, 6 take part"):
        FedAvg(config).check(6)


def noises(federation: Make, model: Callable[..., ArrayRecord], train_config: Make, **run: Any) -> np.ndarray:
    """Return the noise of a round of a large model that nobody trains away from where it is."""
    config = FedAvg.Config(
        client_weights="uniform", dp="central", dp_clipping_norm=0.5, dp_noise_multiplier=3.0, seed=1
    )
    strategy = FedAvg(config)
    strategy.run_options.deterministic_noise = run.get("repeatable", True)
    grid = federation()
    if run.get("spoil"):
        grid.spoil(1, "raise")
    start = model(*[1.0] * 20_000)
    result = strategy.start(grid, start, num_rounds=1, timeout=10.0, train_config=train_config())
    return np.asarray(result.arrays["w"].numpy(), dtype=np.float64) - 1


def test_central_noise_has_the_right_size_and_is_repeated_only_in_a_simulation(
    federation, model, train_config
):
    tools = (federation, model, train_config)
    noise = noises(*tools)
    # z S / n = 3 · .5 / 3 = .5; updates of norm S / √20000 an entry don't show. 4 standard errors: 4 · .5 / √40000
    assert noise.std() == pytest.approx(0.5, abs=0.01)
    assert np.array_equal(noise, noises(*tools))
    assert not np.array_equal(noise, noises(*tools, repeatable=False))
    # One reply is missing: the others count for half each, so z S / 2.
    assert noises(*tools, spoil=True).std() == pytest.approx(0.75, abs=0.015)


@pytest.mark.parametrize(
    ("number", "size", "clients"),
    [
        (1, 1, 1),
        (8, 1, 1),
        (9, 1, 2),
        (16, 1, 2),
        (17, 1, 3),
        (1000, 1, 64),
        (1000, 1 << 20, 8),
        (9, 1 << 30, 1),
    ],
)
def test_a_block_has_an_eighth_of_the_clients_at_most_64_and_64_mib(number, size, clients):
    assert block_size(number, size) == clients


@pytest.mark.parametrize(("private", "total"), [(False, 1.0), (True, 2.0)])
def test_under_privacy_the_weight_of_missing_updates_is_shared_whatever_the_others_sent(private, total):
    gathered = WeightedSum(1, 2, bound=1.0, private=private)
    gathered.add(0.5, np.array([2.0]))  # moves the sum by the bound already
    gathered.skip()
    assert gathered.result([0.5, 0.5]) == total
    assert gathered.sensitivity([0.5, 0.5]) == total / 2


def test_weights_that_cancel_still_have_a_sum():
    gathered = WeightedSum(2, 2)
    gathered.add(1.0, np.array([3.0, 0.0]))
    gathered.add(-1.0, np.array([0.0, 5.0]))
    gathered.end()
    assert gathered.total.tolist() == [3.0, -5.0]


@given(st.integers(1, 150), st.sampled_from([1, 2, 3, 4, 7, 8, 9, 33, 1000]), st.integers(0, 2**32))
def test_rows_are_added_one_after_the_other(rows, columns, seed):
    rng = np.random.default_rng(seed)
    given_rows = rng.normal(size=(rows, columns)) * 10.0 ** rng.integers(-12, 12, (rows, 1))
    total = np.zeros(columns)
    for row in given_rows:
        total += row
    assert added_in_order(given_rows).tobytes() == total.tobytes()
