"""One run on an engine of this machine, from Python objects: what the commands and the Python interface stand on."""

import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedapp import client_app, federation, server
from fedapp.config import ConfigError, RunConfig
from fedapp.config.options import SimulationConfig
from fedapp.engine.ray import simulate
from fedapp.engine.sequential import SequentialGrid
from fedapp.engine.vectorized import VectorizedGrid
from fedapp.names import AUTO, ENGINES, IN_PROCESS, RAY, SEQUENTIAL, VECTORIZED, Way
from fedapp.own import changed_since, in_process_names
from fedapp.room import lacks_room
from fedapp.server import Observer, RunDirectory
from fedapp.training.gpu import gpu_as_it_was
from fedapp.training.trainer import Trainer
from strategies.flower.exchange import never

log = logging.getLogger("flwr.fedapp")


def chosen_engine(
    engine: str, simulation: SimulationConfig | None = None, *, secure_sums: bool = False
) -> tuple[str, str]:
    """Return the engine of a simulation, one of `ENGINES`, and for ``auto`` a line that says why it was chosen.

    Parameters
    ----------
    simulation : SimulationConfig, optional
        The federation config, where it is known: Flower doesn't tell it to a ServerApp.
    secure_sums : bool
        Whether clients mask their updates, which clients that train together don't.

    Raises
    ------
    ConfigError
        If the engine is neither ``auto`` nor one of `ENGINES`, or can't do what the run needs.
    """
    if engine != AUTO:
        if engine not in ENGINES:
            raise ConfigError(f"engine = {engine!r}: allowed are {', '.join((AUTO, *ENGINES))}")
        if engine == VECTORIZED and secure_sums:
            raise ConfigError(
                f"engine = {engine!r}: its clients train together, and mask no update of their own; allowed with "
                f"secure-sums are {SEQUENTIAL}, {RAY}"
            )
        return engine, ""
    if "RAY_ADDRESS" in os.environ:
        return RAY, "engine = auto: ray, on the cluster that RAY_ADDRESS names"
    if torch.cuda.is_available() and (simulation is None or simulation.client_resources_num_gpus > 0):
        return RAY, "engine = auto: ray, so that clients share the GPU; engine = vectorized takes one process"
    if secure_sums:
        return (
            SEQUENTIAL,
            "engine = auto: sequential, as each client masks its own update; engine = ray does, too",
        )
    return VECTORIZED, "engine = auto: vectorized, in this process; engine = ray is Flower's simulation"


@contextmanager
def torch_as_it_was() -> Iterator[None]:
    """Restore PyTorch's number of threads after the block, and on a machine with a GPU its settings."""
    threads = torch.get_num_threads()
    try:
        with gpu_as_it_was() if torch.cuda.is_available() else nullcontext():
            yield
    finally:
        torch.set_num_threads(threads)


@torch_as_it_was()
def run_on(
    engine: str,
    config: RunConfig,
    simulation: SimulationConfig,
    *,
    directory: RunDirectory | None = None,
    should_stop: Callable[[], bool] = never,
    observers: Sequence[Observer] = (),
    on_directory: Callable[[RunDirectory], None] = lambda _: None,
    workers: int = 0,
    way: Way | None = None,
) -> RunDirectory:
    """Make a run, and record it in a folder.

    Parameters
    ----------
    engine : str
        One of `ENGINES`, or ``auto``.
    simulation : SimulationConfig
        The number of clients; all other keys are Ray's.
    directory : RunDirectory, optional
        The run's folder; by default a new one as the config says.
    on_directory : callable
        Called with the run's folder, before the run begins.
    workers, way : int, Way
        The vectorized engine's, in this process: see `make_grid`.

    Raises
    ------
    ConfigError, DataError, ModelError
        If the run isn't possible, before a client starts. Errors of a run that fails or diverges are the strategy's.
    """
    engine, why = chosen_engine(engine, simulation, secure_sums=config.secure_sums)
    config = config.model_copy(update={"engine": engine})
    federation.renew()
    on_ray = engine == RAY or (engine == VECTORIZED and simulation.workers > 0)
    if on_ray:
        _check_can_be_found(config)
    simulation = fit_to_machine(simulation, config, on_ray=on_ray)
    if engine == RAY and (lacking := lacks_room(simulation.backend())):
        raise ConfigError(lacking)
    num_clients = simulation.num_supernodes
    experiment = server.prepare(config, num_clients)
    if config.personal:
        server.check_engine(experiment.strategy, config.personal, engine)  # before there is a folder
    if why:
        log.info(why)
    if on_ray and engine != RAY:
        from fedapp.engine.workers import grid_of_workers  # Ray takes a second to import

        with grid_of_workers(simulation, way) as grid_on_ray:  # a run that has no room leaves no folder
            on_directory(directory := directory or RunDirectory(experiment.config))
            return server.run(grid_on_ray, experiment, should_stop, directory, observers)
    on_directory(directory := directory or RunDirectory(experiment.config))
    if engine != RAY:
        grid = make_grid(engine, num_clients, workers, way)
        return server.run(grid, experiment, should_stop, directory, observers)
    app, simulated = ServerApp(), threading.Event()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        server.run(grid, experiment, lambda: simulated.is_set() or should_stop(), directory, observers)

    try:
        simulate(app, client_app.app, simulation)
    finally:
        simulated.set()  # where Flower's simulation failed, the ServerApp's thread would wait for clients for ever
    return directory


def fit_to_machine(
    simulation: SimulationConfig, config: RunConfig, *, on_ray: bool = True
) -> SimulationConfig:
    """Drop the GPU fraction, with a warning, where there is no GPU; ConfigError if ``client-device`` needs a GPU."""
    has_gpu, wants_gpu = torch.cuda.is_available(), simulation.client_resources_num_gpus > 0
    if config.client_device == "cuda" and not has_gpu:
        raise ConfigError("client-device = 'cuda': this machine has no GPU; allowed are auto, cpu")
    if config.client_device == "cuda" and on_ray and not wants_gpu:
        raise ConfigError(
            "client-device = 'cuda': needs client-resources-num-gpus > 0 in the federation config"
        )
    if has_gpu or not wants_gpu or simulation.init_args_num_gpus or not on_ray:
        return simulation
    log.warning(
        "client-resources-num-gpus = %g: this machine has no GPU, clients run on the CPU "
        '(client-device = "cuda" makes this an error)',
        simulation.client_resources_num_gpus,
    )
    return simulation.model_copy(update={"client_resources_num_gpus": 0.0})


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


def _check_can_be_found(config: RunConfig) -> None:
    """Refuse parts of this process alone, or changed since their import, if clients run in other processes."""
    if names := in_process_names(config.flat()):
        key, name = next(iter(names.items()))
        raise ConfigError(
            f"{key} = {name!r}: is known in this process alone, and Ray's workers can't import it; put it into a "
            f"module, or take engine {' or '.join(IN_PROCESS)} without workers on Ray"
        )
    if changed := changed_since(config.flat()):
        raise ConfigError(changed)


def make_grid(engine: str, num_clients: int, workers: int = 0, way: Way | None = None) -> Grid:
    """Return the Grid of an engine in ``IN_PROCESS``; ``workers`` and ``way`` are for the vectorized one."""
    if engine == SEQUENTIAL:
        return SequentialGrid(client_app.app, num_clients)
    return VectorizedGrid(client_app.app, num_clients, Trainer(way, workers))
