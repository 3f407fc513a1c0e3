"""Safeguards: bounds on the influence of one device on the model, whether it is faulty, slow or malicious.

``safeguards = "auto"`` enables them in real time, where clients are devices, and not in virtual time, where clients
are trusted and task times are known: there a method is the one of its paper. The safeguards bound

    sizes      n_i ≤ ``examples_bound``, and n_i ≤ ``size_ratio_bound`` times the median ñ of the reported sizes
    weights    d_i of a contribution ≤ ``arrival_weight_bound``; a synchronous round's d_i sum to 1
    norms      ‖Δ_i‖ max(n_i / ñ, 1) ≤ ``norm_ratio_bound`` times the median of the clients' last norms, where no
               bound is given and clients count by their sizes; else without the factor
    memory     how far a vector that a method keeps of a client is from their mean, likewise, by the median of a round
    buffers    each value, by median and spread of recent clients' values (strategies/updates/buffers.py)

and, in the similarity graph of clients, the similarity of two clients by that of the median pair
(strategies/clients/client_graph.py). When a safeguard takes effect, the log says so once, and reports show the
objective that is then minimised.

Under central differential privacy norms aren't bounded by a median: one client's data could change the median, and
thus the other clients' updates, which the noise doesn't cover. ``dp_clipping_norm`` is the bound there.
"""

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from strategies.clients.roster import Client
from strategies.clients.weights import Weights
from strategies.flower.arrays import Vector, shorten_update
from strategies.updates.buffers import Buffers, UsualBuffers
from strategies.updates.pipeline import LocalModel

log = logging.getLogger("flwr.strategies")

# Least number of clients for a median of norms: with two, either may be the faulty one.
LEAST_NORMS = 3

# Clients whose norms and buffers are awaited before any update counts, if the run has as many: of three clients, two
# liars would define the median.
FIRST = 5

# Upper bound of a client's path, as a multiple of the median: clients take unequal numbers of steps.
PATHS = 5.0

# An asynchronous run waits for the first updates for at most this many times the first one's task time, or, on
# devices, the time of half of them.
HOLD_TIMES = 10.0


@dataclass(frozen=True)
class Bounds:
    """The bounds of the safeguards; 0 turns a safeguard off.

    Attributes
    ----------
    size_ratio, examples : float, int
        Upper bounds of n_i, as a multiple of the median of all reported n_j, and in examples.
    norm_ratio : float
        Upper bound of ‖Δ_i‖ max(n_i / ñ, 1), as a multiple of the median of the clients' last norms; ñ is the median
        size.
    memory_ratio : float
        Upper bound of how far a client's vector that a method keeps is from their mean, as a multiple of the median.
    weight : float
        Upper bound of d_i.
    """

    size_ratio: float = 0.0
    examples: int = 0
    norm_ratio: float = 0.0
    memory_ratio: float = 0.0
    weight: float = 0.0


def median(values: Iterable[float]) -> float:
    """Return the median of some values, to the bits of NumPy's, whose checks take longer than a round's sum."""
    ordered = np.sort(np.fromiter(values, np.float64))
    return float(ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2


def capped_sizes(sizes: Sequence[float], ratio: float, most: int, known: Sequence[float] = ()) -> Weights:
    """Return the sizes n_i (C,), bounded by ``ratio`` times a median and by ``most``; 0: no such bound.

    The median is that of ``known``, by default the sizes themselves, without those of 0, which weren't reported.
    """
    capped, typical = np.asarray(sizes, dtype=np.float64), np.asarray(known or sizes, dtype=np.float64)
    if most:
        capped, typical = np.minimum(capped, most), np.minimum(typical, most)
    if ratio and len(reported := typical[typical > 0]):
        capped = np.minimum(capped, ratio * median(reported))
    return capped


class UsualNorm:
    """A link of the chain: shortens an update to a multiple of the median of the clients' last norms.

    Parameters
    ----------
    ratio : float
        The multiple.

    Attributes
    ----------
    norms : dict of int to float
        The norm of each client's last update, before it was shortened, by client index.
    sizes : mapping of int to float
        n_i of the clients over the median size, by client index, where clients count by their sizes.
    left : dict of int to (float, int)
        The sum of the factors by which each client's updates were shortened, and their number, by client index.
    """

    def __init__(self, ratio: float) -> None:
        self.ratio = ratio
        self.norms: dict[int, float] = {}
        self.sizes: dict[int, float] = {}
        self.shrinkage: dict[int, tuple[float, int]] = {}

    def share(self, client: Client) -> float:
        """Return max(n_i / ñ, 1) of a client: a client whose updates count more has shorter ones."""
        return max(self.sizes.get(client.index, 1.0), 1.0)

    def bound(self, client: Client, norm: float) -> float:
        """Record the norm of a client's update, and return the bound of it; infinity before enough are known."""
        self.norms[client.index], most = norm, math.inf
        if len(self.norms) >= LEAST_NORMS and (typical := median(self.norms.values())) > 0:
            most = self.ratio * typical / self.share(client)
        total, number = self.shrinkage.get(client.index, (0.0, 0))
        self.shrinkage[client.index] = total + (most / norm if norm > most else 1.0), number + 1
        return most

    def __call__(self, local: LocalModel) -> None:
        """Shorten the update in place, by changing the model, where its norm exceeds the bound."""
        norm = local.norm()
        if norm > (bound := self.bound(local.client, norm)):
            local.bounded |= shorten_update(local.model, local.base, bound, norm)

    def state(self) -> dict[str, Any]:
        """Return what a run goes on from."""
        left = [[index, *each] for index, each in self.shrinkage.items()]
        state: dict[str, Any] = {
            "norms-of": list(self.norms),
            "norms": list(self.norms.values()),
            "norms-left": left,
        }
        if self.sizes:
            state |= {"sizes-of": list(self.sizes), "sizes-to-median": list(self.sizes.values())}
        return state

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state``."""
        self.norms = dict(zip(state["norms-of"], state["norms"], strict=True))
        self.sizes = dict(zip(state.get("sizes-of", ()), state.get("sizes-to-median", ()), strict=True))
        self.shrinkage = {index: (total, number) for index, total, number in state.get("norms-left", ())}


class Safeguards:
    """Bounds the sizes, weights and norms of a device's replies.

    Parameters
    ----------
    mode : str
        ``auto``: on in real time; ``on``; ``off``.
    in_real_time : callable
        Returns True if the run is in real time.

    Attributes
    ----------
    norms : UsualNorm
        The link of the chain that bounds norms, used if ``learns_norms``.
    buffers : UsualBuffers
        The bound of what clients report of buffers.
    """

    def __init__(self, mode: str, bounds: Bounds, in_real_time: Callable[[], bool]) -> None:
        self.mode, self.bounds = mode, bounds
        self._in_real_time = in_real_time
        self.norms = UsualNorm(self.bounds.norm_ratio)
        self.buffers = UsualBuffers(LEAST_NORMS)
        self._said: set[str] = set()

    @property
    def active(self) -> bool:
        """Whether the safeguards are on."""
        return self.mode == "on" or (self.mode == "auto" and self._in_real_time())

    @property
    def learns_norms(self) -> bool:
        """Whether updates are bounded by a multiple of the median norm."""
        return self.active and self.bounds.norm_ratio > 0

    def observe(self, local: LocalModel) -> None:
        """Record the norm of a client's update, and its buffers, before any update is bounded."""
        if self.learns_norms:
            self.norms.norms[local.client.index] = local.norm()
        if local.buffer_values is not None:
            self.buffers.observe(local.client.index, local.buffer_values - local.counter_origin)

    def needs_more_norms(self, num_clients: int, buffers: Buffers) -> bool:
        """Return True if updates must wait for each other, because too few are known to say what is usual."""
        missing = []
        if self.learns_norms:
            # Half of few clients are waited for: one of five that never answers shouldn't hold up the others.
            few = max(LEAST_NORMS, min(FIRST, num_clients // 2))
            missing.append(min(few, num_clients) - len(self.norms.norms))
        if self.active and len(buffers):
            missing.append(min(FIRST, num_clients) - len(self.buffers))
        return max(missing, default=0) > 0

    def furthest(
        self, clients: Sequence[Client], distances: Sequence[float], ratio: float | None = None
    ) -> list[float]:
        """Return the largest distances from their mean (n,) that the vectors that a method keeps of clients may have.

        Parameters
        ----------
        distances : sequence of float
            The vectors' distances from their mean (n,).
        ratio : float, optional
            The bound as a multiple of the median distance, in place of ``norm_ratio_bound``.
        """
        if not (self.active and self.bounds.memory_ratio and len(distances) >= LEAST_NORMS):
            return [math.inf] * len(clients)
        typical = (ratio or self.bounds.memory_ratio) * median(distances)
        return [typical / self.norms.share(client) for client in clients]

    @property
    def path_bound(self) -> float:
        """Upper bound of a client's path, as a multiple of the median (methods/shared/local_path.py); 0: no bound."""
        return PATHS if self.active else 0.0

    @property
    def max_weight(self) -> float:
        """Upper bound of the weight d_i of a contribution; 0: no bound."""
        return self.bounds.weight if self.active else 0.0

    def sizes(
        self, clients: Sequence[Client], said: Sequence[float], others: Iterable[Client] = ()
    ) -> Sequence[float]:
        """Return the bounded sizes n_i (n,), from the reported ones; 0 where a client hasn't reported a size.

        ``others`` are further clients whose sizes enter the median.
        """
        if not self.active:
            return said
        reported = {client.index: client.num_examples or 0 for client in others}
        known = list(
            {**reported, **{client.index: size for client, size in zip(clients, said, strict=True)}}.values()
        )
        capped = capped_sizes(said, self.bounds.size_ratio, self.bounds.examples, known).tolist()
        if known := [size for size in capped if size > 0]:
            typical = median(known)
            self.norms.sizes = {c.index: size / typical for c, size in zip(clients, capped, strict=True)}
        for client, size, counts in zip(clients, said, capped, strict=True):
            if counts < size:
                self._say_once(
                    f"{client} says it has {size} examples",
                    f"it counts with {counts:g} (size_ratio_bound, examples_bound)",
                )
        return capped  # type: ignore[no-any-return]

    def shrinkage(self, clients: Iterable[int]) -> Weights | None:
        """Return the mean factor (n,) by which the updates of clients, given by index, were shortened.

        None if no update was shortened. In the sum Σ d_i Δ_i a client counts with d_i times its factor.
        """
        if all(total == number for total, number in self.norms.shrinkage.values()):
            return None
        known = (self.norms.shrinkage.get(index, (1.0, 1)) for index in clients)
        return np.array([total / number for total, number in known])

    def weights(self, clients: Sequence[object], weights: Weights) -> Weights:
        """Return the weights d_i (n,), bounded by ``heaviest``."""
        if self.max_weight and (worst := weights.max(initial=0.0)) > self.max_weight:
            self._say_once(
                f"{clients[int(weights.argmax())]} is slow",
                f"its contributions would count {worst:.2f} times, and count {self.max_weight:g} times "
                "(arrival_weight_bound); the objective that is minimised is no longer quite the federated one",
            )
            return np.minimum(weights, self.max_weight)
        return weights

    def _say_once(self, what: str, then: str) -> None:
        """Log a warning once, instead of at every aggregation."""
        if what not in self._said:
            self._said.add(what)
            log.warning("%s: %s", what, then)

    def state(self) -> dict[str, Any]:
        """Return what a run goes on from."""
        return {**self.norms.state(), **self.buffers.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state``."""
        self.norms.restore(state)
        self.buffers.restore(state)


def moved_by(weight: float, update: Vector) -> float:
    """Return d_i ‖Δ_i‖: the distance by which an update (D,) of this weight moves a sum."""
    return weight * float(np.linalg.norm(update))


def clip_to_mean(vector: Vector, centre: Vector, most: float) -> Vector:
    """Return a vector (D,), moved to within ``most`` of a centre (D,) if it is further away."""
    offset = vector - centre
    distance = float(np.linalg.norm(offset))
    return centre + offset * (most / distance) if distance > most else vector


def bounded(weight: float, update: Vector, bound: float) -> Vector:
    """Return an update (D,), shortened where ``weight`` times its norm is above ``bound``; 0: no bound."""
    moves = moved_by(weight, update) if bound else 0.0
    return update * (bound / moves) if moves > bound else update
