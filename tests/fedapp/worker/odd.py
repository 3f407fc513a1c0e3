"""A worker whose handlers do what a field of the message says; it writes what it does to its standard output."""

import os
import signal
import time
from pathlib import Path

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message

from fedapp.client import handlers
from fedapp.worker import serving
from fedapp.worker.asking import VARIABLE
from strategies.flower import messages

real = handlers.handle


def handle(message: Message, context: Context) -> Message:
    deed = str(message.content.config_records[messages.CONFIG].get("deed", ""))
    print(f"begins {message.metadata.message_id}", flush=True)
    if deed == "remember":
        known = messages.arrays_of(Message(context.state, reply_to=message), "count")
        context.state["count"] = ArrayRecord(
            {"n": Array(1 + (np.zeros(1) if known is None else known["n"].numpy()))}
        )
    elif deed == "raise":
        raise ValueError("two lines\nof a reason")
    elif deed == "die":
        os._exit(9)
    elif deed.startswith("hang"):
        if deed == "hang deaf":  # as code that never comes back to Python
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
        while True:
            time.sleep(0.01)
    elif deed == "wait":
        while not Path("go").exists():
            time.sleep(0.01)
    reply = real(message, context)
    print(f"ends {message.metadata.message_id}", flush=True)
    return reply


if __name__ == "__main__":
    handlers.handle = handle
    serving.GRACE = float(os.environ.get("GRACE", serving.GRACE))
    serving.Worker(Path(os.environ[VARIABLE])).serve()
