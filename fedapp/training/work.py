"""How much a client trains in a task: E_k local epochs or steps, and the learning rate γ_t of the round.

The server decides E_k once, before the run, and every message carries the list: whatever runs a client, on this
machine or on a device, its E_k is the same.

With a common step size the clients' fixed point is the minimiser of Σ E_k J_k(w), not of Σ J_k(w) (Wang et al. 2020,
"Tackling the objective inconsistency problem in heterogeneous federated optimization"); with ``normalize-steps`` the
step is μ_k = μ / E_k, and the gradient is unbiased again.
"""

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from strategies import streams

ALLOWED = "none, list:E,E,…, range:A-B, uniform:A-B, lognormal:VARIANCE or speed; E, A, B whole numbers >= 1"
_WHOLE, _NUMBER = r"[1-9]\d{0,8}", r"(\d+\.?\d*|\.\d+)"
PATTERN = rf"^(none|list:{_WHOLE}(,{_WHOLE})*|(range|uniform):{_WHOLE}-{_WHOLE}|lognormal:{_NUMBER}|speed)$"


def local_work(kind: str, usual: int, task_times: NDArray[np.float64], seed: int) -> list[int]:
    """Return E_k ≥ 1 of every client.

    Parameters
    ----------
    kind : str
        ``none``: E for all. ``list:…``: these. ``range:A-B``: evenly spaced from A (client 0) to B (the last).
        ``uniform:A-B``: drawn once per client, each whole number from A to B equally likely. ``lognormal:VARIANCE``:
        drawn once per client with mean E (before rounding) and this variance of the logarithm. ``speed``: what
        a client gets done in the time in which the fastest does E.
    usual : int
        E, the run's local epochs or local steps; ``list``, ``range`` and ``uniform`` don't need it.
    task_times : array (C,)
        Mean seconds that each client's task takes, for ``speed``.
    seed : int
        Fixes the draws.

    Raises
    ------
    ValueError
        If a list isn't as long as there are clients, or a range to draw from is none.
    """
    name, _, argument = kind.partition(":")
    num_clients = len(task_times)
    rng = streams.generator(seed, "local-work")
    if name == "none":
        work = np.full(num_clients, usual)
    elif name == "list":
        work = np.array(_listed(kind))
        if len(work) != num_clients:
            raise ValueError(
                f"step-heterogeneity = {kind!r}: has {len(work)} numbers, must have one for each of the "
                f"{num_clients} clients"
            )
    elif name == "lognormal":
        variance = float(argument)
        work = usual * rng.lognormal(-variance / 2, variance**0.5, num_clients)
    elif name == "speed":
        work = np.floor(usual * task_times.min() / task_times * (1 + 1e-9))
    else:
        first, last = (int(end) for end in argument.split("-"))
        if name == "range":
            work = np.linspace(first, last, num_clients)
        else:
            if first > last:
                raise ValueError(f"step-heterogeneity = {kind!r}: must be uniform:A-B with A <= B")
            work = rng.integers(first, last, num_clients, endpoint=True)
    return np.maximum(np.rint(work), 1).astype(int).tolist()  # type: ignore[no-any-return]


def examples_of(num_examples: float, batch_size: int, epochs: int, steps: int) -> float:
    """Return how many examples a task passes over, each as often as it is used: one of epochs and steps is 0."""
    width = min(batch_size, num_examples) if batch_size else num_examples
    return num_examples * epochs + width * steps


def to_text(work: list[int]) -> str:
    """Write E_k as the ``list`` that a message carries."""
    return f"list:{','.join(map(str, work))}"


def of_client(kind: str, epochs: int, steps: int, client: int) -> tuple[int, int]:
    """Return a client's epochs and steps, one of them 0, from a message's ``none`` or ``list``.

    A client that joins after the list was made works as much as the last.
    """
    if kind == "none":
        return epochs, steps
    work = _listed(kind)
    own = work[min(client, len(work) - 1)]
    return (own, 0) if epochs else (0, own)


def of_clients(
    kind: str, epochs: int, steps: int, clients: Sequence[int], fractions: NDArray[np.float64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return what parts (n,) of their usual epochs (n,) and steps (n,) are, of several clients."""
    usual = (
        [(epochs, steps)] if kind == "none" else [of_client(kind, epochs, steps, each) for each in clients]
    )
    own = np.ceil(np.array(usual) * fractions[:, None]).astype(np.int64)
    return own[:, 0], own[:, 1]


def in_part(work: int, part: float) -> int:
    """Return the part of E that a client gets done, rounded up: with a part drawn from (0, 1], 1 to E alike."""
    return math.ceil(work * part)


@lru_cache(maxsize=2)
def _listed(kind: str) -> tuple[int, ...]:
    return tuple(int(number) for number in kind.removeprefix("list:").split(","))


def scheduled_lr(lr: float, schedule: str, server_round: int, num_rounds: int) -> float:
    """Return the learning rate γ_t of a round.

    Parameters
    ----------
    lr : float
        γ, the rate of the first round.
    schedule : str
        ``constant``, ``inverse`` (γ/t), ``inverse-sqrt`` (γ/√t), ``cosine`` (to 0 after the last round) or
        ``exponential:R`` (γ R^(t−1)).
    server_round : int
        t, from 1.
    num_rounds : int
        T, for ``cosine``.
    """
    name, _, rate = schedule.partition(":")
    if name == "inverse":
        return lr / server_round
    if name == "inverse-sqrt":
        return lr / float(np.sqrt(server_round))
    if name == "cosine":
        return lr * 0.5 * (1 + float(np.cos(np.pi * (server_round - 1) / num_rounds)))
    if name == "exponential":
        return lr * float(rate) ** (server_round - 1)
    return lr
