"""Label and quantity skew: arithmetic by hand, a reference by plain iteration, and properties that always hold."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import logsumexp

from fedapp.data.skew import (
    client_sizes,
    fit_margins,
    label_quantity_skew,
    largest_remainder,
    log_gamma_table,
    round_to_margins,
)
from tests.selection import only

IMBALANCES = st.one_of(st.just(0.0), st.floats(1e-320, 1e307), st.sampled_from([1e-3, 1.0, 1e6]))


def class_table(labels: np.ndarray, indices: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Samples per client and class (C, K)."""
    classes = labels.max() + 1
    parts = [labels[indices[a:b]] for a, b in pairwise(offsets)]
    return np.stack([np.bincount(part, minlength=classes) for part in parts])


def test_largest_remainder_by_hand():
    # Quotas of 10: 1.4, 2.7, 5.9. Rounded down 1 + 2 + 5 = 8; the two left go to remainders .9 and .7.
    assert largest_remainder(np.array([0.14, 0.27, 0.59]), 10).tolist() == [1, 3, 6]


def test_largest_remainder_of_ties_goes_to_the_first():
    # Quotas 1.25 each: one is left, and all remainders are equal.
    assert largest_remainder(np.ones(4), 5).tolist() == [2, 1, 1, 1]


def test_fitting_by_hand():
    # Cross-ratio (1·4)/(1·1) = 4 is kept; with all margins 3, [[x, 3−x], [3−x, x]] has x²/(3−x)² = 4, so x = 2.
    table = fit_margins(np.log([[1.0, 1.0], [1.0, 4.0]]), np.array([3, 3]), np.array([3, 3]))
    assert table == pytest.approx(np.array([[2.0, 1.0], [1.0, 2.0]]), abs=1e-9)


def fitted_by_iteration(log_table: np.ndarray, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """Iterative proportional fitting itself: scale the rows, then the columns, again and again."""
    b = np.zeros(len(columns))
    for _ in range(20_000):
        a = np.log(rows) - logsumexp(log_table + b, axis=1)
        b = np.log(columns) - logsumexp(log_table + a[:, None], axis=0)
        table = np.exp(log_table + a[:, None] + b)
        if np.abs(table.sum(axis=1) - rows).max() < 1e-9:
            break
    return table


@pytest.mark.parametrize("class_imbalance", only([0.0, 0.1, 1.0, 10.0, 100.0], 4))
@pytest.mark.parametrize(("classes", "clients"), [(10, 20), (10, 4), (3, 50)])
def test_fitting_is_the_limit_of_iterative_proportional_fitting(classes, clients, class_imbalance):
    rng = np.random.default_rng(4)
    rows = np.bincount(rng.integers(0, classes, 700), minlength=classes)
    columns = client_sizes(700, clients, 1.0, 2, rng)
    logs = log_gamma_table(classes, clients, class_imbalance, rng)
    expected = fitted_by_iteration(logs, rows, columns)
    missed = np.abs(expected.sum(axis=1) - rows).max()  # it is slow where cells differ much
    assert missed < 1e-2
    assert fit_margins(logs, rows, columns) == pytest.approx(expected, abs=1e-6 + 10 * missed)


@given(
    classes=st.integers(1, 12),
    clients=st.integers(1, 40),
    class_imbalance=IMBALANCES,
    data_imbalance=st.sampled_from([0.0, 1.0, 2.0, 9.0]),
    seed=st.integers(0, 2**32),
)
def test_rounding_goes_up_or_down_and_holds_both_margins(
    classes, clients, class_imbalance, data_imbalance, seed
):
    rng = np.random.default_rng(seed)
    rows = 1 + rng.integers(0, 300, classes)
    if rows.sum() < clients:
        return
    columns = client_sizes(int(rows.sum()), clients, data_imbalance, 1, rng)
    table = fit_margins(log_gamma_table(classes, clients, class_imbalance, rng), rows, columns)
    counts = round_to_margins(table, rows, columns, rng)
    assert counts.sum(axis=1).tolist() == rows.tolist()
    assert counts.sum(axis=0).tolist() == columns.tolist()
    assert counts.min() >= 0
    assert np.abs(counts - table).max() < 1 + 1e-4


def test_units_without_a_place_move_others():
    # The largest fractions .9 and .8 take the first column's and the first row's place; what is left, row 1 and
    # column 1, may only meet where the table has nothing. Both have to move: up[0, 1] and up[1, 0] is the one way.
    table = np.array([[0.9, 0.1, 0.0], [0.1, 0.0, 0.9], [0.0, 0.9, 0.1]])
    counts = round_to_margins(table, np.ones(3, int), np.ones(3, int), np.random.default_rng(0))
    assert counts.tolist() == [[1, 0, 0], [0, 0, 1], [0, 1, 0]]
    table = np.array([[0.6, 0.4], [0.4, 0.0]])
    counts = round_to_margins(table, np.array([1, 0]), np.array([0, 1]), np.random.default_rng(0))
    assert counts.tolist() == [[0, 1], [0, 0]]


@pytest.mark.parametrize("class_imbalance", [0.0, 1.0, 10.0, 100.0, 1e6])
@pytest.mark.parametrize("data_imbalance", [0.0, 1.0, 2.0])
def test_sizes_are_as_asked_whatever_the_classes(class_imbalance, data_imbalance):
    rng = np.random.default_rng(5)
    labels = rng.permutation(
        np.concatenate([rng.integers(1, 62, 9_997), np.zeros(3, int)])
    )  # a class of three
    indices, offsets = label_quantity_skew(labels, 100, class_imbalance, data_imbalance, 2, 3)
    even, even_offsets = label_quantity_skew(labels, 100, 0.0, data_imbalance, 2, 3)
    assert np.array_equal(offsets, even_offsets)
    assert np.array_equal(np.sort(indices), np.sort(even))
    sizes = np.diff(offsets)
    assert sizes.min() >= 2
    if data_imbalance == 0:
        assert np.ptp(sizes) <= 1
    else:  # 100 draws: their log-variance is φ² to within a third or so, but for those raised to two samples
        assert np.log(sizes[sizes > 2]).var() == pytest.approx(data_imbalance, rel=0.5)


def test_a_class_of_three_is_at_most_with_three_clients():
    labels = np.concatenate([np.repeat(np.arange(1, 10), 111), np.zeros(3, int)])
    for class_imbalance in (0.0, 1.0, 1e6):
        table = class_table(labels, *label_quantity_skew(labels, 50, class_imbalance, 0.0, 2, 1))
        assert table[:, 0].sum() == 3
        assert table.sum(axis=0).tolist() == np.bincount(labels).tolist()


@given(
    num_rows=st.integers(1, 300),
    num_classes=st.integers(1, 12),
    clients=st.floats(0, 1),
    min_samples=st.integers(1, 5),
    class_imbalance=IMBALANCES,
    data_imbalance=IMBALANCES,
    seed=st.integers(0, 2**32),
)
def test_every_sample_lands_once_and_every_client_has_enough(
    num_rows, num_classes, clients, min_samples, class_imbalance, data_imbalance, seed
):
    min_samples = min(min_samples, num_rows)
    num_clients = max(1, int(clients * (num_rows // min_samples)))
    labels = np.random.default_rng(seed).integers(0, num_classes, num_rows)
    arguments = (labels, num_clients, class_imbalance, data_imbalance, min_samples, seed)
    indices, offsets = label_quantity_skew(*arguments)
    assert np.array_equal(np.sort(indices), np.arange(num_rows))
    assert offsets[0] == 0
    assert offsets[-1] == num_rows
    assert len(offsets) == num_clients + 1
    assert np.diff(offsets).min() >= min_samples
    again = label_quantity_skew(*arguments)
    assert np.array_equal(indices, again[0])
    assert np.array_equal(offsets, again[1])


def test_another_seed_gives_another_partition():
    labels = np.arange(200) % 10
    first, second = (label_quantity_skew(labels, 10, 0.5, 0.5, 2, seed)[0] for seed in (1, 2))
    assert not np.array_equal(first, second)


def test_without_imbalance_classes_and_sizes_are_even():
    labels = np.random.default_rng(0).integers(0, 10, 1437)
    indices, offsets = label_quantity_skew(labels, 31, 0.0, 0.0, 2, 5)
    table = class_table(labels, indices, offsets)
    assert (np.ptp(table, axis=0) <= 1).all()
    assert np.ptp(np.diff(offsets)) <= 1


def test_class_shares_grow_more_uneven_with_class_imbalance():
    labels = np.repeat(np.arange(10), 500)
    shares = []
    for class_imbalance in (0.0, 0.01, 0.1, 1.0, 10.0, 1e6):
        largest = []
        for seed in range(5):
            indices, offsets = label_quantity_skew(labels, 20, class_imbalance, 0.0, 2, seed)
            largest.append((class_table(labels, indices, offsets).max(axis=1) / 250).mean())
        shares.append(np.mean(largest))
    assert shares == sorted(shares)
    assert shares[0] == pytest.approx(0.1)  # 25 of each of 10 classes
    assert shares[-1] > 0.8  # most clients have one class: two clients' worth of 250 make one of 500


def test_sizes_grow_more_uneven_with_data_imbalance():
    labels = np.zeros(5000, np.int64)
    spreads = [
        np.mean([np.diff(label_quantity_skew(labels, 20, 0.0, phi, 2, seed)[1]).std() for seed in range(5)])
        for phi in (0.0, 0.01, 0.1, 1.0, 4.0)
    ]
    assert spreads == sorted(spreads)
    assert spreads[0] == 0


def test_log_variance_and_sum_of_drawn_sizes():
    # Rounding to whole samples (about 30,000 each) and rescaling all alike leave ln s_i's variance as drawn.
    sizes = client_sizes(60_000_000, 2000, 0.5, 2, np.random.default_rng(1))
    assert sizes.sum() == 60_000_000
    assert np.log(sizes).var() == pytest.approx(0.5, rel=0.1)


def test_small_clients_are_raised_and_the_others_share_the_rest():
    # Shares e^-9…: with so large a variance one client would have nearly all of 20, and gets 20 − 2 · 3.
    for seed in range(20):
        sizes = client_sizes(20, 3, 1e6, 3, np.random.default_rng(seed))
        assert sorted(sizes.tolist()) == [3, 3, 14]


@pytest.mark.parametrize("class_imbalance", [0.2, 1.0, 5.0])
def test_class_split_is_dirichlet(class_imbalance):
    # Dirichlet(κ 1_C) has mean 1/C and variance (1/C)(1 - 1/C)/(C κ + 1) in each share; C = 4.
    logs = log_gamma_table(100_000, 4, class_imbalance, np.random.default_rng(2))
    shares = np.exp(logs)
    shares /= shares.sum(axis=1, keepdims=True)
    variance = 0.25 * 0.75 / (4 / class_imbalance + 1)
    assert shares.mean(axis=0) == pytest.approx(0.25, abs=0.005)
    assert shares.var(axis=0) == pytest.approx(variance, rel=0.03)


def test_small_kappa_gives_a_class_to_one_client_each_as_likely():
    logs = log_gamma_table(40_000, 4, 1e6, np.random.default_rng(3))
    winners = np.bincount(logs.argmax(axis=1), minlength=4) / 40_000
    assert winners == pytest.approx(0.25, abs=0.015)
    top = np.sort(logs, axis=1)
    assert np.mean(top[:, -1] - top[:, -2] > 50) > 0.99  # the runner-up gets nothing


def test_labels_of_any_type():
    indices, _ = label_quantity_skew(np.array(["b", "a", "b", "a"]), 2, 0.0, 0.0, 1, 0)
    assert sorted(indices) == [0, 1, 2, 3]
