"""What becomes of a client's update, in rounds and without: one chain from the reply to the next global model.

    check → bound → clip → witness → sum or robust rule → noise → server optimizer

Up to the witness each reply goes through the chain by itself, as its local model w_i and the model w̄ it started from;
then there is one update Δ for all. The links are small objects, composed by ``chain``::

    receive = chain(Bound(S), Tell(witness))
    local = check(client, reply, base)        # an ArraysMismatchError says what is wrong with the reply
    receive(local)
    gathered.add(d_i, local.update())         # a WeightedSum or a RobustRule of strategies/updates/aggregation.py
    update = noise(gathered.result(...), ...)
    model = optimizer.step(model, update)     # strategies/updates/server_optimizer.py
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, Message, MetricRecord
from numpy.typing import NDArray

from strategies.clients.roster import Client
from strategies.flower import messages
from strategies.flower.arrays import ArraysMismatchError, Layout, Vector, check_values, clip_update
from strategies.flower.grids import Work
from strategies.updates.buffers import Untrained
from strategies.updates.compression import Compression, is_compressed


@dataclass
class Local:
    """A valid local model w_i (D,) on its way through the chain, and the model (D,) it started from."""

    client: Client
    model: Vector
    base: NDArray[Any]
    bounded: bool = False  # whether its update was longer than allowed
    untrained: Vector | None = None  # values (B,) that aren't trained; in the model stand those it was sent

    def update(self) -> Vector:
        """Return Δ_i = w_i − w̄ (D,); the model's memory is used for it."""
        self.model -= self.base
        return self.model


Link = Callable[[Local], None]


def chain(*links: Link | None) -> Link:
    """Return the links one after the other; those that are None are left out."""
    there = [link for link in links if link is not None]

    def through(local: Local) -> None:
        for link in there:
            link(local)

    return through


class UnweighedError(ArraysMismatchError):
    """A client doesn't say how much it counts."""


@dataclass(frozen=True)
class Check:
    """Reads the local model from a reply.

    Parameters
    ----------
    layout : Layout
        The model's.
    arrays_key, weight_key : str
        Names of the record of arrays, and of the metric that says how much a client counts.
    must_weigh : bool
        Whether a client that has never said that is left out.
    untrained : Untrained, optional
        What is set apart.
    compression : Compression, optional
        What clients are asked to compress their updates by.
    whole : callable
        Told where one sends a valid model as it is all the same.
    """

    layout: Layout
    arrays_key: str = messages.ARRAYS
    weight_key: str = messages.NUM_EXAMPLES
    must_weigh: bool = False
    untrained: Untrained | None = None
    compression: Compression | None = None
    whole: Callable[[], None] = lambda: None

    def __call__(self, client: Client, reply: Message | Work | None, base: NDArray[Any]) -> Local:
        """Return the model of a valid reply, or of a task that was done without messages.

        Raises
        ------
        ArraysMismatchError
            With the reason, for any other.
        """
        if reply is None:
            raise ArraysMismatchError(messages.NO_REPLY)
        if isinstance(reply, Work):
            return _done(client, reply, base)
        if reply.has_error():
            raise ArraysMismatchError(messages.reason_of(reply))
        if (arrays := messages.model_of(reply, self.arrays_key)) is None:
            raise ArraysMismatchError(f"its reply has no record {self.arrays_key!r}")
        self._check_size(client, reply)
        local = Local(client, self._read(arrays, base), base)
        if self.untrained is not None:
            local.untrained = self.untrained.take_out(local.model, base)
        return local

    def _read(self, arrays: ArrayRecord, base: NDArray[Any]) -> Vector:
        """Return the model (D,): here, and nowhere else, a compressed update becomes one again."""
        if is_compressed(arrays):
            if self.compression is None:
                raise ArraysMismatchError("its update is compressed, which it wasn't asked for")
            return self.compression.read(arrays, base)
        model = self.layout.to_vector(arrays)
        if self.compression is not None:
            self.whole()
        return model

    def _check_size(self, client: Client, reply: Message) -> None:
        """What a client says of its size must be a size, and no more than it said before."""
        try:
            said = messages.weight_of(messages.metrics_of(reply), self.weight_key)
        except ValueError as error:
            raise ArraysMismatchError(str(error)) from None
        if said is None and client.num_examples is None and self.must_weigh:
            raise UnweighedError(
                f"its reply has no metric {self.weight_key!r}, which says how much it counts (weighted_by_key)"
            )
        if said is not None and client.described and said > (client.num_examples or 0):
            raise ArraysMismatchError(
                f"{self.weight_key} = {said}: it described itself with {client.num_examples}"
            )


def fault_of(reply: Message | Work | None) -> str:
    """Return of which kind a reply is that doesn't count: ``LATE``, ``FAILED`` or ``REFUSED``."""
    if isinstance(reply, Work):
        return messages.FAILED if reply.reason else messages.REFUSED
    return messages.fault_of(reply)


def _done(client: Client, work: Work, base: NDArray[Any]) -> Local:
    if work.reason:
        raise ArraysMismatchError(work.reason)
    check_values(work.model)
    return Local(client, work.model, base)


@dataclass(frozen=True)
class Bound:
    """Shortens an update to the norm S, and marks it."""

    norm: float

    def __call__(self, local: Local) -> None:
        """Change the model in place."""
        local.bounded = clip_update(local.model, local.base, self.norm)


@dataclass(frozen=True)
class Clip:
    """Shortens an update to the norm S, as differential privacy has it: nobody is told whose was longer."""

    norm: float

    def __call__(self, local: Local) -> None:
        """Change the model in place; what another bound has marked is told no more either."""
        clip_update(local.model, local.base, self.norm)
        local.bounded = False


@dataclass(frozen=True)
class Tell:
    """Lends the model to somebody who only looks."""

    listener: Callable[[Client, Vector], None]

    def __call__(self, local: Local) -> None:
        """Call the listener."""
        self.listener(local.client, local.model)


@dataclass(frozen=True)
class Noise:
    """Adds Gaussian noise of deviation z S d to an update, d the most that one update of norm 1 moves it.

    The neighbour of a round is the same one with a client's update zero; another update in its place moves 2 S d.
    """

    multiplier: float
    norm: float

    def __call__(self, update: Vector, sensitivity: float, rng: np.random.Generator) -> None:
        """Change the update (D,) in place."""
        update += rng.normal(0.0, self.multiplier * (self.norm * sensitivity), len(update))


@dataclass(frozen=True)
class Contribution:
    """A client's work that has arrived.

    Attributes
    ----------
    client : Client
        Its index in the federation is ``client.index``.
    update : Vector
        Δ_i (D,): its trained model less the model it was sent, after bound and clipping.
    base : array (D,)
        The model it was sent.
    version, staleness : int
        The aggregation that made that model, and how many there have been since; in rounds the latter is 0, but for
        late work (``late = "next"``).
    metrics : MetricRecord
        Of its reply, such as ``num-steps`` (strategies/flower/messages.py).
    records : mapping of str to record
        What came beside the model and the metrics, by record name.
    num_bytes : int
        Size of all arrays of the reply.
    untrained : Vector, optional
        Values (B,) that aren't trained (strategies/updates/buffers.py); in ``update`` they are 0.
    """

    client: Client
    update: Vector
    base: NDArray[Any]
    version: int
    staleness: int
    metrics: MetricRecord
    records: Mapping[str, messages.RecordType]
    num_bytes: int
    untrained: Vector | None = None

    @property
    def model(self) -> Vector:
        """The client's trained model w_i (D,)."""
        return np.asarray(self.base + self.update)

    @classmethod
    def of(
        cls, local: Local, reply: Message | Work, version: int, staleness: int, key: str = messages.ARRAYS
    ) -> "Contribution":
        """Return the contribution of a local model that has been through the chain."""
        update, base, when = local.update(), local.base, (version, staleness)
        if isinstance(reply, Work):
            return cls(local.client, update, base, *when, reply.metrics, {}, reply.num_bytes)
        return cls(
            local.client,
            update,
            base,
            *when,
            messages.metrics_of(reply),
            messages.beside_the_model(reply, key),
            messages.total_bytes(reply),
            local.untrained,
        )

    @property
    def arrays(self) -> Mapping[str, ArrayRecord]:
        """The arrays among ``records``."""
        return {name: record for name, record in self.records.items() if isinstance(record, ArrayRecord)}
