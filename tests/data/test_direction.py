"""The client's direction against numpy's SVD, its sign and corner cases, its memory, and the noise that hides it."""

import math
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.integrate import quad
from scipy.stats import norm

from fedapp.data import DataError, Dataset, Division, load_dataset, make_partition
from fedapp.data.direction import client_direction, principal_direction, private_direction
from fedapp.gaussian_mechanism import gaussian_sigma
from strategies.clients.graph import adjacency, homogeneity, misalignment

Array = np.ndarray


def by_svd(x: Array) -> Array:
    m = np.linalg.svd(x.astype(np.float64).reshape(len(x), -1), full_matrices=False)[2][0]
    return m if m.sum() > 0 else -m


def digits_directions(class_imbalance: float, data_imbalance: float, seed: int) -> Array:
    dataset = load_dataset("digits")
    division = Division(
        partitioner="label-quantity-skew",
        class_imbalance=class_imbalance,
        data_imbalance=data_imbalance,
        min_samples=2,
        dirichlet_alpha=0.1,
        test_on="held-out",
        test_fraction=0.2,
        seed=seed,
    )
    partition = make_partition(dataset, 50, division)
    return np.stack([client_direction(dataset, partition.client(i)) for i in range(50)])


def dataset_of(x: Array, kind: str, num_classes: int) -> Dataset:
    return Dataset("npz", x, np.zeros(len(x), np.int64), None, len(x), num_classes, kind, 1.0)


@pytest.mark.parametrize(
    "shape", [(1, 1), (1, 7), (5, 1), (5, 2), (40, 64), (3000, 40), (6, 3072), (400, 300)]
)
@pytest.mark.parametrize("kind", ["uint8", "normal"])
def test_equals_the_first_right_singular_vector(shape, kind):
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, shape, np.uint8) if kind == "uint8" else rng.normal(size=shape)
    m = principal_direction(x)
    assert m.dtype == np.float64
    assert np.linalg.norm(m) == pytest.approx(1, abs=1e-14)
    assert m.sum() >= 0
    np.testing.assert_allclose(m, by_svd(x), atol=1e-11)


def test_neither_centred_nor_scaled():
    # XᵀX = diag(18, 2): the direction is (1, 0). Centred, the first column vanishes and it would be (0, 1); with
    # columns scaled to norm 1, both directions would count alike.
    x = np.array([[3.0, 1.0], [3.0, -1.0]])
    np.testing.assert_allclose(principal_direction(x), [1, 0], atol=1e-14)
    np.testing.assert_allclose(
        principal_direction(7.5 * x), [1, 0], atol=1e-14
    )  # a common factor is no matter


def test_one_row_is_its_own_direction():
    np.testing.assert_allclose(principal_direction(np.array([[3.0, 4.0]])), [0.6, 0.8], rtol=1e-15)
    np.testing.assert_allclose(principal_direction(np.array([[-3.0, -4.0]])), [0.6, 0.8], rtol=1e-15)


def test_trap_sign_is_fixed():
    x = np.random.default_rng(1).normal(size=(30, 8)) + 0.3
    for changed in (-x, x[::-1], x * np.where(np.arange(30) % 2, 1, -1)[:, None]):
        np.testing.assert_allclose(principal_direction(changed), principal_direction(x), atol=1e-11)


def test_sign_where_the_entries_sum_to_zero():
    # ±(1, −2, 1)/√6: the sum is 0, and the entry of largest magnitude becomes positive.
    for sign in (1, -1):
        m = principal_direction(sign * np.array([[1.0, -2.0, 1.0], [2.0, -4.0, 2.0]]))
        np.testing.assert_allclose(m, np.array([-1, 2, -1]) / math.sqrt(6), atol=1e-14)
        # ±(1, −1)/√2: of two as large, the first.
        tied = principal_direction(sign * np.array([[1.0, -1.0], [3.0, -3.0]]))
        np.testing.assert_allclose(tied, np.array([1, -1]) / math.sqrt(2), atol=1e-14)


def test_two_equal_singular_values_give_one_direction_of_their_plane():
    x = np.diag([5.0, 5.0, 1.0])
    m = principal_direction(x)
    assert m[2] == pytest.approx(0, abs=1e-12)
    assert m.min() >= -1e-15
    assert np.linalg.norm(x @ m) == pytest.approx(5.0)


@given(st.integers(0, 2**32), st.integers(1, 20), st.integers(1, 12), st.sampled_from([0.05, 0.5, 1.0]))
def test_non_negative_data_have_a_non_negative_direction(seed, n, d, density):
    rng = np.random.default_rng(seed)
    x = rng.integers(0, 256, (n, d), np.uint8) * (rng.random((n, d)) < density)
    x[0, 0] = 1
    m = principal_direction(x)
    assert m.min() >= -1e-7  # where singular values nearly agree; 1e-15 otherwise
    stretched = np.linalg.norm(x.astype(float) @ m)
    assert stretched == pytest.approx(np.linalg.norm(x.astype(float), 2), rel=1e-10)


def test_reproducible_whatever_the_order_and_the_blocks(monkeypatch):
    x = np.random.default_rng(2).integers(0, 256, (500, 300), np.uint8)
    m = principal_direction(x)
    np.testing.assert_array_equal(principal_direction(x), m)
    np.testing.assert_allclose(principal_direction(x[::-1]), m, atol=1e-13)
    monkeypatch.setattr("fedapp.data.direction._BLOCK", 1)  # a row at a time
    np.testing.assert_allclose(principal_direction(x), m, atol=1e-13)


def test_memory_mapped_rows_are_read_in_blocks(tmp_path):
    n = 10_000  # float64 would take 245 MB, the rows themselves 31 MB
    rng = np.random.default_rng(3)
    distinct, drawn = rng.integers(0, 256, (100, 3, 32, 32), np.uint8), rng.integers(100, size=n)
    x = np.lib.format.open_memmap(tmp_path / "x.npy", "w+", np.uint8, (n, 3, 32, 32))
    x[:] = distinct[drawn]
    x.flush()
    x = np.load(tmp_path / "x.npy", mmap_mode="r")
    tracemalloc.start()
    m = principal_direction(x, np.arange(1, n))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 16e6  # no n × n, no d × d (75 MB), no copy of the rows
    # XᵀX = Σ c_k x_k x_kᵀ over the distinct rows, the k-th of which was drawn c_k times.
    counts = np.bincount(drawn[1:], minlength=100)
    np.testing.assert_allclose(m, by_svd(np.sqrt(counts)[:, None] * distinct.reshape(100, -1)), atol=1e-11)


def test_no_direction_is_a_data_error():
    for x, message in (
        (np.zeros((3, 4), np.uint8), "all values are zero"),
        (np.zeros((0, 4)), "0 rows"),
        (np.zeros((3, 0)), r"shape \(0,\)"),
        (np.array([[1.0, np.nan]]), "finite data"),
        (np.array([[1.0, np.inf]]), "finite data"),
        (np.array([[1e200, 1.0]]), "too large"),
    ):
        with pytest.raises(DataError, match=message):
            principal_direction(x)
    with pytest.raises(DataError, match="0 rows"):
        principal_direction(np.ones((3, 4)), np.zeros(0, np.int64))


def test_direction_of_images_and_vectors_is_that_of_the_raw_rows():
    rng = np.random.default_rng(4)
    images = rng.integers(0, 256, (20, 3, 4, 4), np.uint8)
    rows = np.array([1, 5, 6])
    np.testing.assert_allclose(
        client_direction(dataset_of(images, "image", 10), rows), by_svd(images[rows]), atol=1e-12
    )
    vectors = rng.normal(size=(20, 6)).astype(np.float32)
    np.testing.assert_allclose(
        client_direction(dataset_of(vectors, "vector", 2), rows), by_svd(vectors[rows]), atol=1e-12
    )


@pytest.mark.parametrize("normalize", ["symmetric", True])
def test_direction_is_that_of_the_inputs_as_the_model_sees_them(normalize):
    images = np.random.default_rng(4).integers(0, 256, (20, 3, 4, 4), np.uint8)
    rows = np.array([1, 5, 6, 9])
    dataset = replace(
        dataset_of(images, "image", 10), scale=1 / 255, mean=(0.5, 0.4, 0.3), std=(0.2, 0.3, 0.4)
    )
    m = client_direction(dataset, rows, normalize)
    seen = images[rows] / 255.0
    if normalize == "symmetric":
        seen = 2 * seen - 1
    else:
        seen = (seen - np.reshape(dataset.mean, (3, 1, 1))) / np.reshape(dataset.std, (3, 1, 1))
    np.testing.assert_allclose(m, by_svd(seen), atol=1e-6)  # inputs are float32
    assert np.linalg.norm(m - client_direction(dataset, rows)) > 0.1


def test_direction_of_text_is_that_of_its_character_counts():
    rng = np.random.default_rng(5)
    tokens = rng.integers(0, 80, (300, 80), np.uint8)
    tokens[:, :40] = 7
    counts = np.stack([np.bincount(window, minlength=80) for window in tokens])
    rows = np.arange(0, 300, 3)
    m = client_direction(dataset_of(tokens, "text", 80), rows)
    assert m.shape == (80,)
    np.testing.assert_allclose(m, by_svd(counts[rows]), atol=1e-12)
    assert m.argmax() == 7
    shuffled = rng.permuted(tokens, axis=1)  # the order of characters is lost
    np.testing.assert_allclose(client_direction(dataset_of(shuffled, "text", 80), rows), m, atol=1e-13)


def test_direction_of_real_text(real_data):
    dataset = load_dataset("shakespeare", str(real_data / "leaf_shakespeare_test.json"))
    roles = [np.flatnonzero(dataset.groups == group) for group in range(3)]
    mis = misalignment([client_direction(dataset, rows) for rows in roles])
    assert mis.max() <= 0.5
    assert mis[np.triu_indices(3, 1)].min() > 0


@pytest.mark.parametrize("data_imbalance", [0.0, 1.0])
def test_homogeneity_on_digits_falls_as_classes_get_imbalanced(data_imbalance):
    found = []
    for class_imbalance in (0.0, 1.0, 10.0, 100.0):
        graphs = [
            misalignment(digits_directions(class_imbalance, data_imbalance, seed)) for seed in (0, 1, 41)
        ]
        assert max(mis.max() for mis in graphs) <= 0.5
        found.append(np.mean([homogeneity(adjacency(mis)) for mis in graphs]))
    assert (np.diff(found) < 0).all()
    assert found[0] - found[2] > 4 * (
        found[2] - found[3]
    )  # Buttaci 2024, figure 3.5: hardly any change over 10


def test_noise_costs_homogeneity():
    clean = digits_directions(0.0, 0.0, 0)

    def measured(epsilon: float) -> float:
        rng = np.random.default_rng(0)
        return homogeneity(
            adjacency(misalignment([private_direction(m, epsilon, 1e-5, 1.0, rng) for m in clean]))
        )

    found = [measured(epsilon) for epsilon in (1.0, 100.0, 10_000.0)]
    assert found == sorted(found)
    assert found[0] < 0.4  # mis is about ½, as of random directions: −½ ln ½ = 0.35
    assert found[-1] < homogeneity(adjacency(misalignment(clean)))


@pytest.mark.parametrize("epsilon", [0.05, 0.5, 1.0, 4.0, 30.0, 300.0])
@pytest.mark.parametrize("delta", [1e-9, 1e-5, 0.1])
def test_noise_scale_satisfies_the_definition_with_nothing_to_spare(epsilon, delta):
    # The least δ of a mechanism is sup_S P(S) − e^ε Q(S) = ∫ max(0, p − e^ε q); for two normals whose means differ
    # by the sensitivity it is an integral over one dimension, p > e^ε q left of x*.
    sensitivity = 3.0
    sigma = gaussian_sigma(epsilon, delta, sensitivity)

    def least_delta(sigma: float) -> float:
        edge = sensitivity / 2 - epsilon * sigma**2 / sensitivity

        def excess(z: float) -> float:
            x = edge - sigma * z  # log p − log q − ε = (edge − x) Δ / σ²
            return float(norm.pdf(x / sigma) * -np.expm1(-z * sensitivity / sigma))

        return float(quad(excess, 0, 40, epsabs=0, epsrel=1e-10, limit=500)[0])

    assert least_delta(sigma) == pytest.approx(delta, rel=1e-6)
    assert least_delta(0.99 * sigma) > delta
    if epsilon <= 1:  # the classical formula holds there and asks for more
        assert sigma < sensitivity * math.sqrt(2 * math.log(1.25 / delta)) / epsilon


def test_noise_scale_known_value():
    # Balle and Wang's algorithm 1 gives σ = 3.7306 for ε = 1, δ = 1e-5, sensitivity 1.
    assert gaussian_sigma(1.0, 1e-5, 1.0) == pytest.approx(3.7306, abs=1e-4)
    assert gaussian_sigma(1.0, 1e-5, 2.0) == pytest.approx(2 * 3.73063, rel=1e-5)


def test_private_direction_is_clipped_noised_and_renormalised():
    direction = np.array([3.0, 4.0])
    noise = np.random.default_rng(6).normal(0.0, gaussian_sigma(2.0, 1e-3, 1.0), 2)
    expected = 0.5 * np.array([0.6, 0.8]) + noise  # clip 0.5, so that the sensitivity is 1
    private = private_direction(direction, 2.0, 1e-3, 0.5, np.random.default_rng(6))
    np.testing.assert_allclose(private, expected / np.linalg.norm(expected), rtol=1e-12)
    # A direction shorter than the clip stays as it is.
    expected = direction + np.random.default_rng(6).normal(0.0, gaussian_sigma(2.0, 1e-3, 20.0), 2)
    private = private_direction(direction, 2.0, 1e-3, 10.0, np.random.default_rng(6))
    np.testing.assert_allclose(private, expected / np.linalg.norm(expected), rtol=1e-12)


def test_private_direction_refuses_values_that_protect_nothing():
    rng = np.random.default_rng(7)
    m = np.array([0.6, 0.8])
    for epsilon, delta, clip in (
        (0, 1e-5, 1),
        (1, 0, 1),
        (1, 1, 1),
        (1, 1e-5, 0),
        (math.nan, 1e-5, 1),
        (1, 1e-5, -1),
    ):
        with pytest.raises(ValueError, match="needs epsilon > 0"):
            private_direction(m, epsilon, delta, clip, rng)
    for bad in (np.zeros((2, 2)), np.zeros(0), np.array([np.nan, 1.0])):
        with pytest.raises(ValueError, match="finite vector"):
            private_direction(bad, 1.0, 1e-5, 1.0, rng)
