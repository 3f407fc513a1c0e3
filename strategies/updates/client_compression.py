"""The client's side of compression: a mod that decodes the models it is sent, and compresses its updates.

The formats are those of ``strategies/updates/compression.py`` and ``strategies/updates/compressed_models.py``.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Error, Message, RecordDict

from strategies import streams
from strategies.flower import messages
from strategies.flower.arrays import ArraysMismatchError, Layout, pack, unpack
from strategies.flower.frozen import split_as_asked
from strategies.flower.internals import hand_over_state, with_content
from strategies.flower.packing import offer_to_read
from strategies.updates.compressed_models import MODEL, READS_COMPRESSED, read_model
from strategies.updates.compression import compressing
from strategies.updates.compression_residual import keep_residual, residual_before

# Error code of a reply from a client that doesn't know the requested compressor (Flower's codes are below 100).
UNKNOWN_CODE = 103


def compress_updates(
    message: Message, context: Context, call_next: Callable[[Message, Context], Message]
) -> Message:
    """Decode the models that a ClientApp is sent, and compress its updates as the strategy requests; a mod."""
    hand_over_state()
    message = decoded(message)
    asked = _Asked.of(message)  # read before the app may overwrite the message's memory
    reply = call_next(message, context)
    if reply.has_content():
        offer_to_read(READS_COMPRESSED, message, reply)
    return reply if asked is None else asked.answer(message, reply, context)


def decoded(message: Message) -> Message:
    """Return a message whose compressed model is decoded; the message itself if it has none."""
    if not message.has_content():
        return message
    found = {
        name: read_model(record)
        for name, record in messages.array_records(message).items()
        if [array.stype for array in record.values()] == [MODEL]
    }
    return with_content(message, RecordDict({**message.content, **found})) if found else message


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
        before, buffers = residual_before(context, run, task), compression.buffers_of(model)
        # In the memory of the model that was sent: a large model's vectors are most of what a ClientApp takes.
        update = compression.trained_of(np.subtract(model, base, out=base))
        del base, model
        if before is not None:
            update += unpack(before)
        rng = streams.generator(seed, "compression", client, task)
        record, residual = compression.write(update, buffers, rng)
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
