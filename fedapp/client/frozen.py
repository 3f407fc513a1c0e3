"""Frozen arrays that a client has from the server, because the model that it builds by itself has others."""

import logging

from flwr.app import Context, Error, Message

from fedapp import federation
from fedapp.client.kept import keep_frozen, kept_frozen
from fedapp.client.request import record_of
from strategies.flower import messages
from strategies.flower.arrays import unpack

log = logging.getLogger("flwr.fedapp")


def take_sent(message: Message, context: Context) -> bool:
    """Keep the frozen arrays that a request brings, for this run and later ones; return False if it brings none."""
    arrays = messages.arrays_of(message, messages.FROZEN)
    if arrays is None:
        return False
    digest = str(record_of(message)[messages.FROZEN])
    data = unpack(next(iter(arrays.values()))).tobytes()
    keep_frozen(context, digest, arrays, data)
    federation.offer(digest, lambda: data)
    return True


def take_kept(message: Message, context: Context) -> bool:
    """Take the frozen arrays that this client has kept; return False if it has none of the request's digest."""
    digest = str(record_of(message)[messages.FROZEN])
    if (data := kept_frozen(context, digest)) is None:
        return False
    federation.offer(digest, lambda: data)
    return True


def asking(message: Message, error: federation.FrozenMissingError) -> Message:
    """Return the reply that asks for the frozen arrays."""
    log.info("%s: they are asked for, once", error)
    return Message(Error(messages.NEEDS_FROZEN, str(error)), reply_to=message)
