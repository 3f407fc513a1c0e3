"""Frozen parameters: the arrays of a model that never change, sent to a client only if the client lacks them.

A request to train or to evaluate has the arrays that change, and in its fields the digest of the frozen ones
(``messages.FROZEN``). A client uses its own frozen arrays if they have this digest, otherwise those of the server,
which it is sent once and keeps. A client that has neither answers with an error (``messages.NEEDS_FROZEN``), and the
request is sent once more, with the frozen arrays. Strategies see the second reply as the reply to the first request.

Clients that build the model by themselves, as ``fedapp``'s do, are sent the frozen arrays only if they ask
(``FrozenParametersOfConfig``). Clients of any other Flower app build none (``FrozenParameterCache``): with
``trained = ["head.*"]`` a strategy splits the initial arrays. The arrays that a pattern names, and buffers that match
``untrained``, are the model of the run; the others are frozen. The first request to a node has the full model, with
the names of the arrays that are sent from then on (``messages.TRAVELS``). A ClientApp keeps the frozen arrays by a
mod, after ``unpack_arrays`` and ``compress_updates`` and before all other mods::

    app = ClientApp(mods=[unpack_arrays, compresses, cache_frozen_parameters])

The mod keeps the frozen arrays in the client's ``context.state``, gives the full model to the app's handlers, takes
the frozen arrays out of the reply, and names in the reply the digest of the arrays that it keeps. A client without
the mod is sent the full model each time.

Records of the model's layout beside the model, such as control variates, are split and completed alike: records that
are models by the frozen arrays, and others, which are differences of models or gradients, by zeros.
"""

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from hashlib import sha256
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, RecordDict
from flwr.serverapp import Grid

from strategies.flower import messages
from strategies.flower.arrays import HEADER, pack, unpack
from strategies.flower.errors import RunError
from strategies.flower.grids import GridAround, asked_ids, pulled_from
from strategies.flower.internals import as_reply_to, hand_over_state, with_content

log = logging.getLogger("flwr.strategies")

Trained = Sequence[str] | Callable[[str], bool]

_PLACE = "strategies.place"  # serialisation type of the placeholder of an array that is sent
_CHANGED = "changed"  # in the record of a reply: a frozen array that its client changed
_MODELS = (messages.NEIGHBOURS, messages.PERSONAL_MODEL)  # records beside the model that are models
_STATE = "frozen:"  # prefix of the arrays' names in a checkpoint


# ---- A model in two parts ----------------------------------------------------------------------------------


def sent_names(names: Iterable[str], trained: Trained, untrained: Sequence[str]) -> tuple[str, ...]:
    """Return the names of the arrays that are sent: those that are trained, and buffers that match a pattern.

    Parameters
    ----------
    trained : sequence of str, or callable
        Patterns of names, or a function that returns True for a name.
    untrained : sequence of str
        Patterns of the names of buffers.

    Raises
    ------
    ValueError
        If a pattern, or the function, names no array.
    """
    names = tuple(names)
    listed = ", ".join(names[:20]) + (f" and {len(names) - 20} more" if len(names) > 20 else "")
    if callable(trained):
        found = set(filter(trained, names))
        if not found:
            raise ValueError(f"trained: the function returns True for no array; the model's are {listed}")
    else:
        found = _matching(names, trained)
        for pattern in trained:
            if not _matching(names, [pattern]):
                raise ValueError(
                    f"trained = {pattern!r}: no array of the model is called so; its arrays are {listed}"
                )
    found |= _matching(names, untrained)
    return tuple(name for name in names if name in found)


def _matching(names: Sequence[str], patterns: Sequence[str]) -> set[str]:
    return {name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)}


@dataclass(frozen=True)
class SplitModel:
    """The frozen arrays of a model, and the places of the arrays that are sent.

    Attributes
    ----------
    arrays : ArrayRecord
        The full model's names in order, with empty arrays in the place of those that are sent.
    """

    arrays: ArrayRecord

    @classmethod
    def of(cls, full_model: ArrayRecord, sent: Iterable[str]) -> "SplitModel":
        """Take the frozen arrays of a full model, given the names of the arrays that are sent."""
        place, sent = Array("uint8", (0,), _PLACE, b""), set(sent)
        return cls(ArrayRecord({name: place if name in sent else each for name, each in full_model.items()}))

    @cached_property
    def sent(self) -> tuple[str, ...]:
        """The names of the arrays that are sent."""
        return tuple(name for name, array in self.arrays.items() if array.stype == _PLACE)

    @cached_property
    def frozen(self) -> dict[str, Array]:
        """The frozen arrays, by name."""
        return {name: array for name, array in self.arrays.items() if array.stype != _PLACE}

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the names of all arrays, and of the types, shapes and bytes of the frozen ones."""
        found = sha256()
        for name, array in self.arrays.items():
            head = f"{name}\0{array.dtype}\0{tuple(array.shape)}\0{array.stype}\0{len(array.data)}\0"
            found.update(head.encode())
            found.update(array.data)
        return found.hexdigest()

    def full_model(self, record: ArrayRecord, *, zeros: bool = False) -> ArrayRecord:
        """Return a record of the arrays that are sent with the frozen arrays, or with zeros in their places."""
        frozen = {name: _zeros(array) for name, array in self.frozen.items()} if zeros else self.frozen
        return ArrayRecord({name: frozen[name] if name in frozen else record[name] for name in self.arrays})

    def completed(self, content: RecordDict, key: str) -> RecordDict:
        """Return a request's content with records of all arrays in place of records of those that are sent."""
        names = set(self.sent)
        found = {
            name: self.full_model(record, zeros=name not in (key, *_MODELS))
            for name, record in content.items()
            if isinstance(record, ArrayRecord) and set(record) == names
        }
        return RecordDict({**content, **found})

    def changed(self, record: ArrayRecord) -> str:
        """Return the name of a frozen array that differs in a record of all arrays; "" if none differs."""
        differing = (
            name
            for name, array in self.frozen.items()
            if record[name].data != array.data and not _same(record[name], array)
        )
        return next(differing, "")

    def split_reply(self, reply: Message, key: str) -> str:
        """Take the frozen arrays out of a reply's records; return the name of one that differs, or ""."""
        names, changed = set(self.arrays), ""
        model = messages.model_of(reply, key)
        for name, record in list(reply.content.items()):
            if isinstance(record, ArrayRecord) and set(record) == names:
                changed = changed or (self.changed(record) if record is model else "")
                reply.content[name] = ArrayRecord({each: record[each] for each in self.sent})
        return changed


def _same(one: Array, other: Array) -> bool:
    """Return True if two arrays have the same values, to the last bit, whatever wrote them."""
    try:
        a, b = unpack(one), unpack(other)
    except Exception:  # whatever NumPy raises on a client's bytes
        return False
    if not (isinstance(a, np.ndarray) and isinstance(b, np.ndarray)):  # an npz archive
        return False
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def _zeros(array: Array) -> Array:
    zeros = pack(np.zeros_like(unpack(array)))
    return Array(array.dtype, tuple(array.shape), array.stype, zeros.data)


# ---- The server's side -------------------------------------------------------------------------------------


class FrozenParameters(ABC):
    """The frozen arrays of a run's model, and how they come to clients.

    Parameters
    ----------
    digest : str
        Digest of the arrays' names, types, shapes and values.
    config_key : str
        Name of a message's record of fields.

    Attributes
    ----------
    bytes_sent, bytes_received : int
        Bytes that went beside the arrays that are sent, since they were last counted.
    """

    def __init__(self, digest: str, config_key: str) -> None:
        self.digest, self._config_key = digest, config_key
        self._fields: dict[str, str | list[str]] = {messages.FROZEN: digest}
        self.bytes_sent = self.bytes_received = 0

    @property
    def max_reply_bytes(self) -> int:
        """The most bytes by which a reply is longer than one with the arrays that are sent."""
        return 0

    def full_model(self, record: ArrayRecord) -> ArrayRecord:
        """Return the model that is evaluated and returned, given the arrays that are sent."""
        return record

    def prepare_request(self, message: Message) -> Message:
        """Return the message to send, which names the frozen arrays, and count the bytes that were added to it."""
        _add_fields(message.content, self._config_key, self._fields)
        return message

    @abstractmethod
    def again(self, request: Message) -> RecordDict:
        """Return the content of a request that is sent once more, with the frozen arrays."""

    def incoming(self, reply: Message) -> Message:
        """Return the reply as strategies see it."""
        return reply

    def take_bytes(self) -> tuple[int, int]:
        """Return the bytes that were sent and received beside the arrays that are sent, since the last call."""
        sizes, self.bytes_sent, self.bytes_received = (self.bytes_sent, self.bytes_received), 0, 0
        return sizes

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {}


class FrozenParametersOfConfig(FrozenParameters):
    """Frozen arrays that clients build by themselves from the run's config, and ask for if they build others.

    Parameters
    ----------
    make : callable
        Returns the record of the arrays, which is sent as ``messages.FROZEN`` beside the model; called once, and only
        if a client needs the arrays.
    """

    def __init__(
        self, digest: str, make: Callable[[], ArrayRecord], config_key: str = messages.CONFIG
    ) -> None:
        super().__init__(digest, config_key)
        self._make = make

    @cached_property
    def record(self) -> ArrayRecord:
        """The record in which the arrays are sent."""
        return self._make()

    def again(self, request: Message) -> RecordDict:
        """Return a request's content with the frozen arrays beside the model."""
        return RecordDict({**request.content, messages.FROZEN: self.record})


class FrozenParameterCache(FrozenParameters):
    """The frozen arrays of a run whose clients are sent them once, and the nodes that keep them.

    Parameters
    ----------
    split : SplitModel
        The run's frozen arrays.
    keys : tuple of str
        Names of a message's records of arrays and of fields.
    warn_once : callable
        Logs a warning once in a run.
    nodes : iterable of int
        Ids of the nodes that keep the arrays already, in a resumed run.
    """

    def __init__(
        self,
        split: SplitModel,
        keys: tuple[str, str],
        warn_once: Callable[..., None],
        nodes: Iterable[int] = (),
    ) -> None:
        self._key, config_key = keys
        super().__init__(split.digest, config_key)
        self.split, self._warn_once, self._nodes = split, warn_once, set(nodes)
        if self._key != messages.ARRAYS:
            self._fields[messages.MODEL] = self._key
        # Arrays that are sent, and their full model.
        self._last: tuple[ArrayRecord, ArrayRecord] | None = None

    @property
    def max_reply_bytes(self) -> int:
        """The bytes of the frozen arrays: a client may send the full model."""
        return sum(len(array.data) + HEADER for array in self.split.frozen.values())

    def full_model(self, record: ArrayRecord) -> ArrayRecord:
        """Return the full model; many nodes are sent the same model, which is made once."""
        if self._last is None or self._last[0] is not record:
            self._last = record, self.split.full_model(record)
        return self._last[1]

    def prepare_request(self, message: Message) -> Message:
        """Name the frozen arrays; return the message with the full model for a node that doesn't keep them."""
        super().prepare_request(message)
        if message.metadata.dst_node_id in self._nodes:
            return message
        made = with_content(message, self.again(message))
        if message.metadata.message_type == messages.TRAIN:  # as with models, not those of evaluations
            self.bytes_sent += messages.total_bytes(made) - messages.total_bytes(message)
        return made

    def again(self, request: Message) -> RecordDict:
        """Return a request's content with the full model."""
        self._nodes.discard(request.metadata.dst_node_id)
        content = RecordDict(dict(request.content))
        model = content.get(self._key)
        if isinstance(model, ArrayRecord):
            content[self._key] = self.full_model(model)
        content = self.split.completed(content, self._key)
        _add_fields(content, self._config_key, {**self._fields, messages.TRAVELS: list(self.split.sent)})
        return content

    def incoming(self, reply: Message) -> Message:
        """Return a reply with the arrays that are sent alone, and note whether its node keeps the frozen arrays."""
        if reply.has_error():
            return reply
        node, record = reply.metadata.src_node_id, reply.content.get(messages.FROZEN)
        fields = record if isinstance(record, ConfigRecord) else ConfigRecord()
        if fields:
            del reply.content[messages.FROZEN]
        if fields.get(messages.FROZEN) == self.digest:
            self._nodes.add(node)
        else:
            self._nodes.discard(node)
            self._warn_once(
                "trained: node %d doesn't keep the arrays that aren't trained, so that it is sent the whole model "
                "each time; an app keeps them by the mod `cache_frozen_parameters`",
                node,
            )
        before = messages.total_bytes(reply)
        changed = self.split.split_reply(reply, self._key) or str(fields.get(_CHANGED, ""))
        self.bytes_received += before - messages.total_bytes(reply)
        if changed:
            self._warn_once(
                "trained: the reply of node %d has another %r than it was sent, which doesn't travel: what isn't "
                "named in trained keeps its first values (also where a mod adds noise to it)",
                node,
                messages.clean(changed, messages.LONGEST_NAME),
            )
        return reply

    def state(self) -> dict[str, Any]:
        """Return the frozen arrays and the nodes that keep them, for a checkpoint."""
        arrays = self.split.arrays
        heads = [[name, each.dtype, list(each.shape), each.stype] for name, each in arrays.items()]
        data = {f"{_STATE}{name}": np.frombuffer(each.data, np.uint8) for name, each in arrays.items()}
        return {"frozen-arrays": heads, "frozen-nodes": sorted(self._nodes), **data}


def split_initial(
    initial_arrays: ArrayRecord, trained: Trained, untrained: Sequence[str], state: Mapping[str, Any] | None
) -> tuple[SplitModel, list[int]]:
    """Return the frozen arrays of a run and the nodes that keep them: those of the state that the run resumes.

    Raises
    ------
    ValueError
        If ``trained`` names no array.
    RunError
        If the state has other frozen arrays.
    """
    sent = sent_names(initial_arrays, trained, untrained)
    if state is None:
        return SplitModel.of(initial_arrays, sent), []
    arrays = {
        name: Array(dtype, tuple(shape), stype, np.asarray(state[f"{_STATE}{name}"], np.uint8).tobytes())
        for name, dtype, shape, stype in state.get("frozen-arrays", [])
    }
    found = SplitModel(ArrayRecord(arrays))
    if found.sent != sent or list(arrays) != list(initial_arrays):
        raise RunError(
            f"trained: the state is that of a model of which {', '.join(found.sent) or 'all arrays'} travel, of "
            f"this one {', '.join(sent)}"
        )
    return found, list(state.get("frozen-nodes", []))


class FrozenGrid(GridAround):
    """A Grid that names the frozen arrays in each request, and sends them to the nodes that need them.

    Parameters
    ----------
    grid : Grid
        The Grid that sends the messages to the nodes.
    frozen : FrozenParameters
        The run's.
    """

    def __init__(self, grid: Grid, frozen: FrozenParameters) -> None:
        self.grid, self.frozen = grid, frozen
        self._sent: dict[str, Message] = {}  # requests that haven't been answered, by id
        self._again: dict[str, str] = {}  # by the id of a request, that of the one in its place

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Send messages; return the ids of those that could be stored."""
        given = list(messages)
        prepared = [self.frozen.prepare_request(each) if _has_model(each) else each for each in given]
        stored = list(self.grid.push_messages(prepared))
        now = time.time()
        self._sent = {name: each for name, each in self._sent.items() if _expiry(each) > now}
        self._sent |= {each.metadata.message_id: each for each in given if _has_model(each)}
        return stored

    def pull_messages(
        self, message_ids: Iterable[str] | None = None, *, reply_to_message_ids: Iterable[str] | None = None
    ) -> Iterable[Message]:
        """Return the replies that have arrived, but for those that ask for frozen arrays."""
        ids = asked_ids(reply_to_message_ids, message_ids)
        asked = {self._again.get(name, name): name for name in (self._sent if ids is None else ids)}
        found = []
        for reply in pulled_from(self.grid, None if ids is None else list(asked)):
            name = asked.get(reply.metadata.reply_to_message_id, "")
            request = self._sent.pop(name, None)
            first = self._again.pop(name, None) is None
            needs = reply.has_error() and reply.error.code == messages.NEEDS_FROZEN
            if first and needs and request is not None and self._send_again(name, request):
                continue
            seen = reply if request is None else self.frozen.incoming(reply)
            found.append(seen if first else as_reply_to(seen, name))
        return found

    def _send_again(self, name: str, request: Message) -> bool:
        """Send a request once more, with the frozen arrays; return True if it could be stored."""
        old = request.metadata
        content = self.frozen.again(request)
        again = Message(content, old.dst_node_id, old.message_type, ttl=old.ttl, group_id=old.group_id)
        if not any(self.grid.push_messages([again])):  # Flower says None, or "", of a message that it refuses
            return False
        self._again[name], self._sent[name] = again.metadata.message_id, request
        self.frozen.bytes_sent += messages.total_bytes(again)
        return True


def _add_fields(content: RecordDict, config_key: str, fields: Mapping[str, str | list[str]]) -> None:
    """Add fields to a message's record of fields."""
    known = content.get(config_key)
    content[config_key] = ConfigRecord({**(known if isinstance(known, ConfigRecord) else {}), **fields})


def _has_model(message: Message) -> bool:
    return message.metadata.message_type in (messages.TRAIN, messages.EVALUATE)


def _expiry(message: Message) -> float:
    return message.metadata.created_at + message.metadata.ttl


# ---- The client's side -------------------------------------------------------------------------------------


def keep_frozen(context: Context, digest: str, arrays: ArrayRecord) -> None:
    """Keep frozen arrays of a digest in a client's state, in place of others."""
    context.state[messages.FROZEN] = arrays
    context.state[messages.TRAVELS] = ConfigRecord({messages.FROZEN: digest})


def kept_frozen(context: Context, digest: str) -> ArrayRecord | None:
    """Return the frozen arrays of a digest that a client's state has; None if it has none."""
    arrays, of = context.state.get(messages.FROZEN), context.state.get(messages.TRAVELS)
    if isinstance(arrays, ArrayRecord) and isinstance(of, ConfigRecord) and of.get(messages.FROZEN) == digest:
        return arrays
    return None


def needs_frozen(request: Message, reason: str) -> Message:
    """Return the reply that asks for the frozen arrays."""
    return Message(Error(messages.NEEDS_FROZEN, reason), reply_to=request)


def cache_frozen_parameters(
    message: Message, context: Context, call_next: Callable[[Message, Context], Message]
) -> Message:
    """Keep the arrays of a model that aren't trained, which then aren't sent any more; a mod for Flower."""
    hand_over_state()
    name, fields = _asked(message)
    if fields is None:
        return call_next(message, context)
    digest, key = str(fields[messages.FROZEN]), str(fields.get(messages.MODEL, messages.ARRAYS))
    model = messages.arrays_of(message, key)
    if model is not None and messages.TRAVELS in fields:
        split = SplitModel.of(model, fields[messages.TRAVELS])  # type: ignore[arg-type]
        keep_frozen(context, digest, split.arrays)
    else:
        arrays = kept_frozen(context, digest)
        split = SplitModel(ArrayRecord() if arrays is None else arrays)
        if arrays is None or model is None or set(model) != set(split.sent):
            return needs_frozen(message, "this client doesn't have the arrays that aren't trained")
        message = with_content(message, split.completed(message.content, key))
        # Mods after this one see a full model, and so the names of the arrays that are sent.
        message.content[name] = ConfigRecord({**fields, messages.TRAVELS: list(split.sent)})
    reply = call_next(message, context)
    if reply.has_content():
        changed = split.split_reply(reply, key)
        reply.content[messages.FROZEN] = _note(changed, reply, digest)
    return reply


def _asked(message: Message) -> tuple[str, ConfigRecord | None]:
    """Return name and record of the fields of a request that names frozen arrays; ("", None) if it names none."""
    for name, record in message.content.items() if message.has_content() else ():
        if isinstance(record, ConfigRecord) and messages.FROZEN in record:
            return name, record
    return "", None


def split_as_asked(request_fields: ConfigRecord, sent: ArrayRecord, reply: Message, key: str) -> None:
    """Take the frozen arrays out of a reply to a request with a full model, for a mod before the cache's."""
    split = SplitModel.of(sent, request_fields[messages.TRAVELS])  # type: ignore[arg-type]
    if changed := split.split_reply(reply, key):
        reply.content[messages.FROZEN] = _note(changed, reply)


def _note(changed: str, reply: Message, digest: str = "") -> ConfigRecord:
    """Return the record of a reply: the digest of the frozen arrays that a client keeps, and one that it changed."""
    before = reply.content.get(messages.FROZEN)
    note = ConfigRecord(dict(before) if isinstance(before, ConfigRecord) else {})
    note.update({key: value for key, value in ((_CHANGED, changed), (messages.FROZEN, digest)) if value})
    return note
