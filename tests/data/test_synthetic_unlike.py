"""Synthetic(α, β): the law of the data, by moments and by labels that a second program works out."""

import numpy as np
import pytest
from scipy import stats

from fedapp.data import DataError, load_dataset
from fedapp.data.synthetic import is_unlike, unlike_data
from strategies import streams


def device_means(name: str, num_clients: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return the means (C, 60) and variances (60,) of the devices' inputs."""
    data = unlike_data(name, num_clients, seed)
    x, groups = np.concatenate(data.blocks), data.groups
    means = np.array([x[groups == k].mean(axis=0) for k in range(num_clients)])
    return means, (x - means[groups]).var(axis=0)


UNLIKE = [("synthetic:0,0", 0.0), ("synthetic:1,0.5", 0.5), ("synthetic:.5,3", 3.0)]


@pytest.mark.parametrize(("name", "beta"), UNLIKE)
def test_inputs_are_normal_around_centres_that_beta_moves(name, beta):
    means, variances = device_means(name, 100)
    assert variances == pytest.approx(np.arange(1.0, 61.0) ** -1.2, rel=0.1)
    # v_kj = B_k + N(0, 1): in a device the coordinates deviate by 1, their mean is B_k + N(0, 1/60).
    assert means.std(axis=1).mean() == pytest.approx(1.0, rel=0.05)
    assert means.mean(axis=1).std() == pytest.approx((beta**2 + 1 / 60) ** 0.5, rel=0.2)


def test_sizes_are_lognormal_beyond_fifty():
    sizes = np.bincount(unlike_data("synthetic:0,0", 600, 3).groups)
    assert sizes.min() >= 50
    # ⌊S⌋ + 50 with ln S ~ N(4, 2²): half are below e⁴ + 50 = 104.6, and 16 % above e⁶ + 50 = 453.
    assert np.mean(sizes <= 104) == pytest.approx(0.5, abs=0.08)
    assert np.mean(sizes > 453) == pytest.approx(stats.norm.sf(1), abs=0.06)


def test_nine_tenths_of_a_device_are_for_training():
    data = load_dataset("synthetic:1,1", seed=4, num_clients=12)
    train, every = (np.bincount(rows) for rows in (data.groups[: data.num_train], data.groups))
    assert train.tolist() == [int(0.9 * size) for size in every]
    assert (data.x.shape[1:], data.num_classes, data.kind) == ((60,), 10, "vector")


def test_labels_are_those_of_the_devices_own_model():
    """Draw as the generator does, by its streams, and work every label out in a loop, softmax and all."""
    data = unlike_data("synthetic:0.7,1.5", 4, 9)
    x, y = np.concatenate(data.blocks), data.y
    for device in range(4):
        rng = streams.generator(9, "synthetic-device", device)
        size = int(rng.lognormal(4, 2)) + 50
        mean = 0.7 * rng.standard_normal()
        model = rng.standard_normal((61, 10)) + mean
        own = np.flatnonzero(data.groups == device)
        assert len(own) == size
        for row in own:
            scores = np.exp(x[row] @ model[:60] + model[60])
            assert y[row] == np.argmax(scores / scores.sum())


def test_iid_devices_have_one_model():
    data = unlike_data("synthetic-iid", 5, 9)
    x = np.concatenate(data.blocks)
    model = streams.generator(9, "synthetic-model").standard_normal((61, 10))
    assert np.array_equal(data.y, np.argmax(x @ model[:60] + model[60], axis=1))
    assert len(np.unique(data.y)) > 5


def test_iid_inputs_have_no_centres():
    means, variances = device_means("synthetic-iid", 50)
    assert (
        np.abs(means).max() < 0.8
    )  # of 3000 means of 50 rows or more, which deviate by 1/√50 = 0.14 at most
    assert variances == pytest.approx(np.arange(1.0, 61.0) ** -1.2, rel=0.15)


def test_seed_and_name_make_the_data():
    one, again, other = (load_dataset("synthetic:1,1", seed=seed, num_clients=3) for seed in (1, 1, 2))
    assert np.array_equal(one.x, again.x)
    assert one.x.shape != other.x.shape or not np.array_equal(one.x, other.x)
    assert load_dataset("synthetic:0,0", seed=2).groups.max() == 29  # the paper's 30


WRONG = [
    "synthetic:1",
    "synthetic:1,",
    "synthetic:-1,1",
    "synthetic:1,1,1",
    "synthetic:1,1\n",
    "synthetic:a,b",
]


@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_such_data(name):
    assert not is_unlike(name)
    with pytest.raises(DataError, match="dataset = "):
        unlike_data(name, 3, 0)


def test_refusals(tmp_path):
    with pytest.raises(DataError, match=r"'synthetic:1,1' is generated; only an empty data-path is allowed"):
        load_dataset("synthetic:1,1", str(tmp_path))
