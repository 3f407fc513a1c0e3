"""The verdict on a table of results: by hand, by an independent computation, and over generated sweeps."""

import itertools
import math
from collections.abc import Sequence

import numpy as np
import pytest
from scipy import stats

from fedapp.report.verdict.judging import judge
from fedapp.report.verdict.paired import (
    deviation_interval,
    holm_adjusted,
    holm_levels,
    interval,
    p_value,
    power_of,
    seeds_needed,
)
from fedapp.report.verdict.verdict import Verdict

# Of the generated sweeps, chosen before their first run.
GENERATOR_SEED = 20_261_128

# By hand: t = 3 / (1 / √3) = √27 of three differences 2, 3, 4; on two degrees of freedom p = 1 − t / √(2 + t²).
P = 1 - math.sqrt(27 / 29)


def judged(settings: dict[str, Sequence[float]], **options: float) -> Verdict:
    rows = [(name, seed, value) for name, values in settings.items() for seed, value in enumerate(values)]
    return judge(rows, "score", **{"higher": True, **options})  # type: ignore[arg-type]


def test_a_t_test_and_its_interval_by_hand():
    differences = np.array([2.0, 3.0, 4.0])
    assert p_value(differences) == p_value(-differences) == pytest.approx(P)
    # The quantile on two degrees of freedom for a level a is (1 − a) √(2 / (a (2 − a))): 4.3027 for 0.05.
    half = 0.95 * math.sqrt(2 / (0.05 * 1.95)) / math.sqrt(3)
    assert interval(differences, 0.05) == pytest.approx((3 - half, 3 + half))
    assert math.isnan(interval(np.array([5.0]), 0.05)[0])
    assert p_value(np.array([5.0])) == 1.0


def test_differences_without_a_spread_are_no_division_by_zero():
    """A sign test of n equal signs has p = 2 · 2^−n."""
    assert p_value(np.zeros(3)) == 1.0
    assert interval(np.zeros(3), 0.05) == (0.0, 0.0)
    assert p_value(np.full(3, 0.1)) == 0.25
    assert interval(np.full(3, 0.1), 0.05) == (0.1, 0.1)


def test_holm_as_in_the_books():
    # .01 · 4, .02 · 3, max(.06, .03 · 2), max(.06, .04 · 1).
    ps = np.array([0.03, 0.01, 0.04, 0.02])
    np.testing.assert_allclose(holm_adjusted(ps), [0.06, 0.04, 0.06, 0.06])
    np.testing.assert_allclose(holm_adjusted(np.array([0.9, 0.6])), [1.0, 1.0])
    # .01 is rejected at .05 / 4; .02 isn't at .05 / 3, which is the level of all that follow.
    np.testing.assert_allclose(holm_levels(ps, 0.05), [0.05 / 3, 0.05 / 4, 0.05 / 3, 0.05 / 3])


@pytest.mark.parametrize(("effect", "number"), [(0.5, 34), (0.8, 15), (1.0, 10)])
def test_the_number_of_seeds_is_that_of_power_tables(effect, number):
    """Pairs for a two-sided test at .05 with power .80, as G*Power 3.1 gives them."""
    assert seeds_needed(effect, 1.0, 0.05) == number
    assert power_of(effect, 1.0, number - 1, 0.05) < 0.8 <= power_of(effect, 1.0, number, 0.05)
    assert (
        seeds_needed(0.0, 1.0, 0.05)
        is seeds_needed(1.0, math.nan, 0.05)
        is seeds_needed(0.01, 1.0, 0.05)
        is None
    )
    assert seeds_needed(1.0, 0.0, 0.05) == 6  # 2 · 2^−6 = 0.031


THREE = {"low": [8.0, 7.0, 6.0], "high": [10.0, 10.0, 10.0], "lowest": [-10.0, -20.0, -30.0]}


def test_three_settings_by_hand():
    """All three pairs have the t of the differences 2, 3, 4: high − low, 10 times that, and 9 times that."""
    found = judged(THREE)
    assert list(found.means.items()) == [("high", 10.0), ("low", 7.0), ("lowest", -20.0)]
    pair = found.pair("low", "high")
    assert (pair.better, pair.other, pair.seeds) == ("high", "low", 3)
    assert (pair.difference, pair.deviation, pair.p) == pytest.approx((3.0, 1.0, 3 * P))
    assert [each.p for each in found.pairs] == pytest.approx([3 * P] * 3)
    assert [each.level for each in found.pairs] == pytest.approx([0.05 / 3] * 3)
    assert (pair.low, pair.high) == pytest.approx(interval(np.array([2.0, 3.0, 4.0]), 0.05 / 3))
    assert not found.leader
    assert found.sentences == (
        "3 seeds can't tell which setting leads by score at the end: high has the best mean, but isn't apart from "
        "low (10.000 against 7.000, a difference of 3.000, 98.33 % interval -1.416 to 7.416, p = 0.11), nor from "
        "lowest (p = 0.11) (paired t-tests over 3 seeds, p-values and intervals by Holm over all 3 pairs).",
        "To tell high from low would take about 5 (3 to 49) seeds, from lowest about 5 (3 to 49), if the true "
        "differences are those seen (with 80 % power at each pair's corrected level; in brackets by the 95 % "
        "interval of the deviation alone).",
    )
    assert judged(THREE, level=0.2).leader == "high"
    assert judged(THREE, level=0.2).sentences == (
        "high leads by score at the end: 3.000 higher than low, the next, 10.000 against 7.000 (93.33 % interval "
        "0.877 to 5.123, p = 0.11), and apart from all 2 others (paired t-tests over 3 seeds, p-values and intervals "
        "by Holm over all 3 pairs).",
    )


def test_of_a_loss_the_lowest_leads():
    found = judged({"bad": [1.2, 1.3, 1.4], "good": [1.0, 1.0, 1.0]}, higher=False)
    assert (found.best, found.leader) == ("good", "good")
    assert found.sentences == (
        "good leads bad by 0.300 in score at the end, 1.000 against 1.300 (95 % interval 0.052 to 0.548, p = 0.035, "
        "paired t-test over 3 seeds).",
    )


def test_two_settings_are_one_sentence():
    found = judged({"a": [0.9, 0.93, 0.92], "b": [0.9, 0.92, 0.92]})
    assert found.sentences == (
        "3 seeds can't tell a from b by score at the end: 0.9167 against 0.9133, a difference of 0.0033 (95 % "
        "interval -0.0110 to 0.0177, p = 0.42, paired t-test); about 26 (9 to 932) would with 80 % power, if the "
        "true difference is the one seen; in brackets by the 95 % interval of the deviation alone.",
    )
    assert seeds_needed(1 / 300, float(np.std([0.0, 0.01, 0.0], ddof=1)), 0.05) == 26


def test_equal_settings_are_a_tie():
    found = judged({"a": [0.9, 0.8, 0.7], "b": [0.9, 0.8, 0.7]})
    assert found.pairs[0].is_tie
    assert found.pairs[0].p == 1.0
    assert found.sentences == ("a and b are equal on all 3 seeds (score at the end): a tie.",)
    many = judged({"a": [9.0, 8.0, 7.0], "b": [9.0, 8.0, 7.0], "c": [-99.0, -110.0, -101.0]})
    assert not many.leader
    assert (
        "isn't apart from b, which is equal on every seed; it is apart from c (a difference of "
        in many.sentences[0]
    )
    assert len(many.sentences) == 1  # no number of seeds tells a tie


def test_one_seed_tells_nothing_and_no_common_seed_is_no_pair():
    assert judged({"a": [0.9], "b": [0.8]}).sentences == (
        "1 seed can't tell settings apart: a has the best score at the end, 0.900 against 0.800; a test needs two "
        "seeds or more.",
    )
    apart = judge([("a", 0, 0.9), ("b", 1, 0.8)], "score", higher=True)
    assert (apart.pairs, apart.leader) == ((), "")
    assert "no seed in common" in apart.sentences[0]
    assert judged({"a": [0.9], "b": [math.nan]}).sentences == ("There are no two settings to compare.",)


def by_integral(differences: np.ndarray) -> float:
    """The two-sided p of Student's t, by the trapezoidal rule over its density."""
    number = len(differences)
    t = abs(differences.mean()) / (
        math.sqrt(((differences - differences.mean()) ** 2).sum() / (number - 1)) / math.sqrt(number)
    )
    freedom = number - 1
    x = np.linspace(0, t, 200_001)
    density = (1 + x**2 / freedom) ** (-(freedom + 1) / 2)
    scale = math.gamma((freedom + 1) / 2) / (math.sqrt(freedom * math.pi) * math.gamma(freedom / 2))
    return 1 - 2 * scale * float(np.trapezoid(density, x))


def test_all_pairs_against_an_independent_computation():
    """Holm's method by its definition: of the ordered p-values, (m − i + 1) p_(i), none below an earlier one."""
    values = np.random.default_rng(3).normal(size=(4, 6)) * 0.02 + np.array([[0.9], [0.88], [0.8], [0.7]])
    found = judged({str(number): each.tolist() for number, each in enumerate(values)})
    ps = {
        (one, other): by_integral(values[one] - values[other])
        for one, other in itertools.combinations(range(4), 2)
    }
    largest = 0.0
    for place, (one, other) in enumerate(sorted(ps, key=ps.__getitem__)):
        largest = max(largest, min(1.0, (6 - place) * ps[one, other]))
        pair = found.pair(str(one), str(other))
        assert pair.p == pytest.approx(largest, abs=1e-7)
        assert pair.apart == (largest <= 0.05) == (not pair.low <= 0 <= pair.high)
    assert {pair.apart for pair in found.pairs} == {True, False}


def losses_of_fedavg(generator: np.random.Generator, sweeps: int, names: int, seeds: int) -> np.ndarray:
    """Losses (sweeps, seeds, names) of FedAvg on least squares of four clients, whose local draws are independent.

    The clients' optima and the first model are those of the seed, the same under each name.
    """
    clients, dimension, steps, lr = 4, 5, 3, 0.2
    optima = generator.normal(size=(sweeps, seeds, 1, clients, dimension))
    model = generator.normal(size=(sweeps, seeds, 1, 1, dimension)) * np.ones((1, 1, names, 1, 1))
    for _ in range(10):
        local = np.repeat(model, clients, axis=3)
        for _ in range(steps):
            local = local - lr * (local - optima + generator.normal(size=local.shape))
        model = local.mean(axis=3, keepdims=True)
    return ((model - optima) ** 2).sum(axis=4).mean(axis=3) / 2


def test_of_200_sweeps_without_a_difference_at_most_16_have_a_false_pair():
    """At level .05 ten are expected, with a deviation of 3; one method under five names, five seeds."""
    losses = losses_of_fedavg(np.random.default_rng(GENERATOR_SEED), 200, 5, 5)
    false = 0
    for sweep in losses:
        found = judged({str(name): values.tolist() for name, values in enumerate(sweep.T)}, higher=False)
        assert len(found.pairs) == 10
        false += any(pair.apart for pair in found.pairs)
    assert false <= 16


def test_the_number_of_seeds_has_the_range_of_the_deviation():
    """χ² of two degrees of freedom has the quantiles −2 ln(1 − p): −2 ln .975 = .0506 and −2 ln .025 = 7.38."""
    low, high = deviation_interval(3.0, 3)
    assert low == pytest.approx(3 * math.sqrt(2 / (-2 * math.log(0.025))))
    assert high == pytest.approx(3 * math.sqrt(2 / (-2 * math.log(0.975))))
    found = judged({"a": [0.5, 0.6, 0.7], "b": [0.5, 0.5, 0.5]})
    pair = found.pair("a", "b")  # a difference of .1 with a deviation of .1
    expected = [seeds_needed(0.1, each, 0.05) for each in (0.1, *deviation_interval(0.1, 3))]
    assert [pair.needed, pair.needed_from, pair.needed_to] == expected == [10, 5, 312]
    assert (
        "; about 10 (5 to 312) would with 80 % power, if the true difference is the one seen; in brackets by the "
        "95 % interval of the deviation alone."
    ) in found.sentences[0]


def test_equal_differences_are_judged_by_the_sign_test_and_by_its_name():
    """Two seeds of one row's difference: 2^(1−2); with 6 seeds 2^(1−6) = .031 is below .05."""
    assert judged({"a": [0.5, 0.6], "b": [0.25, 0.35]}).sentences == (
        "2 seeds can't tell a from b by score at the end: 0.550 against 0.300, a difference of 0.250 (the same on "
        "every seed, p = 0.5, sign test); about 6 would with 80 % power, if the true difference is the one seen.",
    )
    three = judged({"a": [0.5, 0.6], "b": [0.25, 0.35], "c": [0.1, 0.3]})
    assert (
        "(paired t-tests over 2 seeds, sign tests where differences are all equal, p-values"
        in three.sentences[0]
    )


@pytest.mark.parametrize("settings", [2, 4])
def test_at_the_number_of_seeds_that_was_said_the_power_is_80_percent(settings):
    """A pilot of three seeds has the known difference and deviation; then that many seeds are drawn 4,000 times."""
    difference, deviation = 0.9, 1.0
    others = {str(number): [-1e3 * number, 1e3, 0.0] for number in range(2, settings)}
    pilot = judged(
        {"a": [difference - deviation, difference, difference + deviation], "b": [0.0] * 3, **others}
    )
    pair = pilot.pair("a", "b")
    assert (pair.difference, pair.deviation) == pytest.approx((difference, deviation))
    assert pair.needed is not None
    assert f"about {pair.needed} ({pair.needed_from} to " in " ".join(pilot.sentences)
    generator = np.random.default_rng(GENERATOR_SEED)
    draws = generator.normal(difference, deviation, (4000, pair.needed))
    power = float((stats.ttest_1samp(draws, 0.0, axis=1).pvalue <= pair.level).mean())
    assert power == pytest.approx(0.8, abs=0.06)
