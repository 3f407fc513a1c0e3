"""Simulate the federation: the main job, from Python.

    python run_simulation.py
    python run_simulation.py --run-config 'strategy="fedprox" proximal-mu=0.1'
    python run_simulation.py --run-config my_run.toml --federation-config 'num-supernodes=100'
    python run_simulation.py --compare

The options and their syntax are those of ``flwr run``, and the result is the same.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedapp import client_app, server
from fedapp.config import RunConfig, in_keys, read_run
from fedapp.config.options import read_options
from fedapp.engine.in_process import IN_PROCESS, make_grid
from fedapp.engine.ray import SimulationConfig, simulate, stop_on_interrupt
from fedapp.server import Observer, RunDirectory
from fedapp.server.logs import logging_as
from fedapp.training.choose import WAYS


def main(arguments: list[str] | None = None, observers: Sequence[Observer] = ()) -> int:
    """Run the command line; return the exit code: 0 finished, 1 bad input, 130 interrupted.

    ``observers`` are told of every aggregation beside the run's own.
    """
    options = _parser().parse_args(arguments)
    if options.compare:
        from research.reproduce.command import compare

        print(
            compare(Path("results"), IN_PROCESS[-1] if options.engine == "ray" else options.engine).absolute()
        )
        return 0
    try:
        config = RunConfig.load(read_options("--run-config", options.run_config))
        with logging_as(config.log_format):
            return _simulate(config, options, observers)
    except server.USER_ERRORS as error:
        print(f"error: {in_keys(error)}", file=sys.stderr)
        return 1


def _simulate(config: RunConfig, options: argparse.Namespace, observers: Sequence[Observer]) -> int:
    federation = read_options("--federation-config", options.federation_config)
    if config.resume:
        federation = {"num-supernodes": read_run(config.resume)[1], **federation}
    simulation = SimulationConfig.read(federation)
    simulation = simulation.fit_to_machine(config, on_ray=options.engine == "ray")
    experiment = server.prepare(config, simulation.num_supernodes)
    directory = RunDirectory(config)
    with stop_on_interrupt() as stop:
        if options.engine != "ray":
            cores = simulation.init_args_num_cpus or 0
            grid = make_grid(options.engine, simulation.num_supernodes, cores, options.way)
            server.run(grid, experiment, stop.is_set, directory, observers)
        else:
            app = ServerApp()

            @app.main()
            def run(grid: Grid, context: Context) -> None:
                server.run(grid, experiment, stop.is_set, directory, observers)

            simulate(app, client_app.app, simulation)
        return 130 if stop.is_set() else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engine", choices=("ray", *IN_PROCESS), default="ray", help="what runs the clients")
    parser.add_argument(
        "--way",
        choices=WAYS,
        help="how the vectorized engine trains; default: what suits the model and the device",
    )
    parser.add_argument(
        "--compare",
        action="store_true",
        help="run every strategy on the embedded digits: a table and a figure, in results/compare",
    )
    parser.add_argument(
        "--run-config",
        "-c",
        action="append",
        metavar="'KEY=VALUE …' | FILE.toml",
        help="keys of [tool.flwr.app.config] in pyproject.toml",
    )
    parser.add_argument(
        "--federation-config",
        action="append",
        metavar="'KEY=VALUE …' | FILE.toml",
        help="num-supernodes (20), client-resources-num-cpus (1), client-resources-num-gpus (0), init-args-…",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
