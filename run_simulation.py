"""Simulate the federation: the main job, from Python.

    python run_simulation.py
    python run_simulation.py --run-config 'strategy="fedprox" proximal-mu=0.1'
    python run_simulation.py --run-config my_run.toml --federation-config 'num-supernodes=100'
    python run_simulation.py --compare

The options and their syntax are those of ``flwr run``, and the result is the same. Without ``--compare`` it is the
command ``fedapp run``.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from fedapp.api import command
from fedapp.names import IN_PROCESS
from fedapp.server import USER_ERRORS, Observer
from fedapp.terminal import show_in_ascii

# What --compare has no use for: its runs' keys stand in studies/experiments/compare.toml.
NOT_COMPARED = ("run_config", "federation_config", "way")


def main(arguments: list[str] | None = None, observers: Sequence[Observer] = ()) -> int:
    """Run the command line; return the exit code: 0 finished, 1 bad input, failed or diverged, 130 interrupted.

    ``observers`` are additional observers, called at every aggregation.
    """
    show_in_ascii()
    parser = command.parser_of(None, __doc__ or "")
    parser.add_argument(
        "--compare",
        action="store_true",
        help="run every strategy on the embedded digits: a table and a figure, in results/compare",
    )
    options = parser.parse_args(arguments)
    if not options.compare:
        return command.run(options, observers)
    if options.engine == "ray":
        print(f"error: --engine ray: --compare takes {' or '.join(IN_PROCESS)}", file=sys.stderr)
        return 1
    for name in NOT_COMPARED:
        if getattr(options, name):
            option = "--" + name.replace("_", "-")
            why = "--compare has settings of its own, in studies/experiments/compare.toml"
            print(f"error: {option}: {why}", file=sys.stderr)
            return 1
    from studies.reproduce.command import compare

    try:
        print(compare(Path("results"), options.engine or IN_PROCESS[-1]).absolute())
    except USER_ERRORS as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
