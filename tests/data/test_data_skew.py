"""Label and quantity skew: arithmetic by hand, and properties that hold for all parameters."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedapp.data.skew import (
    class_counts,
    client_log_sizes,
    label_quantity_skew,
    largest_remainder,
    log_dirichlet,
)

IMBALANCES = st.one_of(st.just(0.0), st.floats(1e-320, 1e307), st.sampled_from([1e-3, 1.0, 1e6]))


def class_table(labels: np.ndarray, indices: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Samples per client and class (C, K)."""
    classes = labels.max() + 1
    parts = [labels[indices[a:b]] for a, b in pairwise(offsets)]
    return np.stack([np.bincount(part, minlength=classes) for part in parts])


def test_largest_remainder_by_hand() -> None:
    # Quotas of 10: 1.4, 2.7, 5.9. Rounded down 1 + 2 + 5 = 8; the two left go to remainders .9 and .7.
    assert largest_remainder(np.array([0.14, 0.27, 0.59]), 10).tolist() == [1, 3, 6]


def test_largest_remainder_of_ties_goes_round_from_first() -> None:
    # Quotas 1.25 each: one is left, and all remainders are equal.
    assert largest_remainder(np.ones(4), 5).tolist() == [2, 1, 1, 1]
    assert largest_remainder(np.ones(4), 5, first=3).tolist() == [1, 1, 1, 2]


def test_class_counts_by_hand() -> None:
    # Class 0: shares 1:3 of 8. Class 1: 1:1 of 4.
    counts = class_counts(np.array([8, 4]), np.log(np.array([[1.0, 3.0], [5.0, 5.0]])))
    assert counts.tolist() == [[2, 6], [2, 2]]


@settings(deadline=None, max_examples=60)
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
    num_rows: int,
    num_classes: int,
    clients: float,
    min_samples: int,
    class_imbalance: float,
    data_imbalance: float,
    seed: int,
) -> None:
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


def test_another_seed_gives_another_partition() -> None:
    labels = np.arange(200) % 10
    first, second = (label_quantity_skew(labels, 10, 0.5, 0.5, 2, seed)[0] for seed in (1, 2))
    assert not np.array_equal(first, second)


def test_without_imbalance_classes_and_sizes_are_even() -> None:
    labels = np.random.default_rng(0).integers(0, 10, 1437)
    indices, offsets = label_quantity_skew(labels, 31, 0.0, 0.0, 2, 5)
    table = class_table(labels, indices, offsets)
    assert (np.ptp(table, axis=0) <= 1).all()
    assert np.ptp(np.diff(offsets)) <= 1


def test_class_shares_grow_more_uneven_with_class_imbalance() -> None:
    labels = np.repeat(np.arange(10), 500)
    shares = []
    for class_imbalance in (0.0, 0.01, 0.1, 1.0, 10.0, 1e6):
        largest = []
        for seed in range(5):
            indices, offsets = label_quantity_skew(labels, 20, class_imbalance, 0.0, 2, seed)
            largest.append((class_table(labels, indices, offsets).max(axis=0) / 500).mean())
        shares.append(np.mean(largest))
    assert shares == sorted(shares)
    assert shares[0] == 0.05  # 1/20 each
    assert shares[-1] > 0.9  # one client has the class, less what fills others up


def test_sizes_grow_more_uneven_with_data_imbalance() -> None:
    labels = np.zeros(5000, np.int64)
    spreads = [
        np.mean([np.diff(label_quantity_skew(labels, 20, 0.0, phi, 2, seed)[1]).std() for seed in range(5)])
        for phi in (0.0, 0.01, 0.1, 1.0, 4.0)
    ]
    assert spreads == sorted(spreads)
    assert spreads[0] == 0


def test_mean_and_log_variance_of_drawn_sizes() -> None:
    # lognormal(ln(N/C) - φ²/2, φ²) has mean N/C = 60000/2000 = 30 and deviation 30 √(e^φ² - 1), here 24.2,
    # so that the mean of 400,000 draws is off by 0.04 (one deviation).
    rng = np.random.default_rng(1)
    draws = np.concatenate([client_log_sizes(60000, 2000, 0.5, rng) for _ in range(200)])
    assert np.exp(draws).mean() == pytest.approx(30, abs=0.2)
    assert draws.var() == pytest.approx(0.5, rel=0.01)


@pytest.mark.parametrize("class_imbalance", [0.2, 1.0, 5.0])
def test_class_split_is_dirichlet(class_imbalance: float) -> None:
    # Dirichlet(κ 1_C) has mean 1/C and variance (1/C)(1 - 1/C)/(C κ + 1) in each share; C = 4.
    logs = log_dirichlet(100_000, 4, class_imbalance, np.random.default_rng(2))
    shares = np.exp(logs)
    shares /= shares.sum(axis=1, keepdims=True)
    variance = 0.25 * 0.75 / (4 / class_imbalance + 1)
    assert shares.mean(axis=0) == pytest.approx(0.25, abs=0.005)
    assert shares.var(axis=0) == pytest.approx(variance, rel=0.03)


def test_small_kappa_gives_a_class_to_one_client_each_as_likely() -> None:
    logs = log_dirichlet(40_000, 4, 1e6, np.random.default_rng(3))
    winners = np.bincount(logs.argmax(axis=1), minlength=4) / 40_000
    assert winners == pytest.approx(0.25, abs=0.015)
    top = np.sort(logs, axis=1)
    assert np.mean(top[:, -1] - top[:, -2] > 50) > 0.99  # the runner-up gets nothing


def test_small_clients_take_from_the_largest() -> None:
    # One class on one client: the other two fill up to 3 each from it.
    indices, offsets = label_quantity_skew(np.zeros(20, np.int64), 3, 1e9, 0.0, 3, 0)
    assert sorted(np.diff(offsets)) == [3, 3, 14]
    assert len(np.unique(indices)) == 20


def test_labels_of_any_type() -> None:
    indices, _ = label_quantity_skew(np.array(["b", "a", "b", "a"]), 2, 0.0, 0.0, 1, 0)
    assert sorted(indices) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((4, 3, 0.0, 0.0, 2), "4 samples are too few for 3 clients with 2 each"),
        ((0, 1, 0.0, 0.0, 0), "0 samples are too few"),
        ((4, 2, -1.0, 0.0, 2), "imbalances must be finite and >= 0"),
        ((4, 2, 0.0, float("inf"), 2), "imbalances must be finite and >= 0"),
        ((4, 2, float("nan"), 0.0, 2), "imbalances must be finite and >= 0"),
    ],
)
def test_bad_values(arguments: tuple[int, int, float, float, int], message: str) -> None:
    num_rows, *rest = arguments
    with pytest.raises(ValueError, match=message):
        label_quantity_skew(np.zeros(num_rows, np.int64), *rest)


def test_as_a_partitioner_of_flwr_datasets(tmp_path) -> None:
    from datasets import Dataset
    from flwr_datasets import FederatedDataset

    from fedapp.data import LabelQuantitySkewPartitioner

    labels = np.arange(60) % 3
    (tmp_path / "data").mkdir()
    Dataset.from_dict({"row": np.arange(60), "label": labels}).to_parquet(
        str(tmp_path / "data/train.parquet")
    )
    partitioner = LabelQuantitySkewPartitioner(4, "label", 1.0, 0.5, seed=7)
    federated = FederatedDataset(
        dataset=str(tmp_path / "data"),
        partitioners={"train": partitioner},
        shuffle=False,
        cache_dir=str(tmp_path / "hf"),
    )
    rows = [federated.load_partition(i)["row"] for i in range(partitioner.num_partitions)]
    indices, offsets = label_quantity_skew(labels, 4, 1.0, 0.5, 2, 7)
    expected = [indices[a:b].tolist() for a, b in pairwise(offsets)]
    assert [list(part) for part in rows] == expected
    with pytest.raises(ValueError, match="partition_id = 4: must be 0 to 3"):
        federated.load_partition(4)
    with pytest.raises(ValueError, match="num_partitions = 0"):
        LabelQuantitySkewPartitioner(0, "label")
