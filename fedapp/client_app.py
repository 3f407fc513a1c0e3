"""The ClientApp. The same on Ray, under ``flwr run`` and on a device.

On a device Flower starts a process for every message, and what that imports is paid for every time. So nothing heavy
is imported here: where there is a worker (``fedapp.worker``), it does the work, else ``fedapp.client`` in this
process.
"""

import os
from collections.abc import Callable

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from fedapp.client.site_rules import ONLY_MASKED, REQUIRE_SECURE_SUMS, keeps_site_rules
from fedapp.room import lacks_room
from fedapp.worker.asking import VARIABLE, ask_region, ask_worker
from strategies.flower import messages
from strategies.flower.packing import unpack_arrays
from strategies.updates.client_compression import compress_updates


def masks(message: Message, context: Context, call_next: Callable[[Message, Context], Message]) -> Message:
    """Mask the update where the server asks for it: ``masks_updates``, which loads libraries of cryptography."""
    asked = message.has_content() and messages.SECURE in message.content
    if not asked and not {REQUIRE_SECURE_SUMS, ONLY_MASKED} & context.node_config.keys():
        return call_next(message, context)
    from strategies.secure import masks_updates

    return masks_updates(message, context, call_next)


if lacking := lacks_room():  # before Ray starts; the ServerApp says it, too
    raise RuntimeError(lacking)

app = ClientApp(mods=[keeps_site_rules, unpack_arrays, compress_updates, masks])


@app.query("describe")
@app.query("direction")
@app.query("sums")
@app.query("kept")
@app.train()
@app.evaluate()
def answer(message: Message, context: Context) -> Message:
    """Let the region's run or the worker answer, or answer here."""
    if path := context.node_config.get("relay"):  # this SuperNode has no data: it answers for a region
        return ask_region(message, context, str(path))
    if VARIABLE in os.environ and (reply := ask_worker(message, context)) is not None:
        return reply
    from fedapp.client.handlers import handle  # PyTorch, and seconds

    return handle(message, context)
