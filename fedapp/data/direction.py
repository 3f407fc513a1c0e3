"""What a client tells the server of its data: one unit vector, and the noise that hides it.

The direction of Buttaci 2024 (definition 3.2 and below; its word is *message*) is the first principal direction of
the client's data matrix X (n × d), neither centred nor scaled: its top right singular vector. Needs numpy and scipy.
"""

import math
from collections.abc import Callable, Iterator

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from fedapp.data.dataset import Array, Dataset, IntArray, Normalize
from fedapp.data.errors import DataError
from fedapp.gaussian_mechanism import gaussian_sigma
from strategies import streams

Vector = NDArray[np.float64]
Embed = Callable[[Array], Array]

_BLOCK = 2**18  # numbers converted to float64 at a time: 2 MiB, which stay in the processor's cache
_BASIS = 12  # vectors of length d that ARPACK holds


def principal_direction(x: Array, rows: IntArray | None = None, embed: Embed | None = None) -> Vector:
    """Return the top right singular vector m, float64 (d,), ‖m‖ = 1, of a data matrix.

    By ARPACK on XᵀX, which is never formed, from a fixed start vector of positive entries: the same rows give the
    same m to about 1e-10, unless the two largest singular values nearly agree. X ≥ 0 has m ≥ 0.

    Of ±m the one with Σ_j m_j ≥ 0 is taken; where that sum is 0 (up to 1e-9), the one whose entry of largest
    magnitude (of such entries, up to 1e-9, the first) is positive. For X ≥ 0 it is the Perron vector.

    Parameters
    ----------
    x : array (N, ...)
        Real, a memory map for instance; read in blocks of 2 MiB in float64, a row flattened to d numbers.
    rows : int array (n,), optional
        Rows to take, all by default.
    embed : callable, optional
        Turns a block (b, ...) into vectors (b, d).

    Raises DataError if there are no rows, all values are zero, or some aren't finite (or too large to be squared).
    """
    num_rows, size = len(x if rows is None else rows), math.prod(x.shape[1:])
    if num_rows == 0 or size == 0:
        raise DataError(f"a client's direction needs data: there are {num_rows} rows of shape {x.shape[1:]}")
    block = max(1, _BLOCK // size)

    def blocks() -> Iterator[Array]:
        for start in range(0, num_rows, block):
            chosen = slice(start, min(start + block, num_rows))
            part = x[chosen if rows is None else rows[chosen]]
            yield np.asarray(embed(part) if embed else part.reshape(len(part), size), dtype=np.float64)

    def squared(v: Vector) -> Vector:
        product = np.zeros(len(v))
        for part in blocks():
            product += (part @ v) @ part
        return product

    with np.errstate(over="ignore", invalid="ignore"):
        m = _top_eigenvector(squared, next(blocks()).shape[1])
        # Of X ≥ 0, |m| is a top vector too (Perron); it differs from ±m only by rounding or where two values agree.
        if m.min() < 0 < m.max() and np.abs(m) @ squared(np.abs(m)) >= (1 - 1e-12) * (m @ squared(m)):
            m = np.abs(m)
    key = m.sum()
    if abs(key) <= 1e-9:
        key = m[np.argmax(np.abs(m) >= np.abs(m).max() - 1e-9)]
    return m if key > 0 else 0.0 - m


def _top_eigenvector(multiply: Callable[[Vector], Vector], dimensions: int) -> Vector:
    """Return the unit eigenvector of the largest eigenvalue of a positive semidefinite operator on R^d."""
    from scipy.sparse.linalg import LinearOperator, eigsh

    def checked(v: Vector) -> Vector:
        product = np.asarray(multiply(v.ravel()))
        if not np.isfinite(product).all():
            raise DataError("a client's direction needs finite data, and not too large to be squared")
        return product

    start = 1 + streams.generator(0, "arpack-start").random(dimensions)
    if not checked(start).any():
        raise DataError("a client's direction needs data: all values are zero")
    if dimensions == 1:
        return np.ones(1)
    operator = LinearOperator((dimensions, dimensions), matvec=checked, dtype=np.float64)
    _, vectors = eigsh(operator, k=1, which="LA", v0=start, ncv=min(dimensions, _BASIS))
    m: Vector = vectors[:, 0] / np.linalg.norm(vectors[:, 0])
    return m


def client_direction(dataset: Dataset, rows: IntArray, normalize: Normalize = False) -> Vector:
    """Return the direction of the client with these rows of a dataset, float64 (d,), labels not used.

    Images and vectors: the principal direction of the inputs as the model sees them, after ``normalize``: a shift of
    the data, such as that to [-1, 1], moves the direction (their scale doesn't). Text: that of each window's
    character counts, d = ``num_classes``, so that the order of characters is lost.
    """

    def counts(tokens: Array) -> Array:
        shape = (len(tokens), dataset.num_classes)
        numbered = tokens + shape[1] * np.arange(shape[0])[:, None]
        return np.bincount(numbered.ravel(), minlength=math.prod(shape)).reshape(shape)

    def seen(stored: Array) -> Array:
        return dataset.prepared(stored, normalize).reshape(len(stored), -1)

    embed = counts if dataset.kind == "text" else seen if normalize else None
    return principal_direction(dataset.x, np.asarray(rows), embed)


def private_direction(
    data_direction: Vector, epsilon: float, delta: float, clip: float, rng: Generator
) -> Vector:
    """Hide a direction (d,) by the Gaussian mechanism, and make it a unit vector again, which costs no privacy.

    It is scaled down to norm ``clip`` if longer, so that other data in place of the client's move it by at most
    2 ``clip``; then each entry gets noise of deviation ``gaussian_sigma(epsilon, delta, 2 * clip)`` from ``rng``, the
    client's own. For unit vectors a clip ≤ 1 makes no difference, and one above 1 only adds noise.

    Protected with (ε, δ): all of the client's data, against all who see this direction, the server too (replace one
    client). Not protected: the models it trains and its number of samples; and a second direction costs another
    (ε, δ), so draw once and keep it (``fedapp.client.handlers``), or count them (``fedapp.server.privacy``). Attacks
    on the floating-point noise are not considered. The noise has length about σ √d: unless ε is large or d small, it
    drowns the direction.
    """
    data_direction = np.asarray(data_direction, dtype=np.float64)
    if data_direction.ndim != 1 or data_direction.size == 0 or not np.isfinite(data_direction).all():
        raise ValueError(f"a direction must be a finite vector; it has shape {data_direction.shape}")
    noise = rng.normal(0.0, gaussian_sigma(epsilon, delta, 2 * clip), len(data_direction))
    noisy = data_direction * min(1.0, clip / max(float(np.linalg.norm(data_direction)), 1e-300)) + noise
    return np.asarray(noisy / np.linalg.norm(noisy))
