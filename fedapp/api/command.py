"""A simulation from a command line: ``fedapp run``, and ``run_simulation.py``."""

import argparse
import logging
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fedapp.config import ConfigError, RunConfig, Value, in_keys, read_run
from fedapp.config.options import SimulationConfig, is_file, read_options, read_run_options, stated_options
from fedapp.config.words import read_words
from fedapp.data import DataError
from fedapp.logs import logging_as, plain_where_piped
from fedapp.meant import NUM_CLIENTS, clients_as
from fedapp.names import AUTO, ENGINES, VECTORIZED, WAYS

if TYPE_CHECKING:
    from fedapp.server import Observer

log = logging.getLogger("flwr.fedapp")

FINISHED, FAILED, INTERRUPTED = 0, 1, 130

_COUNTED = {NUM_CLIENTS, "num-supernodes"}  # what a federation config may call the number of clients

ENDINGS = """the exit code: 0 finished; 1 bad input, or a run that failed or diverged; 2 a wrong option;
130 interrupted. docs/runs.md says what a run leaves behind, and how it is repeated and resumed."""


def run(options: argparse.Namespace, observers: "Sequence[Observer]" = ()) -> int:
    """Simulate as the options of ``parser_of`` say; return the exit code.

    ``observers`` are additional observers, called at every aggregation.
    """
    plain_where_piped()
    try:
        values, stated, federation = _given(options)
        config = RunConfig.load(values)
        engine = VECTORIZED if options.way and config.engine == AUTO else config.engine
        if options.way and engine != VECTORIZED:
            raise ConfigError(
                f"--way {options.way}: is a way of engine {VECTORIZED}; engine {engine} has one way"
            )
    except (ConfigError, DataError) as error:  # before PyTorch and Ray are imported, which takes seconds
        return _failed(error, {})
    from fedapp.engine.run import chosen_engine, run_on, stop_on_interrupt
    from fedapp.federation import natural_clients
    from fedapp.server import USER_ERRORS
    from fedapp.server.run import own_parts_named

    try:
        with logging_as(config.log_format), stop_on_interrupt() as stop, own_parts_named(config):
            _say_clock(config, stated)
            if config.resume and not _COUNTED & federation.keys():
                federation = {NUM_CLIENTS: read_run(config.resume)[1], **federation}
            elif not _COUNTED & federation.keys() and (number := natural_clients(config)):
                federation = {NUM_CLIENTS: number, **federation}
            simulation = SimulationConfig.read(federation)
            simulation.say_unread(chosen_engine(engine, simulation, secure_sums=config.secure_sums)[0])
            run_on(
                engine,
                config,
                simulation,
                should_stop=stop.is_set,
                observers=observers,
                workers=simulation.init_args_num_cpus or 0,
                way=options.way,
            )
            return INTERRUPTED if stop.is_set() else FINISHED
    except USER_ERRORS as error:
        return _failed(error, federation)


def _given(options: argparse.Namespace) -> tuple[dict[str, Value], dict[str, Value], dict[str, Value]]:
    """Return all values of the run config, those of them that the user typed, and the federation config.

    Raises
    ------
    ConfigError
        If a text is of no form that is known, or a key is given twice.
    """
    files = [word for word in options.words if is_file(word) and "=" not in word]
    texts = [*(options.run_config or []), *files]
    values, clients_of_run = read_run_options("--run-config", texts)
    own = [word for word in options.words if word not in files]
    words = read_words(own) if own else {}
    pairs = read_options("--run-config", [text for text in texts if not is_file(text)])
    if options.engine:
        pairs |= {"engine": options.engine}
    if twice := next((key for key in words if key in pairs), ""):
        raise ConfigError(f"{twice} is given twice, as {pairs[twice]!r} and {words[twice]!r}")
    values |= pairs | words
    stated = stated_options("--run-config", texts) | pairs | words
    number = values.pop(NUM_CLIENTS, None)
    federation = read_options("--federation-config", options.federation_config)
    if number is None and not _COUNTED & federation.keys():
        number = clients_of_run
    return values, stated, federation if number is None else {NUM_CLIENTS: number, **federation}


def check_folder(out: Path) -> None:
    """Raise ConfigError if the folder of a file that is to be written isn't there."""
    if not out.absolute().parent.is_dir():
        raise ConfigError(f"--out = {str(out)!r}: the folder {str(out.parent)!r} isn't there; it must be")


def keys_of_words(words: Sequence[str]) -> tuple[dict[str, Value], Value | None]:
    """Return the values that words give, ``KEY=VALUE`` or TOML files, and the number of clients, if they give one.

    Raises
    ------
    ConfigError
        If a word is of no form that is known, or a key is given twice.
    """
    options = argparse.Namespace(words=list(words), run_config=None, federation_config=None, engine=None)
    values, _, federation = _given(options)
    return values, federation.get(NUM_CLIENTS)


def _failed(error: Exception, federation: Mapping[str, Value]) -> int:
    """Print an error with the key by which the number of clients was given."""
    name = next((key for key in federation if key in _COUNTED), NUM_CLIENTS)
    print(f"error: {clients_as(in_keys(error), name)}", file=sys.stderr)
    return FAILED


def _say_clock(config: RunConfig, stated: Mapping[str, Value]) -> None:
    """Warn if a run is in real time only because the run that it repeats was, on devices as a rule."""
    wanted = config.resume or "clock" in stated
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
        "words",
        nargs="*",
        metavar="KEY=VALUE | FILE.toml",
        help="keys of the run config, and num-clients (20, or all natural clients), as words: lr=0.1 num-clients=5",
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
        help="the same in one text, as flwr run takes it, again for more: what comes later takes the place of what a "
        "file has. RUN/config.toml repeats a run, with its clients and under a new name",
    )
    parser.add_argument(
        "--federation-config",
        action="append",
        metavar="'KEY=VALUE …' | FILE.toml",
        help="num-supernodes (20), client-resources-num-cpus (1), client-resources-num-gpus (0), init-args-…",
    )
    return parser
