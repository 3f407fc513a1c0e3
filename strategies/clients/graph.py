"""The graph of a federated network: clients are nodes, and the weight of an edge is the similarity of their data.

From Buttaci 2024, chapter 3 and Algorithm 2 (chapter 4): direction (its *message*) → misalignment → adjacency →
Laplacian → homogeneity, and the weights p_i and p_ij / p_i with p_ij = A_ij / (1ᵀ A 1). Pure functions in float64; C
is the number of clients. An invalid argument raises a ValueError that names the argument.

    A = sparsify(adjacency(misalignment(directions)), k=10)
    p = client_weights(A)                    # weights of the aggregation, (C,)
    U = neighbour_matrix(A) @ last_models    # u_i of every client, (C, C) @ (C, D)
"""

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

Matrix = NDArray[np.float64]

FLOOR = 1e-12
"""Default ε: a smaller misalignment counts as ε, so that clients with equal data have A_ij = −ln ε ≈ 27.6."""

_NEAR = 1e-3


def misalignment(directions: ArrayLike) -> Matrix:
    """Return mis(i, j) = ¼‖m_i − m_j‖² = ½(1 − m_iᵀm_j) (definition 3.2, eq. 3.1), to 12 digits.

    1 − m·m loses digits by cancellation where clients are alike, and so does expanding the square about the origin.
    Here the square is expanded about the mean direction, one matrix product, which is accurate unless two clients are
    much nearer to each other than to the mean; then all differences are computed (3 s, not 0.4, for C = 2,000 and
    d = 3,072).

    Parameters
    ----------
    directions : array (C, d)
        One direction per row, of norm 1 within 1e-6.

    Returns
    -------
    array (C, C)
        In [0, 1], exactly symmetric, with a zero diagonal; at most ½ for directions without negative entries.
    """
    from scipy.spatial.distance import pdist, squareform

    m = np.asarray(directions, dtype=np.float64)
    if m.ndim != 2 or m.size == 0 or not np.isfinite(m).all():
        raise ValueError(f"directions: must be finite, of shape (clients, dimensions), is {m.shape}")
    norms = np.sqrt(np.einsum("id,id->i", m, m))
    if np.abs(norms - 1).max() > 1e-6:
        worst = np.abs(norms - 1).argmax()
        raise ValueError(f"directions: must have norm 1, client {worst}'s has {norms[worst]:.9g}")
    shifted = m - m.mean(axis=0)
    squares = np.einsum("id,id->i", shifted, shifted)
    mis: Matrix = shifted @ shifted.T
    mis *= -2
    scale = np.add.outer(squares, squares)
    mis += scale
    scale *= _NEAR
    if ((mis < scale) & ~np.eye(len(m), dtype=bool)).any():  # a pair is so close that it would lose digits
        mis = np.asarray(squareform(pdist(m, "sqeuclidean")))
    np.maximum(mis, mis.T.copy(), out=mis)  # exactly symmetric, whatever the rounding of the matrix product
    mis *= 0.25
    np.clip(mis, 0, 1, out=mis)
    np.fill_diagonal(mis, 0)
    return mis


def floored(mis: ArrayLike, floor: float) -> Matrix:
    """Return mis (C, C) in which a value below the floor, in (0, 1), is the floor."""
    if not 0 < floor < 1:
        raise ValueError(f"message_floor = {floor}: must be between 0 and 1")
    return np.maximum(_square("mis", mis), floor)


def adjacency(mis: ArrayLike, floor: float = FLOOR) -> Matrix:
    """Return A_ij = −ln max(mis(i, j), floor) for i ≠ j, A_ii = 0 (definition 3.4, eq. 3.4).

    ``mis`` has shape (C, C) and lies in [0, 1]; the floor ε in (0, 1) bounds A_ij where mis is 0, as for
    clients with equal data.
    """
    A: Matrix = 0.0 - np.log(floored(mis, floor))  # not −0.0 where mis is 1
    np.fill_diagonal(A, 0)
    return A


def sparsify(A: ArrayLike, k: int) -> Matrix:
    """Return A (C, C) with only the edges between a client and one of its k most similar clients; k = 0 keeps all.

    All edges that tie with the k-th are kept, so that the result doesn't depend on the order of the clients.
    """
    A = _square("A", A)
    if k < 0:
        raise ValueError(f"neighbours = {k}: must be 0 (all) or more")
    if not 0 < k < len(A) - 1:
        return A.copy()
    least = np.partition(A - np.diag(np.full(len(A), np.inf)), len(A) - k, axis=1)[:, [len(A) - k]]
    return np.where((least <= A) | (least.T <= A), A, 0.0)


def degrees(A: ArrayLike) -> Matrix:
    """Return the diagonal of D, A 1 (below definition 3.4), shape (C,)."""
    return np.asarray(_square("A", A).sum(axis=1), dtype=np.float64)


def laplacian(A: ArrayLike) -> Matrix:
    """Return L = D − A (below definition 3.4), shape (C, C): symmetric, positive semidefinite, L 1 = 0."""
    L: Matrix = 0.0 - _square("A", A)
    np.fill_diagonal(L, degrees(A))
    return L


def eigenvalues(L: ArrayLike) -> Matrix:
    """Return the eigenvalues of a Laplacian, shape (C,), ascending; the first is 0 up to rounding, either sign."""
    from scipy.linalg import eigvalsh

    return np.asarray(eigvalsh(_square("L", L)), dtype=np.float64)


def homogeneity(A: ArrayLike) -> float:
    """Return hom = trace(D) / (2 C (C−1)) (eqs. 3.2 and 3.5): half the mean of A_ij; NaN for one client."""
    A = _square("A", A)
    return float(A.sum() / (2 * len(A) * (len(A) - 1))) if len(A) > 1 else math.nan


def client_weights(A: ArrayLike) -> Matrix:
    """Return p_i = Σ_j p_ij (Algorithm 2, line 8), shape (C,), summing to 1; 1 / C if all A_ij are 0.

    Lemma 4.3 needs these weights and ``neighbour_matrix`` from the same A, sparsified or not.
    """
    own = degrees(A)
    return own / own.sum() if own.any() else np.full(len(own), 1 / len(own))


def neighbour_matrix(A: ArrayLike) -> Matrix:
    """Return p_ij / p_i, shape (C, C), rows summing to 1; its product with the (C, D) last models is u_i (eq. 4.6).

    A client without an edge (its mis with all others is 1, so that p_i = 0) gets the unweighted mean of all others;
    a single client is its own neighbour.
    """
    A = _square("A", A)
    own = A.sum(axis=1, keepdims=True)
    return A / own if own.all() else np.where(own > 0, A / np.where(own > 0, own, 1), _uniform(len(A)))


def _uniform(C: int) -> Matrix:
    """Return the matrix (C, C) of the unweighted mean of all other clients."""
    return (np.ones((C, C)) - np.eye(C)) / (C - 1) if C > 1 else np.ones((1, 1))


def _square(name: str, matrix: ArrayLike) -> Matrix:
    low, high = {"mis": (0, 1), "A": (0, math.inf)}.get(name, (-math.inf, math.inf))
    array: Matrix = np.asarray(matrix, dtype=np.float64)
    if array.ndim != 2 or array.shape[0] != array.shape[1] or array.size == 0:
        raise ValueError(f"{name}: must have shape (clients, clients), has {array.shape}")
    if not (np.isfinite(array).all() and array.min() >= low and array.max() <= high):
        raise ValueError(f"{name}: must be finite, within [{low:g}, {high:g}]")
    if not np.array_equal(array, array.T) or (name == "A" and np.diagonal(array).any()):
        raise ValueError(f"{name}: must be symmetric" + (", with a zero diagonal" if name == "A" else ""))
    return array
