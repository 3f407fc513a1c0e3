"""The chain of operations from a client's reply to the next global model, synchronous or asynchronous.

    check → bound → clip → on_client_model → sum or robust rule → noise → server optimizer

Up to on_client_model, the pipeline processes each reply separately, as its local model w_i and the model w̄ that the
client was sent; the sum or robust rule makes one update Δ of all replies. A local model stays in the bytes of its
reply until a link reads it whole; if only the sum reads it, ``WeightedSum.sum_blocks`` sums such replies together.
The links are small objects, composed by ``pipeline``::

    receive = pipeline(Bound(S), ModelCallback(on_client_model))
    local = check(client, reply, base)           # raises an ArraysMismatchError for an invalid reply
    receive(local)
    gathered.add(d_i, local.update())            # a WeightedSum or a RobustRule of strategies/updates/aggregation.py
    update = noise(gathered.result(...), ...)
    model = optimizer.step(model, update)        # strategies/updates/server_optimizer.py
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from math import inf
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from flwr.app import ArrayRecord, Message, MetricRecord
from numpy.typing import NDArray

from strategies.clients.roster import Client
from strategies.flower import messages
from strategies.flower.arrays import (
    CHUNK,
    SURELY_VALID,
    ArraysMismatchError,
    Layout,
    ModelView,
    Vector,
    check_values,
    chunks,
    clip_update,
    distance,
    sum_of_squares,
)
from strategies.flower.grids import Work
from strategies.updates.buffers import Buffers
from strategies.updates.compression import Compression, is_compressed


@dataclass
class LocalModel:
    """A local model w_i (D,) in the chain, and the model (D,) that its client was sent.

    Attributes
    ----------
    read : Vector or ModelView
        The model; a ``ModelView`` as long as nothing has asked for ``model``.
    bounded : bool
        Whether the norm of the update exceeded the bound.
    buffer_values : Vector, optional
        The buffers (B,) of the reply; ``read`` has those that were sent.
    counter_origin : Vector, or 0
        (B,): the counters as they were sent, 0 for other buffers.
    """

    client: Client
    read: Vector | ModelView
    base: NDArray[Any]
    bounded: bool = False
    buffer_values: Vector | None = None
    counter_origin: Vector | float = 0.0
    # ‖Δ_i‖² of a model that is in its reply, over its first ``_measured`` values.
    _square: float = 0.0
    _measured: int = 0
    _update: Vector | None = None

    @property
    def model(self) -> Vector:
        """The model w_i (D,), which links change in place; the first call copies it from its reply."""
        if isinstance(self.read, ModelView):
            self.read = self.read.to_vector()
        return self.read

    @property
    def in_reply(self) -> bool:
        """Whether the model is still in the bytes of its reply, as nothing has changed it."""
        return isinstance(self.read, ModelView)

    def chunk(self, place: slice, out: Vector) -> Vector:
        """Return a chunk of Δ_i = w_i − w̄ in ``out``, given its place in the vector (D,).

        A model that is in its reply is measured when its chunks are asked for the first time, in their order.
        """
        if self._update is not None:
            return self._update[place]
        delta, base = out[: place.stop - place.start], self.base[place]
        if not isinstance(self.read, ModelView):
            np.subtract(self.read[place], base, out=delta)
            return delta
        self.read.read(place, delta)
        delta -= base
        if place.start == self._measured:
            self._square, self._measured = sum_of_squares(delta, self._square), place.stop
        return delta

    @property
    def is_measured(self) -> bool:
        """Whether the norm of a model that is in its reply is known."""
        return self._measured == len(self.base)

    def norm(self) -> float:
        """Return ‖Δ_i‖ = ‖w_i − w̄‖; it isn't finite if a value isn't."""
        if not self.in_reply:
            return distance(self.model, self.base)
        if not self.is_measured:
            buffer = np.empty(CHUNK)
            with np.errstate(over="ignore", invalid="ignore"):
                for place in chunks(len(self.base)):
                    self.chunk(place, buffer)
        return math.sqrt(self._square)

    def moves(self) -> bool:
        """Return True if a value of Δ_i isn't 0."""
        buffer = np.empty(CHUNK)
        return any(self.chunk(place, buffer).any() for place in chunks(len(self.base)))

    def update(self) -> Vector:
        """Return Δ_i = w_i − w̄ (D,), computed in place: ``model`` is overwritten; the same array each time."""
        if self._update is not None:
            return self._update
        if isinstance(self.read, ModelView):
            view, self.read = self.read, np.empty(len(self.base))
            for place in chunks(len(self.base)):
                view.read(place, self.read[place])
                self.read[place] -= self.base[place]
        else:
            self.read -= self.base
        self._update = self.read
        return self._update


UpdateTransform = Callable[[LocalModel], None]


def pipeline(*transforms: UpdateTransform | None) -> UpdateTransform:
    """Return a link that applies several links in order; None is skipped."""
    there = [transform for transform in transforms if transform is not None]

    def through(local: LocalModel) -> None:
        for transform in there:
            transform(local)

    return through


class MissingWeightError(ArraysMismatchError):
    """A reply has no weight: neither the reply nor the client's description holds the number of examples."""


@dataclass(frozen=True)
class Check:
    """Validates a reply and reads its local model.

    Parameters
    ----------
    layout : Layout
        Layout of the model.
    arrays_key, weight_key : str
        Names of the record of arrays, and of the metric that holds a client's weight.
    requires_num_examples : bool
        Whether a reply without a weight is refused, unless the client has reported its weight before.
    most_bytes : callable
        Returns the most bytes that a reply may have.
    buffers : Buffers, optional
        The buffers, which are separated from the model.
    compression : Compression, optional
        The compression that clients are asked to apply to their updates.
    whole : callable
        Called for each valid reply that isn't compressed although compression was requested.
    more : callable, optional
        Called with a client and the number of examples in its reply, if that is above the client's description, by
        which it counts. None: such a reply is refused.
    measures : bool
        Whether the norms of updates will be asked for.
    converts : callable
        Called with a client and a text where its arrays are of another precision than the model's.
    """

    layout: Layout
    arrays_key: str = messages.ARRAYS
    weight_key: str = messages.NUM_EXAMPLES
    requires_num_examples: bool = False
    most_bytes: Callable[[], float] = lambda: inf
    buffers: Buffers | None = None
    compression: Compression | None = None
    whole: Callable[[], None] = lambda: None
    more: Callable[[Client, float], None] | None = None
    measures: bool = False
    converts: Callable[[Client, str], None] = lambda client, dtypes: None

    def __call__(self, client: Client, reply: Message | Work | None, base: NDArray[Any]) -> LocalModel:
        """Return the local model of a valid reply, or of a task that was done without messages.

        Raises
        ------
        ArraysMismatchError
            If the reply is invalid, with the reason.
        """
        local = self.read(client, reply, base)
        self.check_values(local)
        return local

    def read(self, client: Client, reply: Message | Work | None, base: NDArray[Any]) -> LocalModel:
        """Return the local model of a reply that is valid but for the values, which ``check_values`` checks.

        Raises
        ------
        ArraysMismatchError
            If the reply is invalid, with the reason.
        """
        if isinstance(reply, Work):
            return _done(client, reply, base)
        arrays = self._arrays_of(client, reply)
        if is_compressed(arrays):
            local = LocalModel(client, self._decompressed(arrays, base), base)
        else:
            view = ModelView(self.layout, self.layout.flat(arrays))
            if dtypes := view.converted():
                self.converts(client, dtypes)
            local = LocalModel(client, view, base)
        if self.buffers is not None:
            local.buffer_values = self.buffers.take_out(local.read, base)
            local.counter_origin = self.buffers.counter_origin(base)
        return local

    def check_values(self, local: LocalModel, base_norm: float | None = None) -> None:
        """Check the values of a model that ``read`` returned; ``base_norm``: ‖w̄‖, if it is known.

        Raises
        ------
        ArraysMismatchError
            If a value isn't finite, the model is too large, or a variance is negative.
        """
        if isinstance(model := local.read, ModelView):
            if not self._upper_bound(local, model, base_norm) <= SURELY_VALID:
                exact = model.to_vector()
                if self.buffers is not None and local.buffer_values is not None:
                    exact[self.buffers.positions] = local.buffer_values
                check_values(exact)
            if self.compression is not None:
                self.whole()
        if self.buffers is not None:
            self.buffers.check(local.buffer_values)

    def _upper_bound(self, local: LocalModel, model: ModelView, base_norm: float | None) -> float:
        """Return an upper bound of ‖w_i‖², but for rounding; ‖w_i‖ ≤ ‖w̄‖ + ‖Δ_i‖ if ‖Δ_i‖ is known or of use."""
        with np.errstate(over="ignore", invalid="ignore"):
            if self.measures or local.is_measured:
                base_norm = math.sqrt(sum_of_squares(local.base)) if base_norm is None else base_norm
                norm = base_norm + local.norm()
                square = norm * norm  # infinity, where ** raises an OverflowError
            else:
                square = model.square()
            return square if local.buffer_values is None else sum_of_squares(local.buffer_values, square)

    def _arrays_of(self, client: Client, reply: Message | None) -> ArrayRecord:
        """Return the arrays of a reply that is valid but for what is in them."""
        if reply is None:
            raise ArraysMismatchError(messages.NO_REPLY)
        if reply.has_error():
            raise ArraysMismatchError(messages.reason_of(reply))
        self._check_bytes(reply)
        if (arrays := messages.model_of(reply, self.arrays_key)) is None:
            raise ArraysMismatchError(f"its reply has no record {self.arrays_key!r}")
        self._check_size(client, reply)
        return arrays

    def _check_bytes(self, reply: Message) -> None:
        """Refuse a reply that is larger than what was asked for, before any of it is read."""
        if (size := messages.size_of(reply)) > (most := self.most_bytes()):
            raise ArraysMismatchError(
                f"its reply takes {size} bytes; allowed are {most}, for the model, what was sent beside it, and 1 MiB"
            )

    def _decompressed(self, arrays: ArrayRecord, base: NDArray[Any]) -> Vector:
        """Return the model (D,) of a compressed update; this is the only place where one is decompressed."""
        if self.compression is None:
            raise ArraysMismatchError("its update is compressed, which it wasn't asked for")
        return self.compression.read(arrays, base)

    def _check_size(self, client: Client, reply: Message) -> None:
        """Refuse a reply whose number of examples is invalid or missing, or above the description if that matters."""
        try:
            said = messages.weight_of(messages.metrics_of(reply), self.weight_key, or_zero=True)
        except ValueError as error:
            raise ArraysMismatchError(str(error)) from None
        if said is None and client.num_examples is None and self.requires_num_examples:
            raise MissingWeightError(
                f"its reply has no metric {self.weight_key!r}, which says how much it counts (weighted_by_key)"
            )
        if said is not None and client.described and said > (client.num_examples or 0):
            if self.more is None:
                raise ArraysMismatchError(
                    f"{self.weight_key} = {said}: it described itself with {client.num_examples}"
                )
            self.more(client, said)


def fault_of(reply: Message | Work | None) -> str:
    """Return the outcome of a task with an invalid reply: ``LATE``, ``LOST``, ``FAILED`` or ``REFUSED``."""
    if isinstance(reply, Work):
        return messages.FAILED if reply.reason else messages.REFUSED
    return messages.fault_of(reply)


def _done(client: Client, work: Work, base: NDArray[Any]) -> LocalModel:
    if work.reason:
        raise ArraysMismatchError(work.reason)
    check_values(work.model)
    return LocalModel(client, work.model, base)


@dataclass(frozen=True)
class Bound:
    """Shortens an update to the norm S, and marks it as bounded; the change of the running statistics as well.

    Trained arrays and running statistics are bounded each, so that a jump of the statistics doesn't shorten the rest.
    """

    norm: float
    buffers: Buffers | None = None

    def __call__(self, local: LocalModel) -> None:
        """Change the model and the buffers in place."""
        local.bounded = clip_update(local.model, local.base, self.norm)
        if self.buffers is not None and local.buffer_values is not None:
            local.bounded |= self.buffers.shorten(local.buffer_values, local.base, self.norm)


@dataclass(frozen=True)
class Clip:
    """Clips an update to the norm S for differential privacy, without reporting which updates were longer."""

    norm: float

    def __call__(self, local: LocalModel) -> None:
        """Change the model in place, and remove the mark of an earlier bound, which would leak the norm."""
        clip_update(local.model, local.base, self.norm)
        local.bounded = False


@dataclass(frozen=True)
class ModelCallback:
    """Passes the model to a listener, which must not change it."""

    listener: Callable[[Client, Vector], None]

    def __call__(self, local: LocalModel) -> None:
        """Call the listener with the client and its model (D,)."""
        self.listener(local.client, local.model)


@dataclass(frozen=True)
class Noise:
    """Adds Gaussian noise of standard deviation z S d to an update; d is the sensitivity to one update of norm 1.

    Two rounds are neighbours if they are equal except that one client's update is 0 in one of them; replacing an
    update by another one would change the sum by up to 2 S d.
    """

    multiplier: float
    norm: float

    def deviation(self, sensitivity: float) -> float:
        """Return the standard deviation z S d."""
        return self.multiplier * (self.norm * sensitivity)

    def __call__(self, update: Vector, sensitivity: float, rng: np.random.Generator) -> None:
        """Change the update (D,) in place."""
        update += rng.normal(0.0, self.deviation(sensitivity), len(update))


_SUMMAND = "_summand"


class _Update:
    """The field ``update`` of a contribution, which can be given as the local model whose update it is."""

    def __get__(self, contribution: "Contribution | None", kind: type) -> Vector:
        if contribution is None:
            raise AttributeError  # the field has no default
        given = contribution.summand
        return given.update() if isinstance(given, LocalModel) else given

    def __set__(self, contribution: "Contribution", given: Vector | LocalModel) -> None:
        contribution.__dict__[_SUMMAND] = given


@dataclass(frozen=True)
class Contribution:
    """A client's valid update that has arrived, with its metrics and records.

    Attributes
    ----------
    client : Client
        The client; its index in the federation is ``client.index``.
    update : Vector
        Δ_i (D,): the trained model minus the model that was sent, after bound and clipping. It is read from the reply
        when it is asked for (``summand``).
    base : array (D,)
        The model that the client was sent.
    version, staleness : int
        The number of the aggregation that made ``base``, and the number of aggregations since; 0 in a round.
    metrics : MetricRecord
        Metrics of the reply, such as ``num-steps`` (strategies/flower/messages.py).
    records : mapping of str to record
        The records of the reply other than the model and the metrics, by name.
    num_bytes : int
        Size of all arrays of the reply.
    buffer_values : Vector, optional
        The buffers (B,) (strategies/updates/buffers.py); in ``update`` their values are 0.
    counter_origin : Vector, or 0
        The counters among the buffers as they were sent, and 0 for the other buffers, (B,).
    """

    client: Client
    if TYPE_CHECKING:
        update: Vector
    else:
        update: Vector = _Update()
    base: NDArray[Any]
    version: int
    staleness: int
    metrics: MetricRecord
    records: Mapping[str, messages.RecordType] = field(default_factory=dict)
    num_bytes: int = 0
    buffer_values: Vector | None = None
    counter_origin: Vector | float = 0.0

    def aged(self, aggregations: int) -> "Contribution":
        """Return the contribution with its staleness at present: others may have been aggregated while it waited."""
        staleness = aggregations - self.version
        if staleness == self.staleness:
            return self
        return replace(self, staleness=staleness, update=cast("Vector", self.summand))

    @property
    def summand(self) -> Vector | LocalModel:
        """The update (D,), or the model whose update it is, which may still be in its reply."""
        given: Vector | LocalModel = self.__dict__[_SUMMAND]
        return given

    @property
    def model(self) -> Vector:
        """The client's trained model w_i (D,)."""
        return np.asarray(self.base + self.update)

    @classmethod
    def of(
        cls,
        local: LocalModel,
        reply: Message | Work,
        version: int,
        staleness: int,
        key: str = messages.ARRAYS,
    ) -> "Contribution":
        """Return the contribution of a local model that has been through the chain."""
        update = cast("Vector", local) if local.in_reply else local.update()
        base, when = local.base, (version, staleness)
        if isinstance(reply, Work):
            return cls(local.client, update, base, *when, reply.metrics, {}, reply.num_bytes)
        return cls(
            local.client,
            update,
            base,
            *when,
            messages.metrics_of(reply),
            messages.extra_records_of(reply, key),
            messages.total_bytes(reply),
            local.buffer_values,
            local.counter_origin,
        )

    @property
    def arrays(self) -> Mapping[str, ArrayRecord]:
        """The arrays among ``records``."""
        return {name: record for name, record in self.records.items() if isinstance(record, ArrayRecord)}
