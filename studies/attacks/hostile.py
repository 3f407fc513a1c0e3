"""Hostile clients: they train as the others do, and something is wrong with their labels or with what they send.

Each attack changes what real clients of the vectorized engine do: the labels of their rows before they train, or
their reply after that. The strategy sees messages only, as on devices.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from flwr.app import ConfigRecord, Error, Message, MetricRecord, RecordDict

from fedapp import client_app, federation
from fedapp.config import RunConfig
from fedapp.data.moments import Moments
from fedapp.engine.vectorized import VectorizedGrid
from fedapp.federation.rows import AllRows, Rows, all_rows
from fedapp.training.trainer import Trainer
from strategies import streams
from strategies.flower import messages
from strategies.flower.arrays import ArraysMismatchError, Layout, Vector
from strategies.flower.grids import Description, WorkRequest
from strategies.flower.internals import MESSAGE_UNAVAILABLE
from strategies.updates.buffers import UNTRAINED, Buffers
from strategies.updates.sums import SumRequest

FALSE_SIZE = 10**12  # examples
FALSE_STATISTICS = 1e6
DRIFT = 2.0  # length of a step of a drift, as a multiple of the client's honest update
RANDOM, CONSTANT = 1.0, 1.0  # deviation of each random value, and every value of a constant model


@dataclass
class Lie:
    """The material of a hostile client's reply: the model that it was sent, and the one that it trained.

    Attributes
    ----------
    layout : Layout
        Layout of the model.
    buffers : Buffers
        Positions of running statistics and counters in the model.
    base, model : Vector
        The model that was sent, and the trained one (D,).
    first : Vector
        Δ (D,) of this client's first task.
    rng : numpy.random.Generator
        Generator of this client and task.
    """

    layout: Layout
    buffers: Buffers
    base: Vector
    model: Vector
    first: Vector
    rng: np.random.Generator

    @property
    def update(self) -> Vector:
        """Δ (D,), without the running statistics."""
        update = self.model - self.base
        update[self.buffers.positions] = 0.0
        return update

    def sent(self, update: Vector) -> Vector:
        """Return the model (D,) with another update (D,); running statistics and counters are the honest ones."""
        model = self.base + update
        model[self.buffers.positions] = self.model[self.buffers.positions]
        return model


def _reversed(times: float) -> Callable[[Lie], Vector]:
    return lambda lie: lie.sent(-times * lie.update)


def _random(lie: Lie) -> Vector:
    return lie.sent(lie.rng.normal(0.0, RANDOM, len(lie.base)))


def _constant(lie: Lie) -> Vector:
    return lie.sent(CONSTANT - lie.base)


def _drift(lie: Lie) -> Vector:
    """Go on against the first update in every task, a little further than an honest client goes."""
    length = np.linalg.norm(lie.update)
    return lie.sent(-DRIFT * length / max(float(np.linalg.norm(lie.first)), 1e-12) * lie.first)


def _statistics(lie: Lie) -> Vector:
    model = lie.model.copy()
    floats = lie.buffers.positions[~lie.buffers.counters]
    model[floats] = FALSE_STATISTICS
    return model


def _honest(lie: Lie) -> Vector:
    return lie.model


@dataclass(frozen=True)
class Attack:
    """An attack: the replies, labels and sizes of hostile clients.

    Attributes
    ----------
    words : str
        Name of the attack in the table and the page.
    sends : callable, optional
        Returns the model (D,) that is sent in place of the trained one; None: there is no answer at all.
    flips : bool
        Whether hostile clients train on flipped labels: K − 1 − y of K classes.
    size : int
        Number of examples that hostile clients report; 0: the true one.
    statistics : bool
        Whether the attack is on running statistics, and so on a model that has some.
    """

    words: str
    sends: Callable[[Lie], Vector] | None = _honest
    flips: bool = False
    size: int = 0
    statistics: bool = False


HONEST = "honest"

ATTACKS: Mapping[str, Attack] = {
    "reversed-1": Attack("update reversed", _reversed(1.0)),
    "reversed-5": Attack("update reversed, 5 times as long", _reversed(5.0)),
    "reversed-10": Attack("update reversed, 10 times as long", _reversed(10.0)),
    "random": Attack("random update, 1 in each value", _random),
    "constant": Attack("a model of ones", _constant),
    "label-flip": Attack("labels flipped", flips=True),
    "sizes": Attack("10^12 examples, update reversed, 10 times as long", _reversed(10.0), size=FALSE_SIZE),
    "statistics": Attack("running statistics of 10^6", _statistics, statistics=True),
    "drift": Attack("always against the first update, twice as long", _drift),
    "silent": Attack("never answers", None),
}


class HostileGrid(VectorizedGrid):
    """The vectorized engine with some hostile clients; a strategy sees messages only.

    Parameters
    ----------
    num_supernodes : int
        Number of nodes; node i + 1 has partition i.
    attack : Attack, optional
        The attack; None: hostile clients behave as the others do.
    hostile : sequence of int
        Partitions of the hostile clients.
    seed : int
        Seed of the hostile clients' random values.
    """

    def __init__(self, num_supernodes: int, attack: Attack | None, hostile: Sequence[int], seed: int) -> None:
        self.attack, self.hostile, self.seed = attack or Attack(""), frozenset(hostile), seed
        super().__init__(client_app.app, num_supernodes, Trainer(workers=1), self._rows)
        self._asked: dict[str, Message] = {}  # training requests to hostile clients, by message id
        self._first: dict[int, Vector] = {}  # the first update of hostile clients, by node id
        self._tasks = 0

    def can_sum(self, request: SumRequest) -> bool:
        """Return False: the updates of hostile clients are in messages."""
        return False

    def can_work(self, request: WorkRequest) -> bool:
        """Return False: the updates of hostile clients are in messages."""
        return False

    def descriptions(self, node_ids: Sequence[int], config: ConfigRecord) -> Mapping[int, Description]:
        """Return what nodes say of themselves: of hostile ones, a false size."""
        told = super().descriptions(node_ids, config)
        if not self.attack.size:
            return told
        return {
            node: {**each, messages.NUM_EXAMPLES: self.attack.size} if self._lies(node) else each
            for node, each in told.items()
        }

    def push_messages(self, messages_: Iterable[Message]) -> Iterable[str]:
        """Queue messages; note the training requests to hostile clients."""
        pushed = list(messages_)
        # One by one, so that all that wait are trained in one stack: the engine's blocks are for many clients.
        ids = [name for message in pushed for name in super(HostileGrid, self).push_messages([message])]
        for message in pushed:
            if message.metadata.message_type == messages.TRAIN and self._lies(message.metadata.dst_node_id):
                self._asked[message.metadata.message_id] = message
        return ids

    def pull_messages(
        self, message_ids: Iterable[str] | None = None, *, reply_to_message_ids: Iterable[str] | None = None
    ) -> Iterable[Message]:
        """Return the replies that are there, those of hostile clients as they send them."""
        pulled = super().pull_messages(message_ids, reply_to_message_ids=reply_to_message_ids)
        return [self._sent(reply) for reply in pulled]

    def _lies(self, node_id: int) -> bool:
        return node_id - 1 in self.hostile

    def _sent(self, reply: Message) -> Message:
        request = self._asked.pop(reply.metadata.reply_to_message_id, None)
        if request is None or reply.has_error():
            return reply
        if self.attack.sends is None:  # the SuperLink answers in its place when the request has expired
            error = Error(MESSAGE_UNAVAILABLE, "the message has expired")
            return Message(error, reply_to=request)
        sent, trained = (messages.arrays_of(each) for each in (request, reply))
        assert sent is not None
        assert trained is not None
        layout, node = Layout.of(sent), request.metadata.dst_node_id
        try:
            model = layout.to_vector(trained)
        except ArraysMismatchError:  # the attack has led to a model on which no client can train
            return reply
        self._tasks += 1
        lie = Lie(
            layout,
            Buffers.of(layout, UNTRAINED),
            layout.to_vector(sent),
            model,
            np.empty(0),
            streams.generator(self.seed, "hostile-update", node, self._tasks),
        )
        lie.first = self._first.setdefault(node, lie.update)
        content = RecordDict({**reply.content, messages.ARRAYS: layout.to_record(self.attack.sends(lie))})
        if self.attack.size:
            told = dict(messages.metrics_of(reply)) | {messages.NUM_EXAMPLES: self.attack.size}
            content[messages.METRICS] = MetricRecord(told)
        return Message(content, reply_to=request)

    def _rows(
        self, config: RunConfig, num_clients: int, device: torch.device, moments: Moments | None
    ) -> Rows:
        """Return all rows; hostile clients' labels may be flipped."""
        rows = all_rows(config, num_clients, device, moments)
        if not self.attack.flips:
            return rows
        offsets = federation.partition_of(config, num_clients).client_offsets
        labels, last = rows.y.clone(), int(rows.y.max())
        for place in self.hostile:
            own = slice(int(offsets[place]), int(offsets[place + 1]))
            labels[own] = last - labels[own]
        return AllRows(rows.x, labels)
