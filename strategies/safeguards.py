"""What one device can do to the model at most, whether it lies, sleeps or comes late.

``safeguards = "auto"`` has them in real time, where clients are devices, and not in virtual time, where they are ours
and task times are known: there a method is what its paper says. They are

    sizes      n_i counts as at most ``examples_bound``, and ``size_ratio_bound`` times the median of all
    weights    a contribution counts with d_i ≤ ``arrival_weight_bound``; a synchronous round's d_i sum to 1
    norms      ‖Δ_i‖ ≤ ``norm_ratio_bound`` times the median of the clients' last norms, where no bound is given

and, in the graph of clients, that no two are taken as more alike than the median pair (strategies/client_graph.py).
Where one binds, the log says so once, and what is reported is the objective that is then minimised.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from strategies.arrays import Vector, clip_update
from strategies.chain import Local
from strategies.weights import Weights

MODES = ("auto", "on", "off")

# Clients whose norms say what is usual: of two, either may be the liar.
LEAST_NORMS = 3

# A run without rounds waits for so many, but not beyond this many times what the first of them took.
PATIENCE = 10.0


@dataclass(frozen=True)
class SafeguardsConfig:
    """Bounds on what one device can do; 0 leaves one out.

    Parameters
    ----------
    safeguards : str
        ``auto``: on in real time; ``on``; ``off``.
    size_ratio_bound, examples_bound : float, int
        n_i counts as at most so many times the median of all n_j, and as at most so many.
    norm_ratio_bound : float
        ‖Δ_i‖ is at most so many times the median of the clients' last norms, unless ``update_norm_bound`` is given.
    """

    safeguards: str = "auto"
    size_ratio_bound: float = 5.0
    examples_bound: int = 0
    norm_ratio_bound: float = 5.0


def capped_sizes(sizes: Sequence[int], ratio: float, most: int) -> Weights:
    """Return the sizes n_i (C,) that count: at most ``ratio`` times their median, and ``most``; 0: no such bound."""
    capped = np.asarray(sizes, dtype=np.float64)
    if most:
        capped = np.minimum(capped, most)
    if ratio and len(capped):
        capped = np.minimum(capped, ratio * np.median(capped))
    return capped


class UsualNorm:
    """A link of the chain: shortens an update to a multiple of the median of the clients' last norms.

    Parameters
    ----------
    ratio : float
        That multiple.

    Attributes
    ----------
    norms : dict of int to float
        The norm of each client's last update, before it was shortened, by client index.
    """

    def __init__(self, ratio: float) -> None:
        self.ratio = ratio
        self.norms: dict[int, float] = {}

    def see(self, local: Local) -> None:
        """Take note of a norm."""
        self.norms[local.client.index] = float(np.linalg.norm(local.model - local.base))

    def knows_enough(self, num_clients: int) -> bool:
        """Tell whether so many clients' norms are known that one liar among them can't say what is usual."""
        return len(self.norms) >= min(LEAST_NORMS, num_clients)

    def __call__(self, local: Local) -> None:
        """Change the model in place."""
        self.see(local)
        if len(self.norms) >= LEAST_NORMS and (usual := float(np.median(list(self.norms.values())))) > 0:
            local.bounded |= clip_update(local.model, local.base, self.ratio * usual)

    def state(self) -> dict[str, Any]:
        """Return what a run goes on from."""
        return {"norms-of": list(self.norms), "norms": list(self.norms.values())}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state``."""
        self.norms = dict(zip(state["norms-of"], state["norms"], strict=True))


def bounded(weight: float, update: Vector, bound: float) -> Vector:
    """Return an update (D,), shortened where ``weight`` times its norm is above ``bound``; 0: no bound."""
    moves = weight * float(np.linalg.norm(update)) if bound else 0.0
    return update * (bound / moves) if moves > bound else update
