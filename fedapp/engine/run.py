"""One run on an engine of this machine, from Python objects: what the commands and the Python interface stand on."""

from collections.abc import Callable, Sequence

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedapp import client_app, federation, server
from fedapp.config import ConfigError, RunConfig
from fedapp.engine.in_process import make_grid
from fedapp.engine.ray import SimulationConfig, simulate
from fedapp.names import ENGINES, IN_PROCESS, RAY, Way
from fedapp.own import changed_since, in_process_names
from fedapp.server import Observer, RunDirectory
from fedapp.training.gpu import torch_as_it_was
from strategies.flower.exchange import never


def check_engine(engine: str) -> None:
    """Refuse an engine that there isn't.

    Raises
    ------
    ConfigError
        If it is none of `ENGINES`.
    """
    if engine not in ENGINES:
        raise ConfigError(f"engine = {engine!r}: allowed are {', '.join(ENGINES)}")


@torch_as_it_was()
def run_on(
    engine: str,
    config: RunConfig,
    simulation: SimulationConfig,
    *,
    directory: RunDirectory | None = None,
    stopped: Callable[[], bool] = never,
    observers: Sequence[Observer] = (),
    on_directory: Callable[[RunDirectory], None] = lambda _: None,
    workers: int = 0,
    way: Way | None = None,
) -> RunDirectory:
    """Make a run, recorded.

    Parameters
    ----------
    engine : str
        One of `ENGINES`.
    simulation : SimulationConfig
        Says how many clients there are; all else is Ray's.
    directory : RunDirectory, optional
        Where to; by default one is made as the config says.
    on_directory : callable
        Told where the run is recorded, once that is known.
    workers, way : int, Way
        The vectorized engine's, in this process: see `fedapp.engine.in_process.make_grid`.

    Raises
    ------
    ConfigError, DataError, ModelError
        What can't be run, before a client starts; and what a strategy raises when the run fails or diverges.
    """
    check_engine(engine)
    federation.renew()
    on_ray = engine == RAY or (engine == IN_PROCESS[-1] and simulation.workers > 0)
    if on_ray:
        _check_can_be_found(config)
    simulation = simulation.fit_to_machine(config, on_ray=on_ray)
    num_clients = simulation.num_supernodes
    experiment = server.prepare(config, num_clients)
    if on_ray and engine != RAY:
        from fedapp.engine.workers import grid_of_workers  # Ray takes a second to import

        with grid_of_workers(simulation, way) as grid_on_ray:  # a run that has no room leaves no folder
            on_directory(directory := directory or RunDirectory(config))
            return server.run(grid_on_ray, experiment, stopped, directory, observers)
    on_directory(directory := directory or RunDirectory(config))
    if engine != RAY:
        grid = make_grid(engine, num_clients, workers, way)
        return server.run(grid, experiment, stopped, directory, observers)
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        server.run(grid, experiment, stopped, directory, observers)

    simulate(app, client_app.app, simulation)
    return directory


def _check_can_be_found(config: RunConfig) -> None:
    """Refuse parts that are in this process alone, or as they are here, where clients are in others."""
    if names := in_process_names(config.flat()):
        key, name = next(iter(names.items()))
        raise ConfigError(
            f"{key} = {name!r}: is known in this process alone, and Ray's workers can't import it; put it into a "
            f"module, or take engine {' or '.join(IN_PROCESS)}"
        )
    if changed := changed_since(config.flat()):
        raise ConfigError(changed)
