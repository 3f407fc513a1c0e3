"""Partitions: every scheme covers its rows once, repeats itself, and says clearly what it can't do."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedapp.data import PARTITIONERS, DataError, Dataset, Division, Partition, load_dataset, make_partition
from fedapp.data.dataset import DataColumns
from fedapp.data.flower_partitioners import by_shards, by_similarity
from fedapp.data.partition import _check_division, own_split
from fedapp.data.remarks import remarks

DEFAULTS: dict[str, Any] = {
    "partitioner": "label-quantity-skew",
    "class_imbalance": 0.5,
    "data_imbalance": 0.5,
    "min_samples": 2,
    "dirichlet_alpha": 1.0,
    "test_on": "held-out",
    "test_fraction": 0.2,
    "seed": 0,
}


def partition(dataset: Dataset, num_clients: int, **changes: Any) -> Partition:
    return make_partition(dataset, num_clients, Division(**{**DEFAULTS, **changes}))


def toy(num_train: int, num_test: int = 0, num_classes: int = 3, num_groups: int = 0) -> Dataset:
    rows = np.arange(num_train + num_test)
    groups = rows % num_groups if num_groups else None
    x = np.zeros((len(rows), 2), np.float32)
    return Dataset("toy", x, rows % num_classes, groups, num_train, num_classes, "vector", 1.0)


@pytest.fixture
def digits() -> Dataset:
    return load_dataset("digits")


@pytest.mark.parametrize("scheme", PARTITIONERS)
@pytest.mark.parametrize("test_on", ["held-out", "unseen-clients"])
def test_clients_and_test_rows_are_disjoint_and_repeatable(scheme: str, test_on: str) -> None:
    dataset = toy(200, 40, num_groups=12)
    made = partition(dataset, 8, partitioner=scheme, test_on=test_on, seed=3)
    assert made.num_clients == 8
    rows = np.concatenate([made.client_indices, made.test_indices])
    assert len(np.unique(rows)) == len(rows)
    assert made.sizes.min() >= 2
    assert made.sizes.sum() == len(made.client_indices)
    assert made.test_offsets[0] == 0
    assert made.test_offsets[-1] == len(made.test_indices)
    assert np.array_equal(np.concatenate([made.client(i) for i in range(8)]), made.client_indices)
    again = partition(dataset, 8, partitioner=scheme, test_on=test_on, seed=3)
    for field in ("client_indices", "client_offsets", "test_indices", "test_offsets"):
        assert getattr(made, field).dtype == np.int64
        assert np.array_equal(getattr(made, field), getattr(again, field))
    other = partition(dataset, 8, partitioner=scheme, test_on=test_on, seed=4)
    assert not np.array_equal(made.client_indices, other.client_indices)


@given(
    scheme=st.sampled_from(["label-quantity-skew", "iid"]),
    num_rows=st.integers(20, 120),
    num_clients=st.integers(1, 8),
    test_on=st.sampled_from(["held-out", "unseen-clients"]),
    seed=st.integers(0, 10_000),
)
def test_exact_cover(scheme: str, num_rows: int, num_clients: int, test_on: str, seed: int) -> None:
    made = partition(
        toy(num_rows),
        num_clients,
        partitioner=scheme,
        min_samples=1,
        test_on=test_on,
        test_fraction=0.4,
        seed=seed,
    )
    rows = np.sort(np.concatenate([made.client_indices, made.test_indices]))
    assert np.array_equal(rows, np.arange(num_rows))


def test_held_out_takes_shipped_test_rows() -> None:
    made = partition(toy(100, 20), 5)
    assert made.test_indices.tolist() == list(range(100, 120))
    assert made.test_offsets.tolist() == [0, 20]
    assert sorted(made.client_indices) == list(range(100))


def test_held_out_draws_a_fraction_where_no_test_rows_are_shipped(digits: Dataset) -> None:
    made = partition(digits, 5)
    assert len(made.test_indices) == 359  # 0.2 · 1797 = 359.4
    assert len(made.client_indices) == 1438
    assert made.test_indices.max() > 1500  # drawn from everywhere
    assert made.test_indices.min() < 300


def test_two_halves_of_the_held_out_rows_share_none_and_leave_the_clients_as_they_are(
    digits: Dataset,
) -> None:
    for dataset in (toy(100, 21), digits):
        whole, even, odd = (
            partition(dataset, 5, test_on=f"held-out{half}") for half in ("", "-even", "-odd")
        )
        assert even.test_indices.tolist() == whole.test_indices[::2].tolist()
        assert odd.test_indices.tolist() == whole.test_indices[1::2].tolist()
        assert all(np.array_equal(each.client_indices, whole.client_indices) for each in (even, odd))
    with pytest.raises(DataError, match="test-on = 'held-out-odd': 'toy' has 1 test row; at least 2 are"):
        partition(toy(100, 1), 5, test_on="held-out-odd")


def test_unseen_clients_pool_train_and_test_rows() -> None:
    made = partition(toy(100, 100), 5, test_on="unseen-clients")
    assert len(made.test_offsets) == 6
    assert len(made.test_indices) == 40
    assert (made.client_indices >= 100).any()
    assert np.array_equal(np.concatenate([made.test_client(i) for i in range(5)]), made.test_indices)


def test_iid_is_shuffled_and_even(digits: Dataset) -> None:
    made = partition(digits, 10, partitioner="iid")
    assert np.ptp(made.sizes) <= 1
    assert all(len(np.unique(digits.y[made.client(i)])) == 10 for i in range(10))
    assert made.client(0).max() > 1000


def test_pathological_gives_a_client_so_many_classes_and_deals_a_class_out_evenly() -> None:
    dataset = toy(600, num_classes=10)
    made = partition(dataset, 10, partitioner="pathological", classes_per_client=2)
    counts = np.array([np.bincount(dataset.y[made.client(i)], minlength=10) for i in range(10)])
    assert ((counts > 0).sum(axis=1) == 2).all()
    assert (np.diag(counts) > 0).all()  # client i has class i
    for of_class in counts.T:
        had = of_class[of_class > 0]
        assert had.max() - had.min() <= 1
    assert made.sizes.sum() == 480  # every class is some client's: no row is lost
    alone = partition(dataset, 4, partitioner="pathological", classes_per_client=1)
    assert [np.unique(dataset.y[alone.client(i)]).tolist() for i in range(4)] == [[0], [1], [2], [3]]
    with pytest.raises(
        DataError, match=r"partitioner = 'pathological': .* of classes-per-client = 11 classes"
    ):
        partition(dataset, 4, partitioner="pathological", classes_per_client=11)


def test_class_dirichlet_deals_each_class_out_by_alpha() -> None:
    dataset = toy(20_000, num_classes=4)

    def shares(alpha: float) -> np.ndarray[Any, Any]:
        made = partition(dataset, 8, partitioner="class-dirichlet", dirichlet_alpha=alpha, min_samples=10)
        counts = np.array([np.bincount(dataset.y[made.client(i)], minlength=4) for i in range(8)])
        assert made.sizes.min() >= 10
        assert counts.sum() == 16_000
        # Who has its share of all rows gets no more of the next class: none has more than a share and a class.
        assert made.sizes.max() <= 16_000 / 8 + 4_000
        return np.asarray(counts / counts.sum(axis=0))

    alike, unlike = shares(1e6), shares(0.1)
    assert alike[:, 0] == pytest.approx(1 / 8, abs=0.01)
    assert unlike.max() > 0.4
    with pytest.raises(DataError, match=r"'class-dirichlet': .* by dirichlet-alpha = 0.01; a larger one"):
        partition(toy(200), 50, partitioner="class-dirichlet", dirichlet_alpha=0.01, min_samples=3)


def test_shards_give_a_client_few_classes() -> None:
    made = partition(toy(600, num_classes=10), 10, partitioner="shards")
    assert made.sizes.tolist() == [48] * 10  # 20 shards of 24 of the 480 training rows
    labels = [np.unique(made.client(i) % 10) for i in range(10)]
    assert max(len(classes) for classes in labels) <= 4


def test_shards_differ_by_one_row_and_every_row_is_in_a_client(digits: Dataset) -> None:
    made = partition(digits, 360, partitioner="shards")
    # 1,438 training rows in 720 shards: 718 of two rows and two of one. Shards of one size would leave 718 rows out.
    assert len(made.client_indices) == 1438
    assert sorted(set(made.sizes.tolist())) in ([2, 4], [3, 4])
    assert len(made.unused_indices) == 0
    assert remarks(digits, made) == []
    rows = np.arange(13)
    shards = by_shards(
        rows, 12 - rows, 3, seed=0
    )  # cut into 3, 2, 2, 2, 2, 2 rows from the highest number down
    sizes = {12: 3, 9: 2, 7: 2, 5: 2, 3: 2, 1: 2}  # by each shard's first row
    cut = {first: list(range(first, first - size, -1)) for first, size in sizes.items()}
    for own in (part.tolist() for part in shards):
        first = cut.pop(own[0])
        second = cut.pop(own[len(first)])
        assert own == first + second
    assert not cut


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        # Client i has class i: of the 60 training rows of classes 4 to 9 no client has one.
        (
            {"partitioner": "pathological", "classes_per_client": 1},
            [
                "60 rows are in no client and go unused; clients train on 40 rows, none of which has class "
                "4, 5, 6, 7, 8, 9"
            ],
        ),
        # Of 10 natural clients with 11 rows 4 are drawn.
        (
            {"partitioner": "natural"},
            ["56 rows are in no client and go unused, all rows of {ids}; clients train on 44 rows"],
        ),
        (
            {"partitioner": "natural", "test_on": "own"},
            ["66 rows are in no client and go unused, all rows of {ids}; clients train on 36 rows"],
        ),
        # Of 10 natural clients 4 are drawn to train on, and round(4 * 0.2 / 0.8) = 1 to test on.
        (
            {"partitioner": "natural", "test_on": "unseen-clients"},
            ["55 rows are in no client and go unused, all rows of {ids}; clients train on 44 rows"],
        ),
        ({"partitioner": "iid"}, []),
        ({"partitioner": "iid", "test_on": "held-out-even"}, []),
    ],
)
def test_rows_and_classes_of_no_client_are_counted(changes: dict[str, Any], said: list[str]) -> None:
    natural = changes["partitioner"] == "natural"
    dataset = replace(toy(100, 10, num_classes=10), groups=np.arange(110) // 11 if natural else None)
    made = partition(dataset, 4, **changes)
    train = made.client_indices
    testing = made.test_indices if changes.get("test_on") == "unseen-clients" else train[:0]
    ids = sorted(set(range(10)) - {*(train // 11), *(testing // 11)})
    assert remarks(dataset, made) == [line.format(ids=", ".join(map(str, ids))) for line in said]
    used = np.concatenate([made.client_indices, made.test_indices, made.unused_indices])
    assert len(np.unique(used)) == len(used) == 110 - 5 * (changes.get("test_on") == "held-out-even")


def test_dirichlet_alpha_sets_the_skew(digits: Dataset) -> None:
    def largest_share(alpha: float) -> float:
        made = partition(digits, 5, partitioner="dirichlet", dirichlet_alpha=alpha)
        return float(np.mean([np.bincount(digits.y[made.client(i)]).max() / made.sizes[i] for i in range(5)]))

    assert largest_share(0.2) > 2 * largest_share(1000.0)


@pytest.mark.parametrize("alpha", [0.01, 0.1, 10.0])
def test_dirichlet_has_the_sizes_of_its_data_imbalance(digits: Dataset, alpha: float) -> None:
    values = {"partitioner": "dirichlet", "dirichlet_alpha": alpha}
    assert np.ptp(partition(digits, 300, data_imbalance=0.0, **values).sizes) <= 1
    skewed = partition(digits, 20, data_imbalance=1.0, **values)
    assert (
        skewed.sizes.tolist() == partition(digits, 20, data_imbalance=1.0, class_imbalance=0.0).sizes.tolist()
    )
    assert np.ptp(skewed.sizes) > 50
    assert np.array_equal(np.sort(skewed.client_indices), np.sort(partition(digits, 20).client_indices))


def test_synthetic_natural_client_i_is_group_i() -> None:
    dataset = load_dataset("synthetic")
    made = partition(dataset, 20, partitioner="natural")
    assert all((dataset.groups[made.client(i)] == i).all() for i in range(20))
    assert made.sizes.tolist() == [100] * 20
    assert len(made.test_indices) == 400


def test_natural_draws_ids_and_tests_on_others() -> None:
    dataset = toy(400, num_groups=40)
    made = partition(dataset, 10, partitioner="natural", seed=1)
    ids = [np.unique(dataset.groups[made.client(i)]) for i in range(10)]
    assert all(len(found) == 1 for found in ids)
    drawn = [int(found[0]) for found in ids]
    assert drawn == sorted(drawn)
    assert drawn != list(range(10))
    made = partition(dataset, 20, partitioner="natural", test_on="unseen-clients", test_fraction=0.2)
    assert len(made.test_offsets) - 1 == 5  # 5 of 25 are a fifth
    assert not set(dataset.groups[made.client_indices]) & set(dataset.groups[made.test_indices])


def test_natural_skips_ids_with_too_few_rows() -> None:
    groups = np.array([0] * 10 + [1] + [2] * 10)
    dataset = Dataset("toy", np.zeros((21, 2), np.float32), groups * 0, groups, 21, 1, "vector", 1.0)
    made = partition(dataset, 2, partitioner="natural", test_on="held-out", test_fraction=0.05)
    assert set(groups[made.client_indices]) == {0, 2}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_clients": 0}, "num-supernodes = 0: must be an integer >= 1"),
        (
            {"num_clients": 2000},
            "num-supernodes = 2000: 'digits' has 1438 training rows, at least min-samples = 2 per client are "
            "needed; at most 719 clients",
        ),
        (
            {"num_clients": 200, "test_on": "unseen-clients"},
            "num-supernodes = 200: 'digits' has 359 test rows, at least min-samples = 2 per client are "
            "needed; at most 179 clients",
        ),
        (
            {"partitioner": "natural"},
            "partitioner = 'natural': dataset 'digits' has no natural clients; allowed: label-quantity-skew, "
            "iid, dirichlet, class-dirichlet, pathological, similarity, shards, or a dataset with writers, roles or "
            "groups",
        ),
        (
            {"num_clients": 400, "partitioner": "shards", "min_samples": 3},
            "partitioner = 'shards': over 400 clients it leaves one with 2 rows; min-samples = 3 needs fewer "
            "clients or must be lower",
        ),
    ],
)
def test_errors(digits: Dataset, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError) as caught:
        partition(digits, changes.pop("num_clients", 5), **changes)
    assert str(caught.value) == message


@pytest.mark.parametrize("scheme", PARTITIONERS)
def test_each_client_keeps_some_of_its_own_rows_to_test_on(scheme: str) -> None:
    dataset = toy(200, 40, num_groups=12)
    made = partition(dataset, 8, partitioner=scheme, test_on="own", test_fraction=0.25, seed=3)
    # What is divided is all there is, also what the dataset ships for testing, as if none were held out.
    whole = partition(
        toy(240, num_groups=12), 8, partitioner=scheme, test_on="own", test_fraction=0.01, seed=3
    )
    for i in range(8):
        train, test = made.client(i), made.test_client(i)
        assert np.array_equal(
            np.sort(np.r_[train, test]), np.sort(np.r_[whole.client(i), whole.test_client(i)])
        )
        assert len(test) == max(1, round(0.25 * (len(train) + len(test))))
        assert len(whole.test_client(i)) == 1
        assert len(train) >= 1
        assert (np.diff(train) > 0).all()
        assert (np.diff(test) > 0).all()
    assert len(made.test_offsets) == 9
    if scheme not in ("natural", "pathological"):  # those leave rows out
        assert len(made.client_indices) + len(made.test_indices) == 240
    again = partition(dataset, 8, partitioner=scheme, test_on="own", test_fraction=0.25, seed=3)
    assert np.array_equal(made.test_indices, again.test_indices)


def test_the_division_is_the_same_whatever_share_is_kept_to_test_on() -> None:
    few, many = (partition(toy(300), 5, test_on="own", test_fraction=share, seed=1) for share in (0.1, 0.9))
    for i in range(5):
        every = [np.sort(np.r_[made.client(i), made.test_client(i)]) for made in (few, many)]
        assert np.array_equal(*every)
        assert set(few.test_client(i)) < set(many.test_client(i))  # of one order


@pytest.mark.parametrize("scheme", ["natural", "iid"])
@pytest.mark.parametrize("test_on", ["own", "held-out", "held-out-odd"])
def test_the_last_rows_of_each_client_are_held_out(scheme: str, test_on: str) -> None:
    """Of 60 rows of 4 clients with 15 each the last 20 % are 3 rows of each client."""
    dataset = toy(60, num_groups=4)
    made = partition(dataset, 4, partitioner=scheme, test_on=test_on, hold_out="last")
    assert made.sizes.tolist() == [12] * 4
    assert dataset.groups is not None
    if scheme == "natural":  # client i has the rows i, i + 4, …, i + 56
        assert [made.client(i).tolist() for i in range(4)] == [list(range(i, 48, 4)) for i in range(4)]
    if test_on == "own":
        assert all(made.test_client(i).min() > made.client(i).max() for i in range(4))
        assert [len(made.test_client(i)) for i in range(4)] == [3] * 4
        return
    rest = np.setdiff1d(np.arange(60), made.client_indices)
    assert len(rest) == 12
    assert (
        made.test_indices.tolist()
        == rest[slice(1, None, 2) if test_on == "held-out-odd" else slice(None)].tolist()
    )
    assert made.test_offsets.tolist() == [0, len(made.test_indices)]
    shipped = partition(toy(60, 7, num_groups=4), 4, partitioner=scheme, hold_out="last")
    assert shipped.test_indices.tolist() == list(range(60, 67))


@pytest.mark.parametrize(
    ("rows", "fraction", "train"), [(2, 0.01, 1), (2, 0.99, 1), (10, 0.99, 1), (10, 0.5, 5)]
)
def test_one_row_at_least_is_on_either_side(rows: int, fraction: float, train: int) -> None:
    sides = own_split(np.arange(rows) + 7, fraction, 0, 3)
    assert [len(side) for side in sides] == [train, rows - train]
    assert np.array_equal(np.sort(np.concatenate(sides)), np.arange(rows) + 7)


def test_a_client_of_one_row_has_none_to_test_on() -> None:
    with pytest.raises(DataError, match=r"test-on = 'own' .* need 2 rows of a client or more, .* it has 1$"):
        own_split(np.arange(1), 0.2, 0, 0)
    with pytest.raises(
        DataError, match=r"min-samples = 1: with test-on = 'own' a client needs 2 rows or more"
    ):
        partition(toy(100), 5, test_on="own", min_samples=1)


def test_errors_of_the_library_are_translated(digits: Dataset) -> None:
    with pytest.raises(
        DataError,
        match=r"partitioner = 'pathological': .* over 1400 clients .* \(ValueError: Label: \d is needed",
    ):
        partition(digits, 1400, partitioner="pathological", min_samples=1)


def test_too_many_natural_clients() -> None:
    dataset = toy(400, num_groups=40)
    message = (
        "num-supernodes = 41: 'toy' has 40 natural clients with at least min-samples = 2 rows; "
        "at most 40 clients are allowed"
    )
    with pytest.raises(DataError) as caught:
        partition(dataset, 41, partitioner="natural")
    assert str(caught.value) == message
    with pytest.raises(
        DataError, match=r"at most 39 clients are allowed, as test-on = 'unseen-clients' needs"
    ):
        partition(dataset, 40, partitioner="natural", test_on="unseen-clients")


def test_client_numbers_are_checked(digits: Dataset) -> None:
    with pytest.raises(IndexError, match="client 5: there are 5, counted from 0"):
        partition(digits, 5).client(5)


def test_nothing_is_printed(digits: Dataset, capfd: pytest.CaptureFixture[str]) -> None:
    for scheme in PARTITIONERS[1:4]:
        partition(digits, 10, partitioner=scheme)
    partition(load_dataset("synthetic"), 10, partitioner="natural")
    assert "".join(capfd.readouterr()) == ""


def test_real_mnist_over_2000_clients(real_data: Path) -> None:
    if not (real_data / "mnist.npz").is_file():
        pytest.skip("no mnist.npz")
    mnist = load_dataset("mnist", str(real_data))
    made = partition(mnist, 2000, class_imbalance=2.0)
    assert np.array_equal(np.sort(made.client_indices), np.arange(60_000))
    assert made.test_indices.tolist() == list(range(60_000, 70_000))


def test_real_femnist_by_writer(real_data: Path) -> None:
    if not (real_data / "femnist.npz").is_file():
        pytest.skip("no femnist.npz")
    femnist = load_dataset("femnist-digits", str(real_data))
    assert femnist.y.max() == 9
    made = partition(femnist, 100, partitioner="natural")
    assert all(len(np.unique(femnist.groups[made.client(i)])) == 1 for i in range(100))


@given(
    num_rows=st.integers(20, 300),
    num_clients=st.integers(1, 12),
    similarity=st.floats(0, 1),
    seed=st.integers(0, 1000),
)
def test_similarity_deals_out_a_share_at_random_and_the_rest_by_class(
    num_rows: int, num_clients: int, similarity: float, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    rows, labels = rng.permutation(1000)[:num_rows], rng.integers(0, 4, num_rows)
    clients = by_similarity(rows, labels, num_clients, similarity)
    assert np.array_equal(np.sort(np.concatenate(clients)), np.sort(rows))
    sizes = [len(own) for own in clients]
    assert max(sizes) - min(sizes) <= 1
    number = {row: place for place, row in enumerate(rows.tolist())}
    places = [[number[row] for row in own.tolist()] for own in clients]
    alike = [math.floor(similarity * size + 0.5) for size in sizes]
    # The first of each come one after the other, as they were drawn; the classes of the others never fall.
    drawn = [place for own, n in zip(places, alike, strict=True) for place in own[:n]]
    assert drawn == list(range(sum(alike)))
    by_class = [labels[place] for own, n in zip(places, alike, strict=True) for place in own[n:]]
    assert by_class == sorted(by_class)


@pytest.mark.parametrize(("similarity", "least", "most"), [(0.0, 1, 3), (1.0, 10, 10)])
def test_similarity_from_sorted_to_iid(digits: Dataset, similarity: float, least: int, most: int) -> None:
    made = partition(digits, 10, partitioner="similarity", similarity=similarity)
    classes = [len(np.unique(digits.y[made.client(i)])) for i in range(10)]
    assert least <= min(classes) <= max(classes) <= most  # 144 rows each; of a class there are about as many


@pytest.mark.parametrize(
    ("clients", "exact", "said"),
    [
        ([[0, 1], [2, 3]], True, None),
        ([[3, 0], [1]], False, None),  # a row goes unused
        ([[0, 1], [2]], True, "loses or repeats rows"),
        ([[0, 1], [1, 2]], False, "loses or repeats rows"),
        ([[0, 1, 2], [3, 3]], True, "loses or repeats rows"),
        ([[0, 1, 2, 3], []], True, "over 2 clients it leaves one with 0 rows; min-samples = 1 needs fewer"),
    ],
)
def test_a_division_is_looked_at_whoever_made_it(
    clients: list[list[int]], exact: bool, said: str | None
) -> None:
    rows, parts = np.arange(4), [np.array(own, np.int64) for own in clients]
    if said is None:
        _check_division("shards", parts, rows, 1, exact=exact)
        return
    with pytest.raises(DataError, match=rf"^partitioner = 'shards': .*{said}"):
        _check_division("shards", parts, rows, 1, exact=exact)


def test_a_natural_client_with_too_few_rows_is_named(tmp_path: Path) -> None:
    sites = ["Basel"] * 12 + ["Bern"] * 12 + ["Lonely"]
    table = pd.DataFrame({"x": np.arange(25) % 7, "site": sites, "label": np.arange(25) % 2})
    table.to_csv(tmp_path / "t.csv", index=False)
    dataset = load_dataset("files", str(tmp_path / "t.csv"), columns=DataColumns(group="site"))
    made = partition(dataset, 2, partitioner="natural", test_on="own")
    assert remarks(dataset, made) == [
        f"1 row is in no client and goes unused, all rows of Lonely; clients train on {len(made.client_indices)} rows"
    ]


def test_natural_clients_that_are_all_too_small_are_one_line_with_the_key_to_change() -> None:
    dataset = replace(toy(40), groups=np.arange(40) // 10)
    with pytest.raises(DataError) as caught:
        partition(dataset, 20, partitioner="natural", test_on="own", min_samples=11)
    assert str(caught.value) == (
        f"min-samples = 11: no natural client of '{dataset.name}' has as many rows to train on; the largest has 10"
    )


def test_names_that_differ_in_case_or_blanks_alone_are_said(tmp_path: Path) -> None:
    spelled = ["yes", "no", "Yes", "yes ", "unsure", "no"]
    sites = ["Gen\u00e8ve", "Gene\u0300ve", "Bern", "bern", "Basel", "Bern"]
    table = pd.DataFrame({"x": ["a", "A", "left", "Left", "right", "a"], "site": sites, "label": spelled})
    table = pd.concat([table] * 5)
    table.to_csv(tmp_path / "t.csv", index=False)
    columns = DataColumns(group="site", encode=True)
    dataset = load_dataset("files", str(tmp_path / "t.csv"), columns=columns)
    made = partition(dataset, 3, partitioner="iid")
    assert remarks(dataset, made)[:3] == [
        "classes that differ in case or blanks alone count as different ones: 'Yes' and 'yes' and 'yes '",
        "natural ids that differ in case or blanks alone count as different ones: 'Bern' and 'bern', 'Gene\u0300ve' "
        "and 'Gen\u00e8ve'",
        "texts of column 'x' that differ in case or blanks alone count as different ones: 'Left' and 'left'",
    ]
