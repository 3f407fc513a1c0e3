"""Frozen arrays that clients are sent once and keep: only what is trained travels, in any Flower app.

A strategy with ``trained = ["head.*"]`` splits the initial arrays: those that a pattern names, and buffers named so
(``untrained``), are the model of the run; the others are frozen. A ClientApp keeps the frozen arrays by the mod
``keeps_frozen``, after ``reads_packed`` and ``compresses`` and before all other mods::

    app = ClientApp(mods=[reads_packed, compresses, keeps_frozen])

The first request to a node has the whole model, with the names of what travels (``messages.TRAVELS``). The mod keeps
the frozen arrays in the client's ``context.state``, hands the app's handlers the whole model, takes the frozen arrays
out of the reply, and says in the reply which it keeps, by their digest. From then on the node is sent what travels. A
client whose state is gone asks for the frozen arrays, and is sent the whole model once more. A client without the mod
is sent the whole model each time.

Records of the model's layout beside the model, such as control variates, are split and completed alike: those that
are models by the frozen arrays, and others, which are differences of models or gradients, by zeros.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from hashlib import sha256
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, RecordDict

from strategies.flower import messages
from strategies.flower.arrays import HEADER, pack, unpack
from strategies.flower.errors import RunError
from strategies.flower.frozen import name_in
from strategies.flower.internals import with_content

log = logging.getLogger("flwr.strategies")

Trained = Sequence[str] | Callable[[str], bool]

_PLACE = "strategies.place"  # serialisation type of the placeholder of a travelling array
_CHANGED = "changed"  # in the record of a reply: a frozen array that its client changed
_MODELS = (messages.NEIGHBOURS, messages.PERSONAL_MODEL)  # records beside the model that are models
_STATE = "frozen:"  # prefix of the arrays' names in a checkpoint


def travelling_names(names: Iterable[str], trained: Trained, untrained: Sequence[str]) -> tuple[str, ...]:
    """Return the names of the arrays that travel: those that are trained, and buffers that match a pattern.

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
        found = {name for name in names if trained(name)}
        if not found:
            raise ValueError(f"trained: the function returns True for no array; the model's are {listed}")
    else:
        found = set[str]()
        for pattern in trained:
            matching = [name for name in names if fnmatchcase(name, pattern)]
            if not matching:
                raise ValueError(
                    f"trained = {pattern!r}: no array of the model is called so; its arrays are {listed}"
                )
            found.update(matching)
    found |= {name for name in names if any(fnmatchcase(name, pattern) for pattern in untrained)}
    return tuple(name for name in names if name in found)


@dataclass(frozen=True)
class Parts:
    """The frozen arrays of a model, and the places of the others.

    Attributes
    ----------
    arrays : ArrayRecord
        The whole model's names in order, with empty arrays in the place of those that travel.
    """

    arrays: ArrayRecord

    @classmethod
    def of(cls, whole: ArrayRecord, travels: Iterable[str]) -> "Parts":
        """Take the frozen arrays of a whole model."""
        place, sent = Array("uint8", (0,), _PLACE, b""), set(travels)
        return cls(ArrayRecord({name: place if name in sent else each for name, each in whole.items()}))

    @cached_property
    def travels(self) -> tuple[str, ...]:
        """The names of the arrays that travel."""
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

    def whole(self, record: ArrayRecord, *, zeros: bool = False) -> ArrayRecord:
        """Return a record of what travels with the frozen arrays, or with zeros in their places."""
        return ArrayRecord(
            {
                name: record[name] if array.stype == _PLACE else _zeros(array) if zeros else array
                for name, array in self.arrays.items()
            }
        )

    def completed(self, content: RecordDict, key: str) -> RecordDict:
        """Return a request's content with records of all arrays in place of records of the travelling arrays."""
        names = set(self.travels)
        found = {
            name: self.whole(record, zeros=name not in (key, *_MODELS))
            for name, record in content.items()
            if isinstance(record, ArrayRecord) and set(record) == names
        }
        return RecordDict({**content, **found})

    def changed(self, record: ArrayRecord) -> str:
        """Return the name of a frozen array that differs in a record of all arrays; "" if none differs."""
        for name, array in self.frozen.items():
            if record[name].data != array.data and not _same(record[name], array):
                return name
        return ""


def split_reply(reply: Message, parts: Parts, key: str) -> str:
    """Take the frozen arrays out of a reply's records; return the name of one that differs in the model, or ""."""
    names, changed = set(parts.arrays), ""
    model = messages.model_of(reply, key)
    for name, record in list(reply.content.items()):
        if isinstance(record, ArrayRecord) and set(record) == names:
            changed = changed or (parts.changed(record) if record is model else "")
            reply.content[name] = ArrayRecord({each: record[each] for each in parts.travels})
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


class KeptArrays:
    """The frozen arrays of a run, and the nodes that keep them.

    Parameters
    ----------
    parts : Parts
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
        parts: Parts,
        keys: tuple[str, str],
        warn_once: Callable[..., None],
        nodes: Iterable[int] = (),
    ) -> None:
        self.parts, self._key, self._config_key = parts, *keys
        self._warn_once, self._nodes = warn_once, set(nodes)
        self._fields: dict[str, str | list[str]] = {messages.FROZEN: parts.digest}
        if self._key != messages.ARRAYS:
            self._fields[messages.MODEL] = self._key
        self._travels = {messages.TRAVELS: list(parts.travels)}
        self._sent = self._received = 0
        self._last: tuple[ArrayRecord, ArrayRecord] | None = None  # what travels, and the whole model

    @property
    def most_bytes(self) -> int:
        """The most bytes that a reply has more if it has the whole model."""
        return sum(len(array.data) + HEADER for array in self.parts.frozen.values())

    def whole(self, record: ArrayRecord) -> ArrayRecord:
        """Return the whole model; many nodes are sent the same, which is made once."""
        if self._last is None or self._last[0] is not record:
            self._last = record, self.parts.whole(record)
        return self._last[1]

    def outgoing(self, message: Message) -> Message:
        """Name the frozen arrays; return the message with the whole model for a node that doesn't keep them."""
        name_in(message.content, self._config_key, self._fields)
        if message.metadata.dst_node_id in self._nodes:
            return message
        content = self.again(message)
        made = with_content(message, content)
        if message.metadata.message_type == messages.TRAIN:  # as of models, evaluations' aren't counted
            self._sent += messages.total_bytes(made) - messages.total_bytes(message)
        return made

    def again(self, request: Message) -> RecordDict:
        """Return a request's content with the whole model."""
        self._nodes.discard(request.metadata.dst_node_id)
        content = RecordDict(dict(request.content))
        model = content.get(self._key)
        if isinstance(model, ArrayRecord):
            content[self._key] = self.whole(model)
        content = self.parts.completed(content, self._key)
        name_in(content, self._config_key, {**self._fields, **self._travels})
        return content

    def incoming(self, reply: Message) -> Message:
        """Return a reply with the travelling arrays alone, and note whether its node keeps the frozen arrays."""
        if reply.has_error():
            return reply
        node, said = reply.metadata.src_node_id, reply.content.get(messages.FROZEN)
        told = said if isinstance(said, ConfigRecord) else ConfigRecord()
        if told:
            del reply.content[messages.FROZEN]
        if told.get(messages.FROZEN) == self.parts.digest:
            self._nodes.add(node)
        else:
            self._nodes.discard(node)
            self._warn_once(
                "trained: node %d doesn't keep the arrays that aren't trained, so that it is sent the whole model "
                "each time; an app keeps them by the mod `keeps_frozen`",
                node,
            )
        before = messages.total_bytes(reply)
        changed = split_reply(reply, self.parts, self._key) or str(told.get(_CHANGED, ""))
        self._received += before - messages.total_bytes(reply)
        if changed:
            self._warn_once(
                "trained: the reply of node %d has another %r than it was sent, which doesn't travel: what isn't "
                "named in trained keeps its first values (also where a mod adds noise to it)",
                node,
                messages.clean(changed, messages.LONGEST_NAME),
            )
        return reply

    def note_sent(self, num_bytes: int) -> None:
        """Note the bytes of a request that was sent once more."""
        self._sent += num_bytes

    def take_bytes(self) -> tuple[int, int]:
        """Return the bytes that were sent and received beside what travels since the last call."""
        sizes, self._sent, self._received = (self._sent, self._received), 0, 0
        return sizes

    def state(self) -> dict[str, Any]:
        """Return the frozen arrays and the nodes that keep them, for a checkpoint."""
        arrays = self.parts.arrays
        heads = [[name, each.dtype, list(each.shape), each.stype] for name, each in arrays.items()]
        data = {f"{_STATE}{name}": np.frombuffer(each.data, np.uint8) for name, each in arrays.items()}
        return {"frozen-arrays": heads, "frozen-nodes": sorted(self._nodes), **data}


def kept_parts(
    initial_arrays: ArrayRecord,
    trained: Trained,
    untrained: Sequence[str],
    state: Mapping[str, Any] | None,
) -> tuple[Parts, list[int]]:
    """Return the frozen arrays of a run and the nodes that keep them: those of the state that the run resumes.

    Raises
    ------
    ValueError
        If ``trained`` names no array.
    RunError
        If the state has other frozen arrays.
    """
    travels = travelling_names(initial_arrays, trained, untrained)
    parts = Parts.of(initial_arrays, travels)
    if state is None:
        return parts, []
    heads = state.get("frozen-arrays", [])
    record = ArrayRecord(
        {
            name: Array(dtype, tuple(shape), stype, np.asarray(state[f"{_STATE}{name}"], np.uint8).tobytes())
            for name, dtype, shape, stype in heads
        }
    )
    if (found := Parts(record)).travels != travels or list(record) != list(initial_arrays):
        raise RunError(
            f"trained: the state is that of a model of which {', '.join(found.travels) or 'all arrays'} travel, of "
            f"this one {', '.join(travels)}"
        )
    return found, list(state.get("frozen-nodes", []))


# ---- The client's side -------------------------------------------------------------------------------------


def keeps_frozen(
    message: Message, context: Context, call_next: Callable[[Message, Context], Message]
) -> Message:
    """Keep the arrays of a model that aren't trained, which then don't travel any more; a mod for Flower."""
    fields = next(
        (
            each
            for each in (message.content.values() if message.has_content() else ())
            if isinstance(each, ConfigRecord) and messages.FROZEN in each
        ),
        None,
    )
    if fields is None:
        return call_next(message, context)
    digest, key = str(fields[messages.FROZEN]), str(fields.get(messages.MODEL, messages.ARRAYS))
    model = messages.arrays_of(message, key)
    if model is not None and messages.TRAVELS in fields:
        parts = Parts.of(model, fields[messages.TRAVELS])  # type: ignore[arg-type]
        context.state[messages.FROZEN] = parts.arrays
        context.state[messages.TRAVELS] = ConfigRecord({messages.FROZEN: digest})
    else:
        known = _kept(context, digest)
        if known is None or model is None or set(model) != set(known.travels):
            return Message(
                Error(messages.NEEDS_FROZEN, "this client doesn't have the arrays that aren't trained"),
                reply_to=message,
            )
        parts = known
        message = with_content(message, parts.completed(message.content, key))
        for name, record in message.content.items():
            if record is fields:  # for mods after this one
                message.content[name] = ConfigRecord({**fields, messages.TRAVELS: list(parts.travels)})
                break
    reply = call_next(message, context)
    if reply.has_content():
        changed = split_reply(reply, parts, key)
        reply.content[messages.FROZEN] = _note(changed, reply, digest)
    return reply


def split_as_asked(request_fields: ConfigRecord, sent: ArrayRecord, reply: Message, key: str) -> None:
    """Take the frozen arrays out of a reply to a request with a whole model, for a mod before ``keeps_frozen``."""
    parts = Parts.of(sent, request_fields[messages.TRAVELS])  # type: ignore[arg-type]
    if changed := split_reply(reply, parts, key):
        reply.content[messages.FROZEN] = _note(changed, reply)


def _note(changed: str, reply: Message, digest: str = "") -> ConfigRecord:
    """Return the record of a reply: the digest of the frozen arrays that a client keeps, and one that it changed."""
    before = reply.content.get(messages.FROZEN)
    noted = dict(before) if isinstance(before, ConfigRecord) else {}
    said = {_CHANGED: changed} if changed else {}
    return ConfigRecord({**noted, **said, **({messages.FROZEN: digest} if digest else {})})


def _kept(context: Context, digest: str) -> Parts | None:
    """Return the frozen arrays of a digest that a client keeps; None if it has none."""
    arrays, of = context.state.get(messages.FROZEN), context.state.get(messages.TRAVELS)
    if isinstance(arrays, ArrayRecord) and isinstance(of, ConfigRecord) and of.get(messages.FROZEN) == digest:
        return Parts(arrays)
    return None
