"""Compressed updates: a mod with which any Flower app sends them, and the decompression on the server.

A strategy with ``compression = "topk:0.01"`` or another compressor of ``strategies/updates/compressors.py`` names
the compressor in its training requests. A ClientApp that supports compression has ``compress_updates`` among its
mods, before mods that read the model, such as Flower's for clipping, and after ``unpack_arrays``::

    app = ClientApp(mods=[unpack_arrays, compress_updates])

In place of the trained model the client then sends one array of bytes: the encoded v = Δ + e, with Δ the trained
model minus the model that was sent, followed by the buffers, which aren't compressed. e is the compression residual
of the earlier updates, and v minus the decoded v is the next residual (error feedback: F. Seide et al., 2014; S.
Stich et al., 2018; S. P. Karimireddy et al., 2019); an unbiased compressor has no residual. The residual is kept in
the client's ``context.state`` (``strategies/updates/compression_residual.py``). Random numbers are drawn from the
run's seed, the client and its task.

The size of a compressed update depends on the model's layout alone (``size_of``); the strategy refuses any other
size before it decodes the update. The strategy adds the decoded update to the model that it sent, in the one place
where it reads replies, so that all later steps see an ordinary model. Models sent to clients are never compressed.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message
from numpy.typing import NDArray

from strategies import streams
from strategies.flower import messages
from strategies.flower.arrays import ArraysMismatchError, Layout, Vector, check_values, pack, unpack
from strategies.flower.frozen import split_as_asked
from strategies.updates.buffers import UNTRAINED, untrained_names, untrained_positions
from strategies.updates.compression_residual import keep_residual, residual_before
from strategies.updates.compressors import NONE, Code, Sizes, code_of

COMPRESSED = "strategies.compressed"  # serialisation type, and name, of the array

# Error code of a reply from a client that doesn't know the requested compressor (Flower's codes are below 100).
UNKNOWN_CODE = 103


def size_of(layout: Layout, compression: str = NONE, untrained: Sequence[str] = UNTRAINED) -> int:
    """Return the size in bytes of a client's model in its reply, as ``bytes-up`` counts them.

    Parameters
    ----------
    layout : Layout
        Layout of the model: ``Layout.of(arrays)``.
    compression : str
        Name of a compressor, the strategy's parameter ``compression``: see ``strategies.updates.compressors``.
    untrained : sequence of str
        Patterns of the names of buffers, beside arrays of integers; buffers aren't compressed.

    Raises
    ------
    ValueError
        If no compressor has this name.
    """
    found = compressing(compression, layout, untrained)
    return layout.num_bytes if found is None else found.num_bytes


def compressing(compression: str, layout: Layout, untrained: Sequence[str]) -> "Compression | None":
    """Return the compression of a model of this layout, None for ``none``; ValueError for an unknown compressor."""
    code = code_of(compression)
    return None if code is None else Compression(compression, code, layout, tuple(untrained))


@dataclass(frozen=True)
class Compression:
    """A compressor for the models of one layout.

    Attributes
    ----------
    name : str
        Name of the compressor, the strategy's parameter ``compression``.
    untrained : tuple of str
        Patterns of the names of buffers.
    """

    name: str
    code: Code
    layout: Layout
    untrained: tuple[str, ...]

    @cached_property
    def apart(self) -> frozenset[str]:
        """The names of the buffers."""
        return frozenset(untrained_names(self.layout, self.untrained))

    @cached_property
    def trained(self) -> NDArray[np.bool_]:
        """Mask (D,) of the trained values of a model."""
        mask = np.ones(self.layout.size, dtype=bool)
        mask[untrained_positions(self.layout, self.untrained)] = False
        return mask

    @cached_property
    def sizes(self) -> Sizes:
        """Sizes and dtype of the trained arrays, as the compressor needs them."""
        arrays = [(size, dtype) for name, size, dtype in self._arrays() if name not in self.apart]
        exact = np.result_type(*(dtype for _, dtype in arrays)) if arrays else np.dtype(np.float32)
        return Sizes(tuple(size for size, _ in arrays), exact)

    @cached_property
    def rest(self) -> list[tuple[int, np.dtype]]:
        """Number of values and dtype of each buffer; the buffers follow the encoded update."""
        return [(size, dtype.newbyteorder("<")) for name, size, dtype in self._arrays() if name in self.apart]

    def _arrays(self) -> Iterator[tuple[str, int, np.dtype]]:
        layout = self.layout
        return zip(layout.names, layout.sizes, layout.dtypes, strict=True)

    @property
    def num_bytes(self) -> int:
        """Size of a compressed update in bytes, with the buffers."""
        return self.code.num_bytes(self.sizes) + sum(size * dtype.itemsize for size, dtype in self.rest)

    def write(self, update: Vector, model: Vector, rng: np.random.Generator) -> tuple[ArrayRecord, Vector]:
        """Return the record of an update of the trained values, and its compression residual.

        The buffers come from the trained model (D,).
        """
        coded = self.code.encode(update, self.sizes, rng)
        parts, start, others = [coded], 0, model[~self.trained]
        for size, dtype in self.rest:
            values, start = others[start : start + size], start + size
            parts.append((values if dtype.kind == "f" else np.rint(values)).astype(dtype).tobytes())
        data = b"".join(parts)
        record = ArrayRecord({self.name: Array("uint8", (len(data),), COMPRESSED, data)})
        return record, update - self.code.decode(memoryview(coded), self.sizes)

    def read(self, record: ArrayRecord, base: NDArray[Any]) -> Vector:
        """Return the model (D,) from a compressed record and the model (D,) that the client was sent.

        Raises
        ------
        ArraysMismatchError
            If the record is invalid; its size is checked before it is decoded.
        """
        ((name, array),) = record.items()
        if name != self.name:
            known = messages.clean(name, messages.LONGEST_NAME)
            raise ArraysMismatchError(f"its update is compressed by {known!r}, asked was {self.name!r}")
        if len(array.data) != self.num_bytes:
            raise ArraysMismatchError(
                f"its compressed update takes {len(array.data)} bytes; one of this model takes {self.num_bytes}"
            )
        data, start = memoryview(array.data), self.code.num_bytes(self.sizes)
        model = np.array(base, dtype=np.float64)
        others = [np.empty(0)]
        with np.errstate(invalid="ignore", over="ignore"):  # a client may send any bits
            model[self.trained] += self.code.decode(data[:start], self.sizes)
            for size, dtype in self.rest:
                others.append(np.frombuffer(data, dtype, size, start).astype(np.float64))
                start += size * dtype.itemsize
        model[~self.trained] = np.concatenate(others)
        check_values(model)
        return model


def is_compressed(record: ArrayRecord) -> bool:
    """Return True if ``compress_updates`` has written the record."""
    return [array.stype for array in record.values()] == [COMPRESSED]


def request_fields(
    compression: str, seed: int, run: int, key: str, untrained: Sequence[str]
) -> dict[str, Any]:
    """Return the fields of a training request that tell a client to compress its update; none for ``none``.

    Parameters
    ----------
    seed, run : int
        Seed of the run's random numbers, and the run's unique number.
    key : str
        The name of the record of arrays.
    untrained : sequence of str
        Patterns of the names of buffers.
    """
    if compression == NONE:
        return {}
    fields = {messages.COMPRESSION: compression, messages.SEED: seed, messages.RUN: run}
    named = {messages.MODEL: key} if key != messages.ARRAYS else {}
    return {**fields, **named, messages.UNTRAINED: list(untrained)}


# ---- The client's side -------------------------------------------------------------------------------------


def compress_updates(
    message: Message, context: Context, call_next: Callable[[Message, Context], Message]
) -> Message:
    """Compress the updates of a ClientApp as the strategy requests; a mod for Flower."""
    asked = _Asked.of(message)  # read before the app may overwrite the message's memory
    reply = call_next(message, context)
    return reply if asked is None else asked.answer(message, reply, context)


def compressed(request: Message, reply: Message, context: Context) -> Message:
    """Return the compressed reply to a request, as ``compress_updates`` does, for an engine that calls no mods."""
    asked = _Asked.of(request)
    return reply if asked is None else asked.answer(request, reply, context)


@dataclass(frozen=True)
class _Asked:
    """The compression that a training request asks for: see ``request_fields``."""

    fields: ConfigRecord
    key: str
    sent: ArrayRecord

    @classmethod
    def of(cls, request: Message) -> "_Asked | None":
        """Read a request; None if the request asks for no compression."""
        if request.metadata.message_type.partition(".")[0] != messages.TRAIN or not request.has_content():
            return None
        for record in request.content.values():
            if isinstance(record, ConfigRecord) and messages.COMPRESSION in record:
                key = str(record.get(messages.MODEL, messages.ARRAYS))
                sent = messages.model_of(request, key)
                return None if sent is None else cls(record.copy(), key, ArrayRecord(dict(sent.items())))
        return None

    def answer(self, request: Message, reply: Message, context: Context) -> Message:
        """Return the reply with its model compressed, and keep the compression residual in the context's state.

        A model that isn't finite, or has another layout, is not compressed: the server refuses it with the reason.
        """
        name, sent = str(self.fields[messages.COMPRESSION]), self._without_frozen(reply)
        layout = Layout.of(sent)
        try:
            compression = compressing(name, layout, self.fields[messages.UNTRAINED])  # type: ignore[arg-type]
        except ValueError as error:  # a newer server may know more compressors
            return Message(Error(UNKNOWN_CODE, str(error)), reply_to=request)
        trained = messages.model_of(reply, self.key) if reply.has_content() else None
        if compression is None or trained is None:
            return reply
        try:
            base, model = layout.to_vector(sent), layout.to_vector(trained)
        except ArraysMismatchError:
            return reply
        keys = (messages.SEED, messages.RUN, messages.CLIENT, messages.TASK)
        seed, run, client, task = map(self._number, keys)
        before, update = residual_before(context, run, task), (model - base)[compression.trained]
        if before is not None:
            update += unpack(before)
        rng = streams.generator(seed, "compression", client, task)
        record, residual = compression.write(update, model, rng)
        if compression.code.biased:
            kind = np.result_type(compression.sizes.dtype, np.float32)
            keep_residual(context, run, task, before, pack(residual.astype(kind)))
        for key, value in list(reply.content.items()):
            if value is trained:
                reply.content[key] = record
        return reply

    def _without_frozen(self, reply: Message) -> ArrayRecord:
        """Return the model that was sent, and split it and the reply's where the request has the whole model."""
        if messages.TRAVELS not in self.fields or not reply.has_content():
            return self.sent
        split_as_asked(self.fields, self.sent, reply, self.key)
        travels: list[str] = self.fields[messages.TRAVELS]  # type: ignore[assignment]
        return ArrayRecord({each: self.sent[each] for each in travels})

    def _number(self, key: str) -> int:
        return int(self.fields[key])  # type: ignore[arg-type]
