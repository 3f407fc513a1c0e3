"""Who masks with whom, and how many shares open a secret: the graph of SecAgg+ (Bell et al. 2020, section 3)."""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

GONE = 1 / 3  # share of a round's clients that may go away, in whatever stage
CURIOUS = 1 / 5  # share of a round's clients that may conspire with the server
FAILS = 2.0**-10  # probability that a round of so many dropouts can't be unmasked, at most
# Probability that a client has as many conspirators as the threshold among its neighbours, at most.
OPENS = 2.0**-40
FEWEST = 3  # of two clients, one subtracts its own update from the sum


class Terms(NamedTuple):
    """The number k of a client's neighbours, and the number t of their shares that open one of its two secrets."""

    neighbours: int
    threshold: int


def terms_for(number: int, neighbours: int = 0, threshold: int = 0) -> Terms:
    """Return the terms of a sum of ``number`` clients.

    The threshold is above k/2, so that a server that tells some neighbours that a client has gone, and others that it
    is there, doesn't open both of its secrets.

    Parameters
    ----------
    neighbours : int
        k, made even if there are more clients; 0: the fewest with which a third of the clients may go and a fifth may
        conspire with the server (``usual_neighbours``).
    threshold : int
        t; 0: ⌊k/2⌋ + 1.

    Raises
    ------
    ValueError
        If there is no such graph of so many clients.
    """
    if number < FEWEST:
        raise ValueError(f"secure_sums: {number} clients in a sum; allowed are {FEWEST} or more")
    most = number - 1
    if neighbours and not FEWEST - 1 <= neighbours <= most:
        raise ValueError(
            f"secure_neighbours = {neighbours}: {number} clients are in a sum; allowed are 0 (as many as it "
            f"needs), or {FEWEST - 1} to {most}"
        )
    k = neighbours or usual_neighbours(number)
    k = min(k + k % 2, most)
    least = k // 2 + 1
    if threshold and not least <= threshold <= k:
        raise ValueError(
            f"secure_threshold = {threshold}: each of {number} clients in a sum has {k} neighbours; allowed are 0 "
            f"(more than half), or {least} to {k}"
        )
    return Terms(k, threshold or least)


@lru_cache
def usual_neighbours(number: int) -> int:
    """Return the least k of a graph of ``number`` clients, for a threshold of ⌊k/2⌋ + 1; all others at most.

    The neighbours of a client are a random draw of the others, so that those of a kind among them are hypergeometric:
    more than k − t of them have gone with a probability of ``FAILS`` / n at most, and t of them conspire with the
    server with one of ``OPENS`` / n at most (the second and third property of Bell et al. 2020, definition 3.4; the
    first, that those who stay are connected, follows with room to spare).
    """
    from scipy.stats import hypergeom  # a second to import, where a run has no secure sums for nothing

    others = number - 1
    gone, curious = int(GONE * number), int(CURIOUS * number)
    for k in range(2, others, 2):
        t = k // 2 + 1
        fails = hypergeom.sf(k - t, others, min(gone, others), k)
        opens = hypergeom.sf(t - 1, others, min(curious, others), k)
        if fails * number <= FAILS and opens * number <= OPENS:
            return k
    return others


def least_of(number: int, threshold: int) -> int:
    """Return the fewest masked updates of ``number`` clients whose sum is opened, where they bring its noise.

    A third of the clients may go, and t neighbours of each must be there.
    """
    return max(number - int(GONE * number), threshold + 1)


def graph_of(clients: Sequence[int], k: int, rng: np.random.Generator) -> dict[int, tuple[int, ...]]:
    """Return each client's k neighbours, in ascending order: the nearest on a ring in random order.

    k is even, or the number of all others.
    """
    number = len(clients)
    if k >= number - 1:
        return {each: tuple(sorted(other for other in clients if other != each)) for each in clients}
    ring = [clients[place] for place in rng.permutation(number)]
    steps = [*range(-(k // 2), 0), *range(1, k // 2 + 1)]
    return {
        each: tuple(sorted(ring[(place + step) % number] for step in steps))
        for place, each in enumerate(ring)
    }


def core_of(graph: Mapping[int, Sequence[int]], present: set[int], threshold: int) -> set[int]:
    """Return the clients of those present that have ``threshold`` neighbours among those that are returned."""
    core = set(present)
    while few := {each for each in core if len(core.intersection(graph[each])) < threshold}:
        core -= few
    return core
