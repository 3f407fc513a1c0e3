"""Flower's Simulation Runtime on Ray, started from Python with the syntax and the keys of ``flwr run``."""

import logging
import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

# Flower sets this where it starts Ray itself: under `uv run`, Ray would ship the folder to its workers.
os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")

import torch
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from pydantic import Field

from fedapp.config import ConfigError, Keys, RunConfig
from fedapp.config.values import Counting, Flag, NonNegative, Text
from strategies.flower import internals as flower_internals

log = logging.getLogger("flwr.fedapp")

# Seconds after which a busy thread lets others run. The threads that feed Ray's workers wait behind one that looks
# through Flower's message store without a pause: with Python's 5 ms a round of 100 clients takes a tenth longer.
SWITCH_INTERVAL = 0.0005

# What the engines in this process read of the federation config; Ray reads all of it.
READ_BY = {
    "sequential": ("num-supernodes",),
    "vectorized": ("num-supernodes", "init-args-num-cpus", "workers"),
}


class SimulationConfig(Keys):
    """Flower's federation config of a simulation.

    Attributes
    ----------
    num_supernodes : int
        Number of clients.
    client_resources_num_cpus, client_resources_num_gpus : int, float
        What one client gets: 0.1 GPUs packs ten clients on a GPU.
    init_args_num_cpus, init_args_num_gpus : int, optional
        What Ray believes the machine has; default: what it has.
    init_args_logging_level, init_args_log_to_driver, verbose : str, bool, bool
        Ray's and Flower's own logs.
    workers : int
        Processes on Ray that train for the vectorized engine, each with the client resources; 0: it trains in this
        process.
    """

    num_supernodes: Annotated[int, Field(description="a whole number from 1 to 1000000", ge=1, le=10**6)] = 20
    client_resources_num_cpus: Counting = 1
    client_resources_num_gpus: NonNegative = 0.0
    init_args_num_cpus: Annotated[int | None, Field(description="a whole number >= 1", ge=1)] = None
    init_args_num_gpus: Annotated[int | None, Field(description="a whole number >= 0", ge=0)] = None
    init_args_logging_level: Text = "error"
    init_args_log_to_driver: Flag = False
    verbose: Flag = False
    workers: Annotated[int, Field(description="a whole number >= 0", ge=0)] = 0

    def backend(self) -> dict[str, Any]:
        """Return the config of Flower's Ray backend."""
        init_args = {
            "num_cpus": self.init_args_num_cpus,
            "num_gpus": self.init_args_num_gpus,
            "logging_level": self.init_args_logging_level,
            "log_to_driver": self.init_args_log_to_driver or self.verbose,
        }
        return {
            "client_resources": {
                "num_cpus": self.client_resources_num_cpus,
                "num_gpus": self.client_resources_num_gpus,
            },
            "init_args": {key: value for key, value in init_args.items() if value is not None},
        }

    def say_unread(self, engine: str) -> None:
        """Name the values, other than the defaults, that only another engine reads."""
        all_keys = tuple(key for key in self.key_names() if key != "workers")
        read = READ_BY.get(engine, all_keys)
        if engine == "vectorized" and self.workers:
            read = tuple(key for key in self.key_names() if key != "verbose")
        given = {key: value for key, value in self.model_dump(by_alias=True).items() if key not in read}
        defaults = type(self)().model_dump(by_alias=True)
        if unread := [f"{key} = {value!r}" for key, value in given.items() if value != defaults[key]]:
            log.warning("not read by the %s engine: %s", engine, ", ".join(unread))

    def fit_to_machine(self, config: RunConfig, *, on_ray: bool = True) -> "SimulationConfig":
        """Drop the GPU fraction, and say so, where there is no GPU; fail if ``client-device`` asks for one."""
        has_gpu, wants_gpu = torch.cuda.is_available(), self.client_resources_num_gpus > 0
        if config.client_device == "cuda" and not has_gpu:
            raise ConfigError("client-device = 'cuda': this machine has no GPU; allowed are auto, cpu")
        if config.client_device == "cuda" and on_ray and not wants_gpu:
            raise ConfigError(
                "client-device = 'cuda': needs client-resources-num-gpus > 0 in the federation config"
            )
        if has_gpu or not wants_gpu or self.init_args_num_gpus or not on_ray:
            return self
        log.warning(
            "client-resources-num-gpus = %g: this machine has no GPU, clients run on the CPU "
            '(client-device = "cuda" makes this an error)',
            self.client_resources_num_gpus,
        )
        return self.model_copy(update={"client_resources_num_gpus": 0.0})


def without_announcements() -> None:
    """Leave out that Ray may one day show GPUs to workers that were given none; they are hidden now."""
    warnings.filterwarnings("ignore", category=FutureWarning, module="ray")


def simulate(server_app: ServerApp, client_app: ClientApp, simulation: SimulationConfig) -> None:
    """Run the apps on Ray until the ServerApp returns; its exceptions are raised here."""
    import ray  # takes a second

    without_announcements()
    interval, init = sys.getswitchinterval(), ray.init
    sys.setswitchinterval(SWITCH_INTERVAL)
    ray.init = sigterm_kept()(init)  # which Flower calls
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
    """Keep a handler of SIGTERM where Ray starts, which puts one in its place that ends the process at once."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        # In another thread Ray has none; where there was none, Ray's ends what it has started.
        if threading.current_thread() is threading.main_thread() and callable(before):
            signal.signal(signal.SIGTERM, before)


@contextmanager
def stop_on_interrupt() -> Iterator[threading.Event]:
    """Yield an event that the first Ctrl-C (or SIGTERM) sets; a second one ends the process the usual way."""
    event = threading.Event()
    previous = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def handle(number: int, frame: object) -> None:
        event.set()
        for other, handler in previous.items():
            signal.signal(other, handler)

    for number in previous:
        signal.signal(number, handle)
    try:
        yield event
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
