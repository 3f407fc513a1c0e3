"""Frozen arrays that a client has from the server, because the model that it builds by itself has others."""

import logging

from flwr.app import Context, Message

from fedapp import federation
from fedapp.client.kept import keep_frozen_file, kept_frozen_file
from fedapp.client.request import record_of
from strategies.flower import messages
from strategies.flower.frozen import needs_frozen

log = logging.getLogger("flwr.fedapp")


def take_sent(message: Message, context: Context) -> bool:
    """Keep the frozen arrays that a request brings, for this run and later ones; return False if it brings none."""
    arrays = messages.arrays_of(message, messages.FROZEN)
    if arrays is None:
        return False
    digest = str(record_of(message)[messages.FROZEN])
    data = keep_frozen_file(context, digest, arrays)
    federation.offer(digest, lambda: data)
    return True


def take_kept(message: Message, context: Context) -> bool:
    """Take the frozen arrays that this client has kept; return False if it has none of the request's digest."""
    digest = str(record_of(message)[messages.FROZEN])
    if (data := kept_frozen_file(context, digest)) is None:
        return False
    federation.offer(digest, lambda: data)
    return True


def asking(message: Message, error: federation.FrozenMissingError) -> Message:
    """Return the reply that asks for the frozen arrays."""
    log.info("%s: they are asked for, once", error)
    return needs_frozen(message, str(error))
