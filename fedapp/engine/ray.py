"""Flower's Simulation Runtime on Ray, started from Python with the syntax and the keys of ``flwr run``."""

import logging
import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

# As Flower does where it starts Ray itself: without this, Ray under `uv run` ships the folder to its workers.
os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")

from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

from fedapp.config.options import SimulationConfig
from strategies.flower import internals as flower_internals

log = logging.getLogger("flwr.fedapp")

# Seconds after which a busy thread lets others run. The threads that feed Ray's workers wait behind one that looks
# through Flower's message store without a pause: with Python's 5 ms a round of 100 clients takes a tenth longer.
SWITCH_INTERVAL = 0.0005


def without_announcements() -> None:
    """Hide Ray's warning that a later version may show GPUs to workers that were given none."""
    warnings.filterwarnings("ignore", category=FutureWarning, module="ray")


def simulate(server_app: ServerApp, client_app: ClientApp, simulation: SimulationConfig) -> None:
    """Run the apps on Ray until the ServerApp returns; its exceptions are raised here."""
    import ray  # takes a second

    without_announcements()
    interval, init = sys.getswitchinterval(), ray.init
    sys.setswitchinterval(SWITCH_INTERVAL)
    ray.init = sigterm_kept()(init)  # Flower calls ray.init
    try:
        flower_internals.simulate(
            server_app,
            client_app,
            num_supernodes=simulation.num_supernodes,
            backend_config=simulation.backend(),
            verbose_logging=simulation.verbose,
        )
    finally:
        ray.init = init
        sys.setswitchinterval(interval)


@contextmanager
def sigterm_kept() -> Iterator[None]:
    """Keep this process's handler of SIGTERM while Ray starts, which sets one that ends the process at once."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        # In another thread Ray sets no handler. Where none was set before, Ray's stays: it ends Ray's processes.
        if threading.current_thread() is threading.main_thread() and callable(before):
            signal.signal(signal.SIGTERM, before)
