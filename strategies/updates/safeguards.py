"""What one device can do to the model at most, whether it lies, sleeps or comes late.

``safeguards = "auto"`` has them in real time, where clients are devices, and not in virtual time, where they are ours
and task times are known: there a method is what its paper says. They are

    sizes      n_i counts as at most ``examples_bound``, and ``size_ratio_bound`` times the median of those told
    weights    a contribution counts with d_i ≤ ``arrival_weight_bound``; a synchronous round's d_i sum to 1
    norms      ‖Δ_i‖ ≤ ``norm_ratio_bound`` times the median of the clients' last norms, where no bound is given

and, in the graph of clients, that no two are taken as more alike than the median pair
(strategies/clients/client_graph.py).
Where one binds, the log says so once, and what is reported is the objective that is then minimised.

Under central differential privacy no median bounds norms: one client's data could move it, and with it the others'
updates, which is more than the noise covers. ``dp_clipping_norm`` is the bound there.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from strategies.clients.roster import Client
from strategies.clients.weights import Weights
from strategies.flower.arrays import Vector, clip_update
from strategies.updates.chain import Local

log = logging.getLogger("flwr.strategies")

MODES = ("auto", "on", "off")

# Clients whose norms say what is usual: of two, either may be the liar.
LEAST_NORMS = 3

# A run without rounds waits for so many, but not beyond this many times what the first of them took.
PATIENCE = 10.0


@dataclass(frozen=True)
class Bounds:
    """How far each safeguard lets a device go; 0 leaves a safeguard out.

    Attributes
    ----------
    size_ratio, examples : float, int
        n_i counts as at most so many times the median of all n_j that are told, and as at most so many.
    norm_ratio : float
        ‖Δ_i‖ is at most so many times the median of the clients' last norms.
    weight : float
        d_i is at most this.
    """

    size_ratio: float = 0.0
    examples: int = 0
    norm_ratio: float = 0.0
    weight: float = 0.0


def capped_sizes(sizes: Sequence[float], ratio: float, most: int) -> Weights:
    """Return the sizes n_i (C,) that count: at most ``ratio`` times their median, and ``most``; 0: no such bound.

    A size of 0 is one that nobody has told, of which the median knows nothing.
    """
    capped = np.asarray(sizes, dtype=np.float64)
    if most:
        capped = np.minimum(capped, most)
    if ratio and len(told := capped[capped > 0]):
        capped = np.minimum(capped, ratio * np.median(told))
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


class Safeguards:
    """What a strategy asks before it takes a device at its word.

    Parameters
    ----------
    mode : str
        ``auto``: on in real time; ``on``; ``off``.
    in_real_time : callable
        Tells whether time passes by itself.

    Attributes
    ----------
    norms : UsualNorm
        The link of the chain that ``learns_norms`` asks for.
    """

    def __init__(self, mode: str, bounds: Bounds, in_real_time: Callable[[], bool]) -> None:
        if mode not in MODES:
            raise ValueError(f"safeguards = {mode!r}: allowed are {', '.join(MODES)}")
        self.mode, self.bounds = mode, bounds
        self._in_real_time = in_real_time
        self.reset()

    def reset(self) -> None:
        """Forget the norms of an earlier run's updates."""
        self.norms = UsualNorm(self.bounds.norm_ratio)
        self._said: set[str] = set()

    @property
    def active(self) -> bool:
        """Whether there are any."""
        return self.mode == "on" or (self.mode == "auto" and self._in_real_time())

    @property
    def learns_norms(self) -> bool:
        """Whether updates are bounded by what is usual."""
        return self.active and self.bounds.norm_ratio > 0

    @property
    def path_bound(self) -> float:
        """How many times the usual a client's path counts as at most (``methods.shared.local_path``); 0: no bound."""
        return self.bounds.size_ratio if self.active else 0.0

    @property
    def heaviest(self) -> float:
        """The most that one contribution weighs; 0: no bound."""
        return self.bounds.weight if self.active else 0.0

    def sizes(self, clients: Sequence[Client], said: Sequence[float]) -> Sequence[float]:
        """Return the sizes n_i (n,) that count, of those that clients tell; 0 where one hasn't."""
        if not self.active:
            return said
        capped = capped_sizes(said, self.bounds.size_ratio, self.bounds.examples).tolist()
        for client, size, counts in zip(clients, said, capped, strict=True):
            if counts < size:
                self._say_once(
                    f"{client} says it has {size} examples",
                    f"it counts with {counts:g} (size_ratio_bound, examples_bound)",
                )
        return capped  # type: ignore[no-any-return]

    def weights(self, clients: Sequence[Client], weights: Weights) -> Weights:
        """Return the weights d_i (n,) under the bound."""
        if self.heaviest and (worst := weights.max(initial=0.0)) > self.heaviest:
            self._say_once(
                f"{clients[int(weights.argmax())]} is slow",
                f"its contributions would count {worst:.2f} times, and count {self.heaviest:g} times "
                "(arrival_weight_bound); the objective that is minimised is no longer quite the federated one",
            )
            return np.minimum(weights, self.heaviest)
        return weights

    def _say_once(self, what: str, then: str) -> None:
        """Log a warning that would otherwise come with every aggregation."""
        if what not in self._said:
            self._said.add(what)
            log.warning("%s: %s", what, then)

    def state(self) -> dict[str, Any]:
        """Return what a run goes on from."""
        return self.norms.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state``."""
        self.norms.restore(state)


def moved_by(weight: float, update: Vector) -> float:
    """Return how far an update (D,) of this weight moves a sum."""
    return weight * float(np.linalg.norm(update))


def bounded(weight: float, update: Vector, bound: float) -> Vector:
    """Return an update (D,), shortened where ``weight`` times its norm is above ``bound``; 0: no bound."""
    moves = moved_by(weight, update) if bound else 0.0
    return update * (bound / moves) if moves > bound else update
