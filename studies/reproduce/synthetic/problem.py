"""The synthetic problem of Dhasade et al. as a function of its one parameter, and the constants of its theory.

Section 3.1: a perceptron with frozen slope v, of which only the bias b is trained.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import brentq
from scipy.special import expit

from fedapp import federation
from fedapp.config import RunConfig
from fedapp.models import PERCEPTRON_SLOPE

Array = NDArray[np.float64]

# Biases over which L and the largest divergence are searched, and the step of the numerical derivative.
BIASES, STEP = np.arange(-15, 10, 0.02), 1e-3


@dataclass(frozen=True)
class Points:
    """Labelled points with their scores v·x, each (N,): the binary cross-entropy of v·x + b as a function of b."""

    scores: Array
    labels: Array

    def loss(self, b: ArrayLike) -> Array:
        """Mean loss at each b."""
        logits = self.scores + np.asarray(b)[..., None]
        return np.asarray(np.mean(np.logaddexp(0, logits) - self.labels * logits, axis=-1))

    def gradient(self, b: ArrayLike) -> Array:
        """Derivative of the mean loss with respect to b."""
        return np.asarray(np.mean(expit(self.scores + np.asarray(b)[..., None]) - self.labels, axis=-1))

    @property
    def smoothness(self) -> float:
        """L, the largest second derivative, by central differences of the loss."""
        loss = self.loss
        return float(np.max(loss(BIASES + STEP) - 2 * loss(BIASES) + loss(BIASES - STEP)) / STEP**2)

    @property
    def minimiser(self) -> float:
        """The b of least loss."""
        return float(brentq(self.gradient, -100, 100))


@dataclass(frozen=True)
class SyntheticProblem:
    """The problem's data: inputs and labels of each client, and the test points."""

    clients: Sequence[tuple[Array, Array]]
    test: tuple[Array, Array]
    slope: tuple[float, float] = PERCEPTRON_SLOPE

    @classmethod
    def of(cls, config: RunConfig, num_clients: int) -> "SyntheticProblem":
        """Read the data of a run.

        Raises
        ------
        DataError
            If they aren't there.
        """
        dataset = federation.dataset_of(config, num_clients)
        partition = federation.partition_of(config, num_clients)
        rows = [partition.client(i) for i in range(num_clients)] + [partition.test_indices]
        pairs = [
            (dataset.inputs(r, config.normalize).astype(np.float64), dataset.y[r].astype(np.float64))
            for r in rows
        ]
        return cls(pairs[:-1], pairs[-1])

    def points(self, *pairs: tuple[Array, Array]) -> Points:
        """Score the points of these clients together."""
        slope = np.array(self.slope)
        return Points(np.concatenate([x @ slope for x, _ in pairs]), np.concatenate([y for _, y in pairs]))

    @cached_property
    def objective(self) -> Points:
        """F, over all clients; they have the same number of points."""
        return self.points(*self.clients)

    @cached_property
    def locals(self) -> list[Points]:
        """The f_i."""
        return [self.points(pair) for pair in self.clients]

    @property
    def smoothness(self) -> float:
        """L of F: the largest second derivative."""
        return self.objective.smoothness

    @property
    def local_smoothness(self) -> float:
        """Largest L of the f_i, the L of theorem 2.1."""
        return max(points.smoothness for points in self.locals)

    @property
    def distance(self) -> float:
        """D, from b = 0 to the minimiser of F."""
        return abs(self.objective.minimiser)

    @property
    def largest_divergence(self) -> float:
        """sup |∂f_i − ∂F| over clients and biases: ζ as eq. 3 defines it."""
        gradient = self.objective.gradient(BIASES)
        return max(float(np.max(np.abs(points.gradient(BIASES) - gradient))) for points in self.locals)

    @property
    def limit_divergence(self) -> float:
        """Largest divergence as τ → ∞: clients end at their own minima, where ∂f_i = 0."""
        return max(abs(float(self.objective.gradient(points.minimiser))) for points in self.locals)

    @property
    def paired_minimiser(self) -> float:
        """The b that the participation aims at: minimiser of half the outlier's loss, half the others' mean."""
        usual = self.points(*self.clients[:-1])
        return float(brentq(lambda b: usual.gradient(b) + self.locals[-1].gradient(b), -100, 100))

    def classes(self) -> list[dict[str, Any]]:
        """Return mean and standard deviation (2,) of each class's points: the usual clients', and the outlier's."""
        groups = []
        for outlier, own in ((False, self.clients[:-1]), (True, self.clients[-1:])):
            x, y = (np.concatenate(parts) for parts in zip(*own, strict=True))
            for label in (0, 1):
                points = x[y == label]
                if len(points):
                    spread = points.std(axis=0).tolist()
                    mean = points.mean(axis=0).tolist()
                    groups.append({"outlier": outlier, "label": label, "mean": mean, "deviation": spread})
        return groups
