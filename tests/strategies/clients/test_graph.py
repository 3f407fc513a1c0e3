"""The graph: a network computed by hand, every trap, and invariants of any network."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strategies.clients.graph import (
    FLOOR,
    adjacency,
    client_weights,
    degrees,
    eigenvalues,
    homogeneity,
    laplacian,
    misalignment,
    neighbour_matrix,
    sparsify,
)

Array = np.ndarray


def unit(rows: Array) -> Array:
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


@st.composite
def networks(draw: st.DrawFn, least: int = 2, signed: bool = True) -> Array:
    """Directions of clients in a few clusters, spread from 1 down to nothing (equal directions)."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    clients, dimensions = draw(st.integers(least, 20)), draw(st.integers(1, 12))
    centres = rng.normal(size=(draw(st.integers(1, 4)), dimensions))
    spread = draw(st.sampled_from([0.0, 1e-9, 1e-6, 1e-3, 1.0]))
    rows = centres[rng.integers(len(centres), size=clients)]
    rows = rows + spread * rng.normal(size=rows.shape)
    return unit(rows if signed else np.abs(rows) + 1e-300)


def exact_misalignment(directions: Array) -> Array:
    """¼‖m_i − m_j‖² of these very numbers, in fractions."""
    rows = [[Fraction(float(value)) for value in row] for row in directions]
    mis = np.zeros((len(rows), len(rows)))
    for i, a in enumerate(rows):
        for j, b in enumerate(rows[:i]):
            mis[i, j] = mis[j, i] = float(sum((x - y) ** 2 for x, y in zip(a, b, strict=True)) / 4)
    return mis


# By hand. Directions (1, 0), (0, 1), (3/5, 4/5): products 0, 3/5, 4/5; mis = ½(1 − ·) = 1/2, 1/5, 1/10; A = −ln mis.
HAND = np.array([[1.0, 0.0], [0.0, 1.0], [0.6, 0.8]])


A01, A02, A12 = math.log(2), math.log(5), math.log(10)


def test_three_clients_by_hand():
    mis = misalignment(HAND)
    np.testing.assert_allclose(mis, [[0, 0.5, 0.2], [0.5, 0, 0.1], [0.2, 0.1, 0]], rtol=1e-14)
    A = adjacency(mis)
    np.testing.assert_allclose(A, [[0, A01, A02], [A01, 0, A12], [A02, A12, 0]], rtol=1e-14)
    own = [A01 + A02, A01 + A12, A02 + A12]  # ln 10, ln 20, ln 50
    np.testing.assert_allclose(degrees(A), own, rtol=1e-14)
    np.testing.assert_allclose(
        laplacian(A), [[own[0], -A01, -A02], [-A01, own[1], -A12], [-A02, -A12, own[2]]], rtol=1e-14
    )
    total = 2 * math.log(100)  # 10 · 20 · 50 = 100²
    np.testing.assert_allclose(client_weights(A), np.log([10, 20, 50]) / total, rtol=1e-14)
    np.testing.assert_allclose(neighbour_matrix(A)[0], [0, A01 / own[0], A02 / own[0]], rtol=1e-14)
    assert homogeneity(A) == pytest.approx(total / 12, rel=1e-14)  # 2 C (C−1) = 12
    assert eigenvalues(laplacian(A)).sum() == pytest.approx(total, rel=1e-12)  # eq. 3.6


def test_sparsify_by_hand():
    # Most similar: client 0 → 2 (ln 5), 1 → 2 (ln 10), 2 → 1. Kept by either end: 0–2 and 1–2.
    A = adjacency(misalignment(HAND))
    np.testing.assert_array_equal(sparsify(A, 1) > 0, [[0, 0, 1], [0, 0, 1], [1, 1, 0]])
    for k in (0, 2, 7):
        np.testing.assert_array_equal(sparsify(A, k), A)


@pytest.mark.parametrize("distance", [1e-3, 1e-5, 1e-7])
@pytest.mark.parametrize("dimensions", [3, 64])
def test_trap_digits_survive_between_clients_that_are_alike(distance, dimensions):
    rng = np.random.default_rng(0)
    centres = unit(np.abs(rng.normal(size=(3, dimensions))))
    m = unit(centres[np.arange(12) % 3] + distance * rng.normal(size=(12, dimensions)))
    exact = exact_misalignment(m)
    off = ~np.eye(12, dtype=bool)
    assert np.abs(misalignment(m)[off] / exact[off] - 1).max() < 1e-11
    # Both naive forms lose them, in float64 already, and in float32 all of them.
    naive = (0.5 * (1 - m @ m.T))[off]
    if distance <= 1e-5:
        assert np.abs(naive / exact[off] - 1).max() > 1e-8
    single = m.astype(np.float32)
    nearest = np.flatnonzero(off.ravel())[np.argmin(exact[off])]
    assert np.abs(0.5 * (1 - (single @ single.T)).ravel()[nearest] / exact.ravel()[nearest] - 1) > 1e-3


def test_trap_directions_that_differ_little_from_a_common_one():
    m = unit(np.ones((30, 50)) + 1e-6 * np.random.default_rng(1).normal(size=(30, 50)))
    off = ~np.eye(30, dtype=bool)
    assert np.abs(misalignment(m)[off] / exact_misalignment(m)[off] - 1).max() < 1e-11


def test_trap_equal_data_are_tied_by_the_floor():
    mis = misalignment(np.tile(HAND[2], (4, 1)))
    np.testing.assert_array_equal(mis, np.zeros((4, 4)))
    A = adjacency(mis)
    np.testing.assert_allclose(A[~np.eye(4, dtype=bool)], -math.log(1e-12))
    assert FLOOR == 1e-12
    assert adjacency(mis, 1e-3)[0, 1] == pytest.approx(-math.log(1e-3))
    np.testing.assert_allclose(client_weights(A), 0.25)


def test_trap_sign_turns_alike_into_opposite():
    # Whoever sends −m looks like the opposite: that is why the direction's sign is fixed.
    m = unit(np.array([[1.0, 2.0], [1.0, 2.1]]))
    assert misalignment(m)[0, 1] < 1e-3
    assert misalignment(m * [[1], [-1]])[0, 1] > 0.999


def test_no_similarity_at_all_counts_all_alike():
    # Opposite directions: mis = 1, −ln 1 = 0.
    A = adjacency(misalignment([[1.0, 0.0], [-1.0, 0.0]]))
    assert not np.signbit(A).any()
    np.testing.assert_array_equal(A, np.zeros((2, 2)))
    np.testing.assert_array_equal(client_weights(A), [0.5, 0.5])
    np.testing.assert_array_equal(neighbour_matrix(A), [[0, 1], [1, 0]])
    np.testing.assert_array_equal(client_weights(np.zeros((4, 4))), np.full(4, 0.25))


def test_one_client_is_its_own_neighbour():
    A = adjacency(misalignment([[1.0]]))
    assert client_weights(A) == neighbour_matrix(A) == laplacian(A) + 1 == 1
    assert sparsify(A, 3) == 0
    assert math.isnan(homogeneity(A))


def test_a_client_tied_to_nobody_averages_the_others():
    A = np.array([[0, 2.0, 0], [2.0, 0, 0], [0, 0, 0]])
    np.testing.assert_array_equal(client_weights(A), [0.5, 0.5, 0])
    np.testing.assert_array_equal(neighbour_matrix(A), [[0, 1, 0], [1, 0, 0], [0.5, 0.5, 0]])


def test_sparsify_keeps_ties():
    A = np.ones((5, 5)) - np.eye(5)
    np.testing.assert_array_equal(sparsify(A, 1), A)


@given(networks())
def test_misalignment_of_any_network(m):
    mis = misalignment(m)
    np.testing.assert_array_equal(mis, mis.T)
    np.testing.assert_array_equal(np.diagonal(mis), 0)
    assert mis.min() >= 0
    assert mis.max() <= 1
    np.testing.assert_allclose(mis, exact_misalignment(m), rtol=1e-11, atol=1e-30)
    np.testing.assert_allclose(mis, 0.5 * (1 - m @ m.T), atol=1e-14)


@given(networks(signed=False))
def test_misalignment_of_non_negative_directions_is_at_most_half(m):
    assert misalignment(m).max() <= 0.5 + 1e-15


@given(networks(least=1), st.integers(0, 6))
def test_laplacian_and_weights_of_any_network(m, k):
    A = sparsify(adjacency(misalignment(m)), k)
    L = laplacian(A)
    C, scale = len(A), max(1.0, float(degrees(A).max()))
    np.testing.assert_array_equal(L, L.T)
    np.testing.assert_allclose(L @ np.ones(C), 0, atol=1e-12 * scale)
    spectrum = eigenvalues(L)
    assert (np.diff(spectrum) >= 0).all()
    assert spectrum[0] == pytest.approx(0, abs=1e-11 * scale)
    assert spectrum.sum() == pytest.approx(np.trace(L), rel=1e-11, abs=1e-11)
    p, rows = client_weights(A), neighbour_matrix(A)
    assert p.min() >= 0
    assert p.sum() == pytest.approx(1, abs=1e-13)
    if A.any():
        np.testing.assert_allclose(A.sum(axis=1) / A.sum(), p, atol=1e-14)
    np.testing.assert_allclose(rows.sum(axis=1), 1, atol=1e-13)
    assert rows.min() >= 0
    np.testing.assert_allclose(p @ rows, p, atol=1e-13)  # what lemma 4.3 rests on
    if C > 1:
        np.testing.assert_array_equal(np.diagonal(rows), 0)
        assert homogeneity(A) == pytest.approx(np.trace(np.diag(degrees(A))) / (2 * C * (C - 1)), rel=1e-12)


@given(networks(), st.integers(0, 4), st.randoms(use_true_random=False))
def test_relabelling_clients_relabels_the_graph(m, k, random):
    mis = misalignment(m)
    order = np.random.default_rng(random.randrange(2**32)).permutation(len(m))  # type: ignore[attr-defined]
    np.testing.assert_allclose(misalignment(m[order]), mis[np.ix_(order, order)], rtol=1e-11)
    other = mis[np.ix_(order, order)]
    A, B = sparsify(adjacency(mis), k), sparsify(adjacency(other), k)
    np.testing.assert_array_equal(B, A[np.ix_(order, order)])
    np.testing.assert_allclose(client_weights(B), client_weights(A)[order], rtol=1e-12)
    np.testing.assert_allclose(neighbour_matrix(B), neighbour_matrix(A)[np.ix_(order, order)], rtol=1e-12)
    np.testing.assert_allclose(eigenvalues(laplacian(B)), eigenvalues(laplacian(A)), atol=1e-10)
    assert homogeneity(B) == pytest.approx(homogeneity(A), rel=1e-12)


@given(networks(least=3), st.integers(1, 5))
def test_sparsify_keeps_the_nearest(m, k):
    A = adjacency(misalignment(m))
    kept = sparsify(A, k)
    np.testing.assert_array_equal(kept, kept.T)
    assert ((kept == A) | (kept == 0)).all()
    for i in range(len(A)):
        others = np.delete(A[i], i)
        nearest = np.sort(others)[::-1][: min(k, len(others))]
        assert np.delete(kept[i], i)[others >= nearest[-1]].tolist() == others[others >= nearest[-1]].tolist()


def test_one_product_gives_every_neighbour_average():
    rng = np.random.default_rng(3)
    A = adjacency(misalignment(unit(np.abs(rng.normal(size=(6, 4))))))
    models = rng.normal(size=(6, 9))
    p_ij, p = A / A.sum(), client_weights(A)
    loop = [sum(p_ij[i, j] * models[j] for j in range(6)) / p[i] for i in range(6)]
    np.testing.assert_allclose(neighbour_matrix(A) @ models, loop, rtol=1e-12)


@pytest.mark.parametrize(
    "directions", [[1.0, 0.0], np.zeros((0, 3)), [[np.nan, 1.0]], [[1.0, 1.0]], [[0.0, 0.0]], [[1 + 1e-5]]]
)
def test_bad_directions(directions):
    with pytest.raises(ValueError, match="directions: must"):
        misalignment(directions)


def test_directions_in_float32_are_accepted():
    m = unit(np.random.default_rng(9).normal(size=(5, 3072))).astype(np.float32)
    np.testing.assert_allclose(misalignment(m), exact_misalignment(m), rtol=1e-11)


def test_bad_matrices():
    skew = np.array([[0, 0.1], [0.2, 0]])
    for call, name in ((adjacency, "mis"), (degrees, "A"), (eigenvalues, "L"), (homogeneity, "A")):
        for bad in (skew, np.zeros((2, 3)), np.zeros((0, 0)), skew * np.nan):
            with pytest.raises(ValueError, match=f"{name}: must"):
                call(bad)
    with pytest.raises(ValueError, match="A: must be symmetric, with a zero diagonal"):
        laplacian(np.eye(2))
    with pytest.raises(ValueError, match=r"A: must be finite, within \[0, inf\]"):
        client_weights(-1 * (np.ones((2, 2)) - np.eye(2)))
    with pytest.raises(ValueError, match=r"mis: must be finite, within \[0, 1\]"):
        adjacency(2 * (np.ones((2, 2)) - np.eye(2)))
    for floor in (0.0, 1.0, math.nan):
        with pytest.raises(ValueError, match="message_floor"):
            adjacency(np.zeros((2, 2)), floor)
    with pytest.raises(ValueError, match="neighbours = -1"):
        sparsify(np.zeros((2, 2)), -1)
