"""What a server sees of a secure sum: uniform numbers, which tell neither of the update nor of another round."""

import numpy as np
import pytest
from scipy import stats

from strategies.secure.client import ClientSession
from strategies.secure.masking import own_mask, pairwise_mask, shared_key
from tests.strategies.secure.sums import Sum

SIZE = 60_000
LEAST = 1e-9  # p-value: masks are new in every run, and without a mask it is 0


def masked(update: int, number: int = 4) -> dict[int, np.ndarray]:
    """Return what the server gets of clients whose values are all the same."""
    each = Sum.of(number)
    each.until_masked([np.full(SIZE, update, np.uint32)] * number)
    return each.masked


def uniform(values: np.ndarray) -> float:
    """Return the p-value of the χ² test that the highest and the lowest 8 bits are uniform; the smaller one."""
    bits = (values >> 24, values & 255)
    return min(stats.chisquare(np.bincount(each, minlength=256)).pvalue for each in bits)


def test_masked_updates_are_uniform_also_the_sum_of_some() -> None:
    seen = masked(0)
    assert min(map(uniform, seen.values())) > LEAST
    assert uniform(seen[0] + seen[1] + seen[2]) > LEAST


def test_two_rounds_of_a_client_and_two_clients_of_a_round_have_nothing_in_common() -> None:
    first, second = masked(17), masked(17)
    pairs = [(first[i], second[i]) for i in range(4)] + [(first[0], first[1])]
    for one, other in pairs:
        assert stats.pearsonr(one.astype(float), other.astype(float)).pvalue > LEAST
        assert uniform(one - other) > LEAST  # the difference of two equal updates isn't 0


def test_a_pair_has_one_mask_and_a_client_has_another_with_each_neighbour() -> None:
    a, b, c = (ClientSession(i, 2) for i in range(3))
    one = pairwise_mask(shared_key(a.mask_key, b.keys().mask), 100)
    assert (one == pairwise_mask(shared_key(b.mask_key, a.keys().mask), 100)).all()
    assert (one != pairwise_mask(shared_key(a.mask_key, c.keys().mask), 100)).mean() == pytest.approx(1)
    assert (own_mask(a.seed, 100) != own_mask(b.seed, 100)).mean() == pytest.approx(1)
