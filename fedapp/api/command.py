"""A simulation from a command line: ``fedapp run``, and ``run_simulation.py``."""

import argparse
import logging
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fedapp.config import ConfigError, RunConfig, in_keys, read_run
from fedapp.config.options import SimulationConfig, read_options, read_run_options, stated_options
from fedapp.data import DataError
from fedapp.logs import logging_as, plain_where_piped
from fedapp.names import AUTO, ENGINES, VECTORIZED, WAYS

if TYPE_CHECKING:
    from fedapp.server import Observer

log = logging.getLogger("flwr.fedapp")

FINISHED, FAILED, INTERRUPTED = 0, 1, 130

ENDINGS = """the exit code: 0 finished; 1 bad input, or a run that failed or diverged; 2 a wrong option;
130 interrupted. docs/runs.md says what a run leaves behind, and how it is repeated and resumed."""


def run(options: argparse.Namespace, observers: "Sequence[Observer]" = ()) -> int:
    """Simulate as the options of ``parser_of`` say; return the exit code.

    ``observers`` are additional observers, called at every aggregation.
    """
    plain_where_piped()
    try:
        values, num_clients = read_run_options("--run-config", options.run_config)
        config = RunConfig.load(values | ({"engine": options.engine} if options.engine else {}))
        engine = VECTORIZED if options.way and config.engine == AUTO else config.engine
        if options.way and engine != VECTORIZED:
            raise ConfigError(
                f"--way {options.way}: is a way of engine {VECTORIZED}; engine {engine} has one way"
            )
    except (ConfigError, DataError) as error:  # before PyTorch and Ray are imported, which takes seconds
        return _failed(error)
    from fedapp.engine.run import chosen_engine, run_on, stop_on_interrupt
    from fedapp.server import USER_ERRORS

    try:
        with logging_as(config.log_format), stop_on_interrupt() as stop:
            _say_clock(config, options.run_config)
            given = read_options("--federation-config", options.federation_config)
            if config.resume:
                num_clients = read_run(config.resume)[1]
            federation = given if num_clients is None else {"num-supernodes": num_clients, **given}
            simulation = SimulationConfig.read(federation)
            simulation.say_unread(chosen_engine(engine, simulation)[0])
            run_on(
                engine,
                config,
                simulation,
                stopped=stop.is_set,
                observers=observers,
                workers=simulation.init_args_num_cpus or 0,
                way=options.way,
            )
            return INTERRUPTED if stop.is_set() else FINISHED
    except USER_ERRORS as error:
        return _failed(error)


def _failed(error: Exception) -> int:
    print(f"error: {in_keys(error)}", file=sys.stderr)
    return FAILED


def _say_clock(config: RunConfig, texts: list[str] | None) -> None:
    """Warn if a run is in real time only because the run that it repeats was, on devices as a rule."""
    wanted = config.resume or "clock" in stated_options("--run-config", texts)
    if config.clock == "wall" and not wanted:
        log.warning(
            "clock = wall: is that of the run to repeat, so that this one is in real time, too; clock=virtual isn't"
        )


def parser_of(program: str | None, description: str) -> argparse.ArgumentParser:
    """Return the parser of a simulation's options."""
    parser = argparse.ArgumentParser(
        prog=program,
        description=description,
        epilog=ENDINGS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--engine", choices=(AUTO, *ENGINES), help="what runs the clients: the key engine of the run config"
    )
    parser.add_argument(
        "--way",
        choices=WAYS,
        help="how the vectorized engine trains; default: what suits the model and the device",
    )
    parser.add_argument(
        "--run-config",
        "-c",
        action="append",
        metavar="'KEY=VALUE …' | FILE.toml",
        help="keys of the run config (fedapp keys), again for more: what comes later takes the place of what a file "
        "has. RUN/config.toml repeats a run, with its clients and under a new name",
    )
    parser.add_argument(
        "--federation-config",
        action="append",
        metavar="'KEY=VALUE …' | FILE.toml",
        help="num-supernodes (20), client-resources-num-cpus (1), client-resources-num-gpus (0), init-args-…",
    )
    return parser
