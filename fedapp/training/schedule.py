"""The learning rate of a round."""

import numpy as np


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
