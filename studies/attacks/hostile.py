"""Hostile clients: they train as the others do, and something is wrong with their labels or with what they send.

Each attack changes what real clients of the vectorized engine do: the labels of their rows before they train, or
their reply after that. The strategy sees messages only, as on devices.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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
AT_BOUND = 1.5  # length of an update, as a multiple of an honest one, that the bound of norms lets pass
ALIE = 1.5  # standard deviations (Baruch, Baruch & Goldberg 2019)
KNOWN = 5  # updates of colluders that each of them knows
PATCH, TARGET, POISONED = 3, 0, 2  # side of a backdoor's patch, its class, and every which picture has it
FROM, TO = 3, 8  # classes: pictures of the first are called the second
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
    moved : Vector
        How far (D,) the global model has moved since this client was last sent it; 0 at first.
    known : sequence of Vector
        Δ (D,) of the last tasks that hostile clients were given, this one included.
    rng : numpy.random.Generator
        Generator of this client and task.
    """

    layout: Layout
    buffers: Buffers
    base: Vector
    model: Vector
    first: Vector
    rng: np.random.Generator
    moved: Vector | float = 0.0
    known: Sequence[Vector] = ()

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


def _against_last_move(lie: Lie) -> Vector:
    """Go against where the global model went last, as far as the bound of norms lets pass."""
    against: Vector = -lie.update if not np.any(lie.moved) else -np.asarray(lie.moved)
    return lie.sent(_along(against, AT_BOUND * _length(lie)))


def _colluding(lie: Lie) -> Vector:
    """Go against the mean of the colluders' updates, as far as the bound of norms lets pass."""
    return lie.sent(_along(-np.mean(lie.known, axis=0), AT_BOUND * _length(lie)))


def _little_enough(lie: Lie) -> Vector:
    """A little is enough: the mean of the known updates minus 1.5 of their standard deviations in each value."""
    return lie.sent(np.mean(lie.known, axis=0) - ALIE * np.std(lie.known, axis=0))


def _min_max(lie: Lie) -> Vector:
    """Go against the mean of the known updates as far as no known one is further from it than two of them are."""
    known, mean = np.array(lie.known), np.mean(lie.known, axis=0)
    widest = max(float(np.linalg.norm(known - each, axis=1).max()) for each in known)
    gamma, step = 0.0, 10.0
    while step > 0.01:
        if np.linalg.norm(known - _along(-mean, gamma + step) - mean, axis=1).max() <= widest:
            gamma += step
        else:
            step /= 2
    return lie.sent(mean + _along(-mean, gamma))


def _boosted(lie: Lie) -> Vector:
    """Send the update of the attacker's own aim as long as the bound of norms lets pass."""
    return lie.sent(_along(lie.update, AT_BOUND * _length(lie)))


def _length(lie: Lie) -> float:
    return float(np.linalg.norm(lie.update))


def _along(direction: Vector, length: float) -> Vector:
    """Return the vector (D,) of this direction and length."""
    return direction * (length / max(float(np.linalg.norm(direction)), 1e-12))


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
    poisons : callable, optional
        Changes the pictures (n, …) and labels (n,) of a hostile client in place, before it trains.
    times_size : int
        What hostile clients' numbers of examples are multiplied by when they report them.
    size : int
        Number of examples that hostile clients report; 0: the true one.
    statistics : bool
        Whether the attack is on running statistics, and so on a model that has some.
    """

    words: str
    sends: Callable[[Lie], Vector] | None = _honest
    poisons: Callable[[torch.Tensor, torch.Tensor], None] | None = None
    times_size: int = 1
    size: int = 0
    statistics: bool = False


def _flip(x: torch.Tensor, y: torch.Tensor) -> None:
    """Call class y of K classes K − 1 − y."""
    y[:] = 9 - y


def _patch(x: torch.Tensor, y: torch.Tensor) -> None:
    """Put a patch into every other picture, and say that it is of the target class."""
    patched(x)[::POISONED] = 1.0
    y[::POISONED] = TARGET


def patched(x: torch.Tensor) -> torch.Tensor:
    """Return the view of the pictures' (n, …, H, W) values where a backdoor's patch is."""
    return x[..., :PATCH, :PATCH]


def _call_one_class_another(x: torch.Tensor, y: torch.Tensor) -> None:
    y[y == FROM] = TO


HONEST = "honest"

ATTACKS: Mapping[str, Attack] = {
    "reversed-1": Attack("update reversed", _reversed(1.0)),
    "reversed-5": Attack("update reversed, 5 times as long", _reversed(5.0)),
    "reversed-10": Attack("update reversed, 10 times as long", _reversed(10.0)),
    "random": Attack("random update, 1 in each value", _random),
    "constant": Attack("a model of ones", _constant),
    "label-flip": Attack("labels flipped", poisons=_flip),
    "sizes": Attack("10^12 examples, update reversed, 10 times as long", _reversed(10.0), size=FALSE_SIZE),
    "statistics": Attack("running statistics of 10^6", _statistics, statistics=True),
    "drift": Attack("always against the first update, twice as long", _drift),
    "silent": Attack("never answers", None),
}

#: Attacks that know the bounds, or aim at a few inputs (studies/attacks/stronger.py).
STRONGER: Mapping[str, Attack] = {
    "last-move": Attack("against the global model's last move, at the bound", _against_last_move),
    "double-size": Attack("update reversed, at the bound, size doubled", _colluding, times_size=2),
    "colluders": Attack("against the colluders' mean, at the bound", _colluding),
    "double-colluders": Attack("likewise, sizes doubled", _colluding, times_size=2),
    "alie": Attack("the colluders' mean minus 1.5 deviations", _little_enough),
    "min-max": Attack("as far against the mean as two updates are apart", _min_max),
    "backdoor": Attack("a patch of 3x3 is class 0, at the bound", _boosted, poisons=_patch),
    "one-class": Attack("class 3 is called 8, at the bound", _boosted, poisons=_call_one_class_another),
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
        self._sent_last: dict[int, Vector] = {}  # the model that they were last sent, by node id
        self._updates: deque[Vector] = deque(maxlen=KNOWN)
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
        return {
            node: {**each, messages.NUM_EXAMPLES: size}
            if self._lies(node) and (size := self._false_size(each))
            else each
            for node, each in told.items()
        }

    def _false_size(self, told: Mapping[str, Any]) -> int:
        """Return the number of examples that a hostile client says it has; 0: the true one."""
        if self.attack.times_size == 1:
            return self.attack.size
        return int(told[messages.NUM_EXAMPLES]) * self.attack.times_size

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
        lie.moved = lie.base - self._sent_last.get(node, lie.base)
        self._sent_last[node] = lie.base
        self._updates.append(lie.update)
        lie.known = list(self._updates)
        content = RecordDict({**reply.content, messages.ARRAYS: layout.to_record(self.attack.sends(lie))})
        metrics = dict(messages.metrics_of(reply))
        if size := self._false_size(metrics):
            told = metrics | {messages.NUM_EXAMPLES: size}
            content[messages.METRICS] = MetricRecord(told)
        return Message(content, reply_to=request)

    def _rows(
        self, config: RunConfig, num_clients: int, device: torch.device, moments: Moments | None
    ) -> Rows:
        """Return all rows; those of hostile clients may be poisoned."""
        rows = all_rows(config, num_clients, device, moments)
        if self.attack.poisons is None:
            return rows
        offsets = federation.partition_of(config, num_clients).client_offsets
        x, y = rows.x.clone(), rows.y.clone()
        for place in self.hostile:
            own = slice(int(offsets[place]), int(offsets[place + 1]))
            self.attack.poisons(x[own], y[own])
        return AllRows(x, y)
