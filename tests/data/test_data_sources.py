"""Embedded and generated data, what models are given of any data, and real data where it is there."""

import json
from typing import Any

import numpy as np
import pytest

from fedapp.data import DataError, load_dataset
from tests.data.sources import message, save

# Embedded and generated ------------------------------------------------------------------------------------


def test_digits():
    digits = load_dataset("digits")
    assert digits.x.shape == (1797, 1, 8, 8)
    assert digits.x.dtype == np.uint8
    assert digits.input_shape == (1, 8, 8)
    assert (digits.num_train, digits.num_classes, digits.kind, digits.groups) == (1797, 10, "image", None)
    assert digits.inputs(np.arange(1797)).max() == 1.0


def test_synthetic_is_the_problem_of_the_paper():
    data = load_dataset("synthetic", seed=3)
    assert data.x.shape == (2400, 2)
    assert data.x.dtype == np.float32
    assert (data.num_train, data.num_classes, data.kind, data.scale) == (2000, 2, "vector", 1.0)
    assert np.bincount(data.groups[:2000]).tolist() == [100] * 20
    assert np.bincount(data.groups[2000:]).tolist() == [20] * 20
    means = {
        (client, label): (data.groups == client) & (data.y == label) for client in (0, 19) for label in (0, 1)
    }
    for (client, label), centre in zip(means, (0, 1, 0, 4), strict=True):
        points = data.x[means[client, label]]
        assert points.mean(axis=0) == pytest.approx(centre, abs=0.15)  # 4.6 deviations of a mean of 60
    others = (data.groups < 19) & (data.y == 1)
    assert data.x[others].std(axis=0) == pytest.approx(0.25, rel=0.1)


def test_synthetic_follows_seed_and_number_of_clients():
    one, two, three = (load_dataset("synthetic", seed=seed) for seed in (1, 1, 2))
    assert np.array_equal(one.x, two.x)
    assert not np.array_equal(one.x, three.x)
    assert load_dataset("synthetic", num_clients=7).groups.max() == 6


def test_synthetic_files(tmp_path):
    def write(part: str, users: list[str], x: Any, y: Any) -> None:
        content = {"users": users, "user_data": {user: {"x": x, "y": y} for user in users}}
        (tmp_path / f"{part}.json").write_text(json.dumps(content))

    write("train", ["b", "a"], [[0.5, 1], [2, 3]], [0.0, 1.0])
    assert "train.json and test.json is needed" in message("synthetic", str(tmp_path))
    write("test", ["a"], [[4, 5]], [1.0])
    data = load_dataset("synthetic", str(tmp_path))
    assert data.x.tolist() == [[0.5, 1], [2, 3], [0.5, 1], [2, 3], [4, 5]]
    assert data.y.tolist() == [0, 1, 0, 1, 1]
    assert data.groups.tolist() == [0, 0, 1, 1, 1]
    assert data.num_train == 4
    write("test", ["c"], [[4, 5]], [1.0])
    assert "has the user 'c', who is not in train.json" in message("synthetic", str(tmp_path))
    write("test", ["a"], [[4, 5, 6]], [1.0])
    assert "has points of shape (1, 3)" in message("synthetic", str(tmp_path))
    write("test", ["a"], [[4, "five"]], [1.0])
    assert "points that aren't pairs of numbers" in message("synthetic", str(tmp_path))
    write("test", ["a"], [[4, 5]], [])
    assert "user 'a' has 1 x and 0 y; they must match" in message("synthetic", str(tmp_path))
    write("test", [], [], [])
    assert "has no samples" in message("synthetic", str(tmp_path))
    (tmp_path / "test.json").write_text("[1]")
    assert "holds a JSON list; an object is needed" in message("synthetic", str(tmp_path))
    (tmp_path / "test.json").write_text("{")
    assert "can't be read as JSON" in message("synthetic", str(tmp_path))
    (tmp_path / "test.json").write_text('{"users": ["a"]}')
    assert "isn't LEAF's users and user_data" in message("synthetic", str(tmp_path))


# Inputs ----------------------------------------------------------------------------------------------------


def test_inputs_are_fresh_scaled_and_contiguous(tmp_path, images):
    mnist = load_dataset("mnist", save(tmp_path / "mnist.npz", images))
    rows = np.array([3, 0, 3])
    x = mnist.inputs(rows)
    assert x.dtype == np.float32
    assert x.shape == (3, 1, 28, 28)
    assert x.flags.c_contiguous
    assert type(x) is np.ndarray
    assert x[1, 0] == pytest.approx(images["x_train"][0] / 255)
    x[:] = 9  # a copy, not the file
    assert mnist.inputs(slice(0, 2)).max() <= 1
    normal = mnist.inputs(rows, normalize=True)
    assert normal == pytest.approx((mnist.inputs(rows) - 0.1307) / 0.3081, rel=1e-5)


def test_symmetric_inputs_go_from_minus_one_to_one(tmp_path):
    x = np.zeros((2, 32, 32, 3), np.uint8)
    x[0, 0, 0], x[0, 0, 1] = (255, 0, 51), (0, 102, 255)
    cifar = load_dataset("cifar10", save(tmp_path / "c.npz", {"x_train": x, "y_train": np.array([0, 9])}))
    # 51/255 = 0.2 → 2 × 0.2 − 1 = −0.6; 102/255 = 0.4 → −0.2
    found = cifar.inputs([0], normalize="symmetric")[0, :, 0, :3]
    assert found == pytest.approx(np.array([[1, -1, -1], [-1, -0.2, -1], [-0.6, 1, -1]]), abs=1e-6)
    assert load_dataset("digits").inputs(slice(0, 9), "symmetric").min() == -1


def test_symmetric_inputs_need_a_range():
    with pytest.raises(DataError) as caught:
        load_dataset("synthetic", num_clients=2).inputs([0], normalize="symmetric")
    assert str(caught.value) == (
        "normalize = 'symmetric': dataset 'synthetic' has no known range; "
        "allowed for images, and for your own data as uint8"
    )


def test_normalize_is_per_channel(tmp_path):
    x = np.full((2, 32, 32, 3), 255, np.uint8)
    cifar = load_dataset("cifar10", save(tmp_path / "c.npz", {"x_train": x, "y_train": np.array([0, 9])}))
    expected = [(1 - mean) / std for mean, std in zip(cifar.mean, cifar.std, strict=True)]
    assert cifar.inputs([0], normalize=True)[0, :, 0, 0] == pytest.approx(expected, rel=1e-5)


def test_normalize_needs_published_values():
    with pytest.raises(DataError) as caught:
        load_dataset("digits").inputs([0], normalize=True)
    assert str(caught.value) == (
        "normalize = true: dataset 'digits' has no published mean and deviation; "
        "allowed for mnist, cifar10, cifar100; 'standardize' is for any inputs but text"
    )


# Real data -------------------------------------------------------------------------------------------------


def test_real_mnist(real_data):
    if not (real_data / "mnist.npz").is_file():
        pytest.skip("no mnist.npz")
    mnist = load_dataset("mnist", str(real_data))
    assert mnist.x.shape == (70_000, 1, 28, 28)
    counts = [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]  # as published
    assert np.bincount(mnist.y[:60_000]).tolist() == counts
    x = mnist.inputs(slice(0, 60_000))
    assert x.mean() == pytest.approx(mnist.mean[0], abs=5e-5)
    assert x.std() == pytest.approx(mnist.std[0], abs=5e-5)


def test_real_femnist(real_data):
    if not (real_data / "femnist.npz").is_file():
        pytest.skip("no femnist.npz")
    femnist, digits = (load_dataset(name, str(real_data)) for name in ("femnist", "femnist-digits"))
    assert len(np.unique(femnist.groups)) == 307
    assert (digits.num_train, len(digits.y), femnist.num_classes) == (29_605, 32_950, 62)


@pytest.mark.thorough
def test_real_cifar10(real_data):
    if not (real_data / "cifar10.npz").is_file():
        pytest.skip("no cifar10.npz")
    cifar = load_dataset("cifar10", str(real_data))
    assert cifar.x.shape == (60_000, 3, 32, 32)
    x = cifar.inputs(slice(0, 50_000, 5))
    assert x.mean(axis=(0, 2, 3)) == pytest.approx(cifar.mean, abs=5e-3)
    assert x.std(axis=(0, 2, 3)) == pytest.approx(cifar.std, abs=5e-3)


def test_real_synthetic(real_data):
    if not (real_data / "synthetic_000").is_dir():
        pytest.skip("no synthetic_000")
    data = load_dataset("synthetic", str(real_data / "synthetic_000"))
    assert (data.x.shape, data.num_train) == ((2400, 2), 2000)
    assert data.x[(data.groups == 19) & (data.y == 1)].mean() == pytest.approx(4, abs=0.1)
