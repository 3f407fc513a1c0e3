"""Adaptive clipping: the norm of central differential privacy follows a quantile of the clients' norms.

G. Andrew, O. Thakkar, H. B. McMahan and S. Ramaswamy, "Differentially private learning with adaptive clipping",
NeurIPS 2021, algorithm 1. With n the number by which a round's sum is divided, b_i whether ‖Δ_i‖ ≤ S, γ the quantile
and η_C = 0.2:

    b̃ = ½ + (Σ (b_i − ½) + N(0, σ_b²)) / n        within [0, 1]
    S ← S exp(−η_C (b̃ − γ))

The count has sensitivity ½, as b_i − ½ is ± ½, and the sum has S. So both together are one Gaussian release with
noise multiplier z, if the sum's is z_Δ = (z⁻² − (2 σ_b)⁻²)^(−½) (theorem 1). σ_b is n/20, the paper's, or z if that
is more: then z_Δ is at most 1.155 z.
"""

import math
from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from strategies.flower.arrays import clip_update
from strategies.updates.pipeline import LocalModel

INITIAL: Final = 0.1  # S of the first round
RATE: Final = 0.2  # η_C
_NORM: Final = "clipping-norm"  # in a state


class AdaptiveClip:
    """Clips updates to the present norm S, and counts how many were within it.

    Parameters
    ----------
    quantile : float
        γ, the share of the clients whose updates aren't shortened.

    Attributes
    ----------
    norm : float
        S, the norm of the present round.
    """

    def __init__(self, quantile: float) -> None:
        self._quantile = quantile
        self.norm = INITIAL
        self.begin()

    def begin(self) -> None:
        """Begin a round: nobody has been counted."""
        self._centred = 0.0  # Σ (b_i − ½)

    def state(self) -> dict[str, Any]:
        """Return the norm of the next round."""
        return {_NORM: self.norm}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the norm of a checkpoint."""
        self.norm = float(state[_NORM])
        self.begin()

    def __call__(self, local: LocalModel) -> None:
        """Change the model in place, and remove the mark of an earlier bound, which would leak the norm."""
        self._centred += -0.5 if clip_update(local.model, local.base, self.norm) else 0.5
        local.bounded = False

    def count(self, number: int, longer: int) -> None:
        """Count clients that clip their updates themselves, ``longer`` of whose were longer than the norm."""
        self._centred += 0.5 * number - longer

    def multiplier(self, noise: float, expected: float) -> float:
        """Return z_Δ, the noise multiplier of the sum, so that sum and count together have z = ``noise``."""
        return (noise**-2 - (2 * _count_noise(noise, expected)) ** -2) ** -0.5 if noise else 0.0

    def adapt(self, noise: float, expected: float, rng: np.random.Generator) -> None:
        """Set the norm of the next round by those of this round, given z, n and the round's random generator."""
        counted = self._centred + rng.normal(0.0, _count_noise(noise, expected))
        within = min(max(0.5 + counted / expected, 0.0), 1.0)
        self.norm *= math.exp(-RATE * (within - self._quantile))


def _count_noise(noise: float, expected: float) -> float:
    """Return σ_b, given z and n."""
    return max(expected / 20, noise)
