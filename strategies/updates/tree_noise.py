"""Central noise of a tree: DP-FTRL, for rounds whose participants aren't drawn at random.

P. Kairouz, B. McMahan, S. Song, O. Thakkar, A. Thakurta and Z. Xu, "Practical and private (deep) learning without
sampling or shuffling", ICML 2021, algorithms 1 and 2, and appendix D (restarts).

Each complete node of a binary tree over the rounds has noise of its own, and the model after t rounds has the noise
of the nodes that the binary digits of t name:

    N_t = Σ of the nodes that cover rounds 1 … t: as many as t has ones        w_t = w_0 + Σ_{s ≤ t} Δ_s + N_t

So a round's update gets N_t − N_{t−1}, with any server optimizer, which works on what is private already. A node's
noise has deviation z S d, with d the largest weight that a client had in one of its rounds: a client that takes part
k times in them changes the node's sum by k S d at most. After ``restart`` rounds a new tree begins, and the noise of
the last one stays in the model; with ``restart`` = 1 every round is a tree: the Gaussian mechanism.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from strategies.flower.arrays import Vector
from strategies.updates.pipeline import Noise

_ROUND: Final = "tree-round"
_NODES: Final = "tree-nodes"
_NOISE: Final = "tree-noise"


@dataclass(frozen=True)
class Node:
    """A complete node over 2^level rounds: its noise (D,), and the largest weight in one of its rounds."""

    level: int
    weight: float
    noise: Vector


class TreeNoise:
    """Adds the noise of a tree to the sums of rounds; keeps a vector (D,) for each binary digit of the round.

    Parameters
    ----------
    restart : int
        Rounds after which a new tree begins; 0: there is one.
    generator : callable
        Returns the random generator of a round's noise, by the round's number.
    """

    def __init__(self, restart: int, generator: Callable[[int], np.random.Generator]) -> None:
        self._restart, self._generator = restart, generator
        self._done = 0
        self._nodes: list[Node] = []  # that cover the tree's rounds so far, the largest first

    def state(self) -> dict[str, Any]:
        """Return the nodes that later rounds replace."""
        return {
            _ROUND: self._done,
            _NODES: [[node.level, node.weight] for node in self._nodes],
            **{f"{_NOISE}-{place}": node.noise for place, node in enumerate(self._nodes)},
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the nodes of a checkpoint."""
        self._done = int(state[_ROUND])
        self._nodes = [
            Node(int(level), float(weight), np.asarray(state[f"{_NOISE}-{place}"]))
            for place, (level, weight) in enumerate(state[_NODES])
        ]

    def __call__(self, update: Vector, noise: Noise, sensitivity: float, number: int) -> None:
        """Add the noise of round ``number`` to its sum (D,) in place; d of the round is ``sensitivity``."""
        while self._done < number - 1:  # rounds of which no model came
            update += self._grown(noise, len(update), 0.0)
        update += self._grown(noise, len(update), sensitivity)

    def _grown(self, of_one: Noise, size: int, weight: float) -> Vector:
        """Take in the next round, and return N_t − N_{t−1} (D,)."""
        place = self._done % self._restart if self._restart else self._done
        self._done += 1
        if place == 0:
            self._nodes = []
        replaced: list[Node] = []
        while self._nodes and self._nodes[-1].level == len(replaced):
            replaced.append(self._nodes.pop())
        weight = max([weight, *(node.weight for node in replaced)])
        noise = self._generator(self._done).normal(0.0, of_one.deviation(weight), size)
        self._nodes.append(Node(len(replaced), weight, noise))
        for node in replaced:
            noise = noise - node.noise
        return noise
