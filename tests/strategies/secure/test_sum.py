"""Secure sums: the plain sum of whoever stayed, to the quantisation's bound, whichever third goes in which stage."""

from math import fsum

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strategies.secure.masking import HEADER, LARGEST_NUMBER, NUMBER_STEP, Quantizer, SecureSumError
from tests.strategies.secure.sums import Sum, encoded

VALUES = 7


@st.composite
def dropouts(draw: st.DrawFn) -> tuple[int, int, dict[int, int], int]:
    """Return n clients, k neighbours, who goes before which stage (a third at most), and a seed."""
    number = draw(st.integers(4, 12))
    going = draw(st.lists(st.integers(0, number - 1), unique=True, max_size=number // 3))
    stages = draw(st.lists(st.integers(0, 3), min_size=len(going), max_size=len(going)))
    return number, 0, dict(zip(going, stages, strict=True)), draw(st.integers(0, 99))


@given(dropouts())
def test_the_sum_is_the_plain_one_whichever_third_goes_in_which_stage(
    case: tuple[int, int, dict[int, int], int],
) -> None:
    number, k, gone, seed = case
    rng = np.random.default_rng(seed)
    updates, weights = rng.uniform(-2, 2, (number, VALUES)), rng.uniform(0, 1, number)
    quantizer = Quantizer.for_sum(2.0, number)
    each = Sum.of(number, gone, k)
    total = each.total(encoded(updates, list(weights), quantizer))
    stayed = [i for i in range(number) if gone.get(i, 4) > 2]
    found = quantizer.decode(total, len(stayed))
    assert sorted(each.server.summed) == stayed
    plain = weights[stayed] @ updates[stayed]
    assert np.abs(found.update - plain).max() <= quantizer.error(len(stayed))
    assert (found.weight, found.outside) == (sum(quantizer.weight(w) for w in weights[stayed]), 0)
    assert not each.server.liars


def test_with_few_neighbours_each_the_sum_of_many_is_the_plain_one_too() -> None:
    number, gone = 24, {3: 1, 7: 2, 11: 2, 20: 3, 21: 0}
    updates = np.arange(number * VALUES, dtype=float).reshape(number, VALUES) / 100 - 0.5
    quantizer = Quantizer.for_sum(2.0, number)
    each = Sum.of(number, gone, k=12)
    assert {len(near) for near in each.server.asked.values()} == {12}
    found = quantizer.decode(each.total(encoded(updates, [1.0] * number, quantizer)), 20)
    stayed = [i for i in range(number) if gone.get(i, 4) > 2]
    assert np.abs(found.update - updates[stayed].sum(0)).max() <= quantizer.error(20)


def test_values_out_of_range_are_cut_and_their_clients_counted_in_the_sum() -> None:
    updates = np.array([[3.0, 0.5], [-0.5, 0.5], [0.25, -9.0]])
    quantizer = Quantizer.for_sum(1.0, 3)
    found = quantizer.decode(Sum.of(3).total(encoded(updates, [1.0, 1.0, 0.5], quantizer)), 3)
    assert found.outside == 2
    assert found.update == pytest.approx([1.0 - 0.5 + 0.125, 0.5 + 0.5 - 1.0], abs=quantizer.error(3))


NUMBERS = st.floats(-LARGEST_NUMBER, LARGEST_NUMBER)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(NUMBERS, NUMBERS), min_size=1, max_size=30))
def test_numbers_beside_the_update_are_summed_to_half_a_step_each(rows: list[tuple[float, float]]) -> None:
    quantizer, rng = Quantizer.for_sum(1.0, len(rows)), np.random.default_rng(0)
    values = [quantizer.encode(np.zeros(2), 1.0, rng, row) for row in rows]
    found = quantizer.decode(np.sum(values, axis=0, dtype=np.uint32), len(rows), 2)
    expected = [fsum(column) for column in zip(*rows, strict=True)]
    assert found.numbers == pytest.approx(expected, abs=len(rows) * NUMBER_STEP / 2, rel=1e-15)
    assert found.update == pytest.approx([0, 0], abs=quantizer.error(len(rows)))


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -2 * LARGEST_NUMBER])
def test_a_number_out_of_range_is_no_part_of_a_sum(number: float) -> None:
    with pytest.raises(SecureSumError, match=r"a number of its sum is .*; allowed is ± 4\.1943e\+06"):
        Quantizer(1.0, 9).encode(np.zeros(1), 1.0, np.random.default_rng(0), [number])


def test_rounding_has_no_bias() -> None:
    quantizer, update = Quantizer(1.0, 4), np.full(40_000, 0.3)  # between 0 and 0.5, which is two levels up
    (values,) = encoded(update[None], [1.0], quantizer)
    mean = quantizer.decode(values, 1).update.mean()
    assert mean == pytest.approx(0.3, abs=4 * 0.25 / np.sqrt(len(update)))


@pytest.mark.parametrize(
    ("gone", "said"),
    [
        (dict.fromkeys(range(4), 0), "3 of 7 clients sent keys, and a client needs 4 neighbours that did"),
        (dict.fromkeys(range(4), 1), "3 of 7 clients dealt shares, and a client needs 4 neighbours that did"),
        (dict.fromkeys(range(6), 2), "1 masked updates came, and a sum is of 2 or more"),
        (dict.fromkeys(range(4), 3), r"[23] shares of client \d's secret came, and 4 are needed"),
    ],
)
def test_where_too_many_go_one_line_says_so(gone: dict[int, int], said: str) -> None:
    values = [np.zeros(HEADER + 1, np.uint32)] * 7
    with pytest.raises(SecureSumError, match=said):
        Sum.of(7, gone).total(values)


@pytest.mark.parametrize("size", [1, 10, 1000])
def test_a_rounded_update_isnt_longer_than_the_norm(size: int) -> None:
    quantizer, rng = Quantizer.for_sum(8.0, 1000, norm=0.5), np.random.default_rng(size)
    for length in (0.2, 0.4999999, 0.5000001, 30.0):
        update = rng.normal(size=size)
        update *= length / np.linalg.norm(update)
        (values,) = encoded(update[None], [1.0], quantizer)
        found = quantizer.decode(values, 1)
        assert np.linalg.norm(found.update) <= 0.5
        assert (found.longer, found.outside) == (int(length > 0.5), 0)
        assert (
            np.abs(found.update - update * min(1, 0.5 / length)).max() <= 2 * quantizer.error(1) * size**0.5
        )
