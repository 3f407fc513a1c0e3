"""The privacy account of Gaussian releases of which each is about a random sample of the clients.

Sampling makes a release private beyond its noise, if nobody learns who was drawn. By what is known of a scheme:

    Poisson               each client by a coin of its own, with probability q. The sum is divided by q C, so that one
                          client changes it by at most S/(qC). Neighbours: one client is added or removed, or its
                          update is zero in one of the two, which is the same here, with the same q C.
                          ε is that of the privacy loss distribution (dp-accounting's; pessimistic estimate), and,
                          for a δ below its truncation, of the Rényi account (Mironov, Talwar and Zhang, 2019).
    without replacement   L of C clients. Theorems of amplification are of replaced clients, not of one that is
                          removed, and other data in place of a client's change the mean by up to 2 S/L. So ε is that
                          of Rényi accounts with z/2 (Wang, Balle and Kasiviswanathan, AISTATS 2019, theorem 27);
                          a client's zero is a case of other data.

ε without sampling holds as well (``fedapp.gaussian_mechanism``): the smallest of those that hold is returned. Of
rounds in an order that is known it is exact, also with the noise of a tree (strategies/updates/tree_noise.py): all
nodes that are complete are one Gaussian release of a vector that a client changes by S (Σ k²)^½, with k how often it
takes part in the rounds of a node (Kairouz et al. 2021, appendix D; for updates that depend on what was released
before, Denisov et al., NeurIPS 2022, theorem 2.1).
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedapp.gaussian_mechanism import gaussian_epsilon

PACKAGE = "dp_accounting"

# Of the privacy loss: the step of its values, where z is this or more; below, the step that keeps their number.
STEP, FROM_NOISE = 1e-3, 0.3
# The truncation of a composed privacy loss distribution costs up to 1e-15 of δ: below this δ it shows.
LEAST_DELTA = 1e-10
# Of the Rényi divergence without replacement; an order takes the time of its square.
ORDERS = (*range(2, 33), 40, 48, 64, 96, 128)


@dataclass(frozen=True)
class Sampling:
    """Who takes part in a release, as far as an account may count on it.

    Attributes
    ----------
    probability : float
        q of Poisson sampling; 1: no coin is thrown.
    drawn, clients : int
        L of C clients, without replacement; 0: the number isn't fixed.
    num_turns : int
        Each client takes part once in so many releases, always the same.
    restart : int
        Releases after which a new tree of noise begins; 0: there is one; 1: each release has noise of its own.
    repeats : tuple of (int, int)
        Releases that were made twice, with other noise: after how many, and their number.
    """

    probability: float = 1.0
    drawn: int = 0
    clients: int = 0
    num_turns: int = 1
    restart: int = 1
    repeats: tuple[tuple[int, int], ...] = ()

    @property
    def amplifies(self) -> bool:
        """Whether somebody may not be drawn."""
        return self.probability < 1 or self.drawn < self.clients


EVERYBODY = Sampling()


def is_installed() -> bool:
    """Return True if dp-accounting, which accounts of samples need, is installed."""
    return find_spec(PACKAGE) is not None


def sampled_epsilon(noise_multiplier: float, delta: float, releases: int, sampling: Sampling) -> float:
    """Return the smallest known ε for which so many releases of random samples together are (ε, δ)-private.

    Each has noise of deviation z = ``noise_multiplier`` times what one client's update can change; each sample is
    drawn by itself.
    """
    squares = as_releases(releases, sampling.num_turns, sampling.restart, sampling.repeats)
    known = [gaussian_epsilon(noise_multiplier, delta, squares)]
    releases += sum(number for _, number in sampling.repeats)
    if sampling.probability < 1:
        known.append(poisson_loss_epsilon(noise_multiplier, sampling.probability, delta, releases))
        if delta < LEAST_DELTA:
            known.append(poisson_renyi_epsilon(noise_multiplier, sampling.probability, delta, releases))
    elif sampling.amplifies:
        known.append(without_replacement_epsilon(noise_multiplier, sampling, delta, releases))
    return min(known)


@lru_cache
def as_releases(rounds: int, num_turns: int, restart: int, repeats: tuple[tuple[int, int], ...] = ()) -> int:
    """Return Σ k² of the client for which it is the largest: as many releases of one round cost as much.

    Parameters
    ----------
    rounds : int
        How many rounds there were.
    num_turns : int
        B: a client takes part in every B-th round.
    restart : int
        Rounds after which a new tree begins; 0: there is one.
    repeats : tuple of (int, int)
        Rounds that were made twice: after how many rounds, and their number. What is complete with them is released
        twice.
    """
    if restart == 1 and not repeats:
        return -(-rounds // num_turns)
    squares = _squares(rounds, num_turns, restart)
    for first, number in repeats:
        squares = squares + _squares(first + number, num_turns, restart) - _squares(first, num_turns, restart)
    return int(squares.max())


def _squares(rounds: int, num_turns: int, restart: int) -> NDArray[np.int64]:
    """Return Σ k² (B,) of the clients by their places in the order."""
    slots = np.arange(num_turns)[:, None]
    if restart == 1:
        return np.maximum(-((slots[:, 0] - rounds) // num_turns), 0)
    squares = np.zeros(num_turns, dtype=np.int64)
    restart = restart or rounds
    starts = np.arange(0, rounds, max(restart, 1))
    lengths = np.minimum(starts + restart, rounds) - starts
    size = 1
    while size <= lengths.max(initial=0):
        begins = np.concatenate(
            [
                np.arange(start, start + length - size + 1, size)
                for start, length in zip(starts, lengths, strict=True)
            ]
        )
        # Rounds s, s + B, … of a slot s that are before a round: ⌈(round − s) / B⌉, and none before s.
        upto = [np.maximum(-((slots - at) // num_turns), 0) for at in (begins, begins + size)]
        squares += ((upto[1] - upto[0]) ** 2).sum(axis=1)
        size *= 2
    return squares


def poisson_loss_epsilon(noise_multiplier: float, probability: float, delta: float, releases: int) -> float:
    """Return ε of Poisson-sampled Gaussian releases by their privacy loss distribution."""
    one = _privacy_loss(noise_multiplier, probability)
    return float(one.self_compose(releases).get_epsilon_for_delta(delta))


def poisson_renyi_epsilon(noise_multiplier: float, probability: float, delta: float, releases: int) -> float:
    """Return ε of Poisson-sampled Gaussian releases by their Rényi divergences, of dp-accounting's own orders."""
    import dp_accounting

    event = dp_accounting.PoissonSampledDpEvent(probability, dp_accounting.GaussianDpEvent(noise_multiplier))
    return _renyi(event, releases, delta)


def without_replacement_epsilon(
    noise_multiplier: float, sampling: Sampling, delta: float, releases: int
) -> float:
    """Return ε of Gaussian releases of L of C clients each, drawn without replacement, of replaced clients."""
    import dp_accounting

    # Of a client's update and zero in its place the noise is z times the distance; of two updates z/2 times.
    event = dp_accounting.SampledWithoutReplacementDpEvent(
        sampling.clients, sampling.drawn, dp_accounting.GaussianDpEvent(noise_multiplier / 2)
    )
    relation = dp_accounting.NeighboringRelation.REPLACE_ONE
    return _renyi(event, releases, delta, orders=ORDERS, neighboring_relation=relation)


@lru_cache(maxsize=8)
def _privacy_loss(noise_multiplier: float, probability: float) -> Any:
    from dp_accounting.pld.privacy_loss_distribution import from_gaussian_mechanism

    step = STEP * max(1.0, (FROM_NOISE / noise_multiplier) ** 2)
    return from_gaussian_mechanism(
        noise_multiplier, value_discretization_interval=step, sampling_prob=probability
    )


def _renyi(event: Any, releases: int, delta: float, **options: Any) -> float:
    from dp_accounting.rdp import RdpAccountant

    accountant = RdpAccountant(**options)
    with _quietly():
        accountant.compose(event, releases)
        return float(accountant.get_epsilon(delta))


@contextmanager
def _quietly() -> Iterator[None]:
    """Keep dp-accounting from warning of orders that it leaves out: another order's ε holds as well."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
