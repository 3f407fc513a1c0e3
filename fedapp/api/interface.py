"""The Python interface: ``fedapp.run``, ``fedapp.sweep``, ``fedapp.load`` and ``fedapp.compare``."""

import contextlib
import io
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from fedapp.api.errors import short_errors
from fedapp.api.results import ComparedRuns, RunResult, SweepResult
from fedapp.api.values import MAPPINGS, as_value, as_values, in_python_names, is_divided, load_config
from fedapp.config import ConfigError, RunConfig, Value, read_run
from fedapp.config.options import SimulationConfig
from fedapp.data import DataError
from fedapp.engine.run import chosen_engine, run_on, stop_on_interrupt
from fedapp.federation import natural_clients
from fedapp.models import ModelError
from fedapp.names import AUTO, IN_PROCESS, VECTORIZED, Way
from fedapp.own import OwnPartError
from fedapp.server import Observer, RunDirectory
from fedapp.server.run_folder import goes_on_from
from fedapp.sweeps.command import default_folder
from fedapp.sweeps.looking import recorded
from fedapp.sweeps.plan import SweepPlan, checked
from fedapp.sweeps.point import LABEL, NUM_CLIENTS
from fedapp.sweeps.results import write_results
from fedapp.sweeps.runner import silent
from fedapp.sweeps.sweep import PLAN, make_sweep, outcome_in
from strategies.flower.exchange import never


@short_errors
def run(
    *,
    num_clients: int | None = None,
    engine: str = AUTO,
    way: Way | None = None,
    federation_config: Mapping[str, Value] | None = None,
    observers: Sequence[Observer] = (),
    quiet: bool = False,
    **keys: Any,
) -> RunResult:
    """Run a federation, record the run in its folder, and return its results.

    Parameters
    ----------
    num_clients : int, optional
        Clients of the simulation; default: 20, all natural clients, or those of the run that is resumed.
    engine : str
        What runs the clients: ``vectorized``, ``sequential``, ``ray``, or ``auto`` for what fits.
    way : str, optional
        How the vectorized engine trains; default: what suits the model and the device.
    federation_config : mapping, optional
        Ray's resources, such as ``{"client-resources-num-gpus": 0.1}``; ``{"workers": 4}`` of the vectorized engine.
    observers : sequence of `fedapp.server.Observer`
        Additional observers, called at every aggregation.
    quiet : bool
        Log warnings only.
    **keys
        Keys of the run config (docs/config.md) with underscores, whose values may be objects (docs/python.md):
        ``dataset`` arrays (x, y), (x, y, x_test, y_test), a mapping of them, or a Dataset; ``model``, ``loss`` and
        ``strategy`` a class or a function; ``metrics`` several of these; ``optimizer_options`` a mapping.

    Raises
    ------
    TypeError
        If there is no such key, or an observer is none.
    ConfigError, DataError, ModelError, OwnPartError
        If a value isn't allowed, or values contradict each other; raised before a client starts. All are ValueErrors.
    RunError, DivergedError, KeyboardInterrupt
        If the run fails, diverges or is interrupted; its folder stays, and the message names it.
    """
    if other := [each for each in observers if not isinstance(each, Observer)]:
        raise TypeError(f"observers: {other[0]!r} must be an object of a subclass of fedapp.server.Observer")
    config = load_config(keys)
    if num_clients is None and is_divided(keys.get("dataset")):
        num_clients = len(keys["dataset"])
    if engine == AUTO:
        engine = VECTORIZED if way else config.engine  # auto, but for a run that is resumed
    made: list[RunDirectory] = []
    with (
        silent(logging.WARNING) if quiet else contextlib.nullcontext(),
        _python_names(),
        _stopping() as should_stop,
    ):
        simulation = _simulation(config, num_clients, federation_config or {})
        _check_read(
            chosen_engine(engine, simulation, secure_sums=config.secure_sums)[0], way, federation_config or {}
        )
        try:
            directory = run_on(
                engine,
                config,
                simulation,
                way=way,
                should_stop=should_stop,
                observers=observers,
                on_directory=made.append,
            )
        except Exception as error:
            if made:
                error.add_note(f"What the run has recorded is in {made[0].path}")
            raise
    if should_stop():
        how = goes_on_from(directory.path)
        raise KeyboardInterrupt(f"what the run has recorded is in {directory.path}{'; ' * bool(how)}{how}")
    return RunResult(directory.path)


@contextlib.contextmanager
def _python_names() -> Iterator[None]:
    """Raise errors of a config with the keys' Python names."""
    try:
        yield
    except (ConfigError, DataError, ModelError, OwnPartError) as error:
        if (other := in_python_names(error)) is error:
            raise
        for note in getattr(error, "__notes__", ()):
            other.add_note(note)
        raise other from error.__cause__


def _check_read(engine: str, way: Way | None, federation_config: Mapping[str, Value]) -> None:
    """Refuse what the engine doesn't read."""
    on_workers = engine == VECTORIZED and federation_config.get("workers")
    if federation_config and engine in IN_PROCESS and not on_workers:
        raise ConfigError(
            f"federation_config: isn't read by engine {engine}; allowed are engine ray, and workers with engine "
            f"{VECTORIZED}"
        )
    if way is not None and engine != VECTORIZED:
        raise ConfigError(f"way = {way!r}: is a way of engine {VECTORIZED}; {engine} has one way")


def _simulation(
    config: RunConfig, num_clients: int | None, federation_config: Mapping[str, Value]
) -> SimulationConfig:
    """Return the federation config."""
    if num_clients is None and config.resume:
        num_clients = read_run(config.resume)[1]
    if num_clients is None:
        num_clients = natural_clients(config) or None
    clients = {} if num_clients is None else {"num-supernodes": as_value(NUM_CLIENTS, num_clients)}
    return SimulationConfig.read({**federation_config, **clients})


@short_errors
def sweep(
    *,
    out: str | Path | None = None,
    num_clients: int | None = None,
    engine: str = "",
    jobs: int = 1,
    tune: str | Sequence[str] = (),
    by: str = "",
    tuning_seeds: int = 0,
    title: str = "",
    quiet: bool = False,
    **keys: Any,
) -> SweepResult:
    """Run every combination of some values: ``fedapp.sweep(lr=[0.03, 0.1], seed=range(5))``.

    Finished runs aren't repeated: the same call goes on where an earlier one was stopped.

    Parameters
    ----------
    out : path, optional
        Folder of the sweep; default: one in ``results`` that is named by its plan.
    engine : str
        What runs the clients; empty: the key of the same name, by default ``auto``.
    jobs : int
        Number of runs at a time; 1: in this process. More run in separate processes; a script then needs
        ``if __name__ == "__main__"``.
    tune : str or sequence of str
        Axes that are tuned: each setting gets its best value, found on seeds that aren't reported.
    by, tuning_seeds
        The metric that decides which value is best, and the number of tuning seeds: `fedapp.sweeps.plan.SweepPlan`.
    **keys
        As for `run`; a key whose value is a list or a range is an axis. A mapping with a ``label`` in such a list
        sets several keys.

    Raises
    ------
    TypeError, ConfigError
        As for `run`. A run that fails or diverges raises nothing: its row has the status.
    RunError
        If a worker process was killed; the same call goes on.
    """
    if jobs < 1:
        raise ConfigError(f"jobs = {jobs!r}: must be a whole number >= 1")
    tuned = [axis.replace("_", "-") for axis in ([tune] if isinstance(tune, str) else tune)]
    content: dict[str, Any] = {"title": title, "tune": tuned, "by": by, "tuning-seeds": tuning_seeds}
    plan = checked("fedapp.sweep", content | _base_and_grid(keys, num_clients), SweepPlan)
    folder = Path(out).expanduser() if out is not None else default_folder(plan)
    console = Console(file=io.StringIO(), force_jupyter=False) if quiet else Console()
    try:
        outcome = make_sweep(plan, folder, engine=engine, jobs=0 if jobs == 1 else jobs, console=console)
    except ConfigError as error:
        raise in_python_names(error) from None
    write_results(outcome)
    return SweepResult(outcome)


def _base_and_grid(keys: Mapping[str, Any], num_clients: int | None) -> dict[str, Any]:
    """Return the values that all runs share, and the axes, which are keys with a list or a range."""
    axes = {name.replace("_", "-"): each for name, each in keys.items() if isinstance(each, list | range)}
    base = as_values({name: each for name, each in keys.items() if not isinstance(each, list | range)})
    return {
        "base": base | ({} if num_clients is None else {NUM_CLIENTS: as_value(NUM_CLIENTS, num_clients)}),
        "grid": {key: [_choice(key, each) for each in values] for key, values in axes.items()},
    }


def _choice(key: str, given: Any) -> Any:
    """Return a value of an axis; a mapping sets several keys, unless the axis is a key that takes a mapping."""
    if isinstance(given, Mapping) and (LABEL in given or key not in MAPPINGS):
        return {name.replace("_", "-"): as_value(name, each) for name, each in given.items()}
    return as_value(key, given)


@short_errors
def load(path: str | Path) -> RunResult | SweepResult:
    """Read a run or a sweep from its folder.

    Raises
    ------
    ConfigError
        If the folder holds neither.
    """
    folder = Path(path).expanduser()
    if (folder / PLAN).is_file():
        return SweepResult(outcome_in(folder))
    if not (folder / "config.toml").is_file():
        raise ConfigError(
            f"{folder}: no run is there, a folder with a config.toml, and no sweep, with a {PLAN}"
        )
    return RunResult(folder)


@short_errors
def compare(*runs: "RunResult | SweepResult | str | Path") -> ComparedRuns:
    """Compare runs at their end, and at equal time, equal rounds and equal bytes.

    Parameters
    ----------
    *runs
        Results, folders of runs or sweeps, or patterns such as ``"results/fedavg-*"``.

    Raises
    ------
    ConfigError
        If there are fewer than two runs with an evaluation.
    """
    return ComparedRuns(recorded([str(each if isinstance(each, str | Path) else each.path) for each in runs]))


@contextlib.contextmanager
def _stopping() -> Iterator[Callable[[], bool]]:
    """Yield a function that returns True once the run is interrupted; always False outside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield never
        return
    with stop_on_interrupt() as event:
        yield event.is_set
