"""What a ClientApp tells a strategy: the direction that places its client in the graph of similar clients.

For anybody's ClientApp, with NumPy alone. ``Spectral``, and ``client_weights="adjacency"`` with other strategies, ask
each client once. Three lines answer::

    @app.query("direction")
    def direction(msg, context):
        return Message(RecordDict({"direction": ArrayRecord([direction_of(features(context))])}), reply_to=msg)
"""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

_TIE = 1e-9


def direction_of(
    features: ArrayLike | None = None, *, gradient: ArrayLike | None = None
) -> NDArray[np.float64]:
    """Return a client's direction m, float64 (d,), ‖m‖ = 1; all clients must use the same kind and the same d.

    The strategy takes clients i and j as alike by their misalignment ½ (1 − m_iᵀ m_j) (Buttaci 2024, definition 3.2;
    its word for m is *message*).

    Parameters
    ----------
    features : array (n, …)
        The client's n rows as its model sees them, or what a fixed, common network makes of them; d numbers a row.
        m is their first principal direction, neither centred nor scaled: the top right singular vector (Buttaci 2024,
        section 3.2). Its sign is arbitrary, and is fixed so that Σ_j m_j ≥ 0; where that sum is 0 (up to 1e-9), so
        that the first entry of largest magnitude is positive. With X ≥ 0, such as images, it is the Perron vector.
        The cost is that of an eigenvalue problem of size min(n, d).
    gradient : array (K, h) or of any shape
        The mean gradient of the loss on the client's data for the last layer's weights, at a model that is the same
        for all clients, such as the initial one; d = K h. m = gradient / ‖gradient‖, as the cosine similarity of
        clustered federated learning has it (Sattler, Müller and Samek 2020). A gradient has a sign, which
        stays: opposite gradients are clients that have nothing in common. (For softmax with cross-entropy the entries
        of a gradient sum to 0, so that a sign by their sum would be one by rounding errors.)

    Raises
    ------
    TypeError
        If not exactly one of the two is given.
    ValueError
        If the array is empty, has a value that isn't finite, or is zero.
    """
    if (features is None) == (gradient is None):
        raise TypeError("direction_of() takes either features or gradient")
    if gradient is not None:
        g = _scaled("gradient", gradient).ravel()
        return np.asarray(g / np.linalg.norm(g))
    x = _scaled("features", features)
    if x.ndim < 2:
        raise ValueError(f"features of shape {x.shape}: must be rows, (n, …)")
    x = x.reshape(len(x), -1)
    tall = len(x) >= x.shape[1]
    top = np.linalg.eigh(x.T @ x if tall else x @ x.T)[1][:, -1]
    m = top if tall else x.T @ top
    m = np.abs(m) if x.min() >= 0 else m
    m = m / np.linalg.norm(m)
    key = m.sum()
    if abs(key) <= _TIE:
        key = m[np.argmax(np.abs(m) >= np.abs(m).max() - _TIE)]
    return np.asarray(m if key > 0 else 0.0 - m)


def _scaled(name: str, values: Any) -> NDArray[np.float64]:
    """Return an array in float64, its largest magnitude 1, so that squares neither overflow nor vanish."""
    array = np.asarray(values, dtype=np.float64)
    largest = np.abs(array).max(initial=0.0)
    if not (np.isfinite(largest) and largest > 0):
        raise ValueError(f"{name} of shape {array.shape}: must be finite and not all zero")
    return np.asarray(array / largest)
