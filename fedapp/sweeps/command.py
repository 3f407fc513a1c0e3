"""``fedapp sweep``: reads the command line, makes the sweep, and shows its outcome."""

import hashlib
import json
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from fedapp.config import ConfigError, Value
from fedapp.config.options import SimulationConfig, read_options, read_run_options, stated_options
from fedapp.names import AUTO, ENGINES
from fedapp.report.style import figure_options
from fedapp.server import USER_ERRORS
from fedapp.sweeps.axes import completed_axis, read_axes
from fedapp.sweeps.plan import TAKEN, SweepPlan, checked, keys_of, read_file
from fedapp.sweeps.point import NUM_CLIENTS
from fedapp.sweeps.results import remarks, table, write_results
from fedapp.sweeps.shards import Shard
from fedapp.sweeps.sweep import Outcome, make_shard, make_sweep, merge_shards, missing_text


def _engines(incomplete: str) -> list[str]:
    return [name for name in (AUTO, *ENGINES) if name.startswith(incomplete)]


RunOptions = Annotated[
    list[str] | None,
    typer.Option(
        "--run-config", "-c", help="keys of all runs: 'KEY=VALUE …' or a TOML file, also a run's config.toml"
    ),
]
FederationOptions = Annotated[list[str] | None, typer.Option(help="num-supernodes, of all runs")]


@figure_options
def sweep(
    axes: Annotated[
        list[str],
        typer.Argument(
            metavar="KEY=VALUE,VALUE … | PLAN.toml",
            help="values of a key of the run config, or of num-clients; 0-4: all from 0 to 4",
            autocompletion=completed_axis,
        ),
    ],
    run_config: RunOptions = None,
    federation_config: FederationOptions = None,
    engine: Annotated[
        str,
        typer.Option(
            help=f"what runs the clients: {', '.join((AUTO, *ENGINES))}; default: the key engine",
            autocompletion=_engines,
        ),
    ] = "",
    jobs: Annotated[
        int,
        typer.Option(
            min=0,
            help="runs at a time, each in a process of one thread; 0: one after the other, in this process",
        ),
    ] = 1,
    tune: Annotated[
        list[str] | None,
        typer.Option(
            help="an axis: each setting gets its best value, found on seeds that aren't reported; may be used again"
        ),
    ] = None,
    by: Annotated[
        str, typer.Option(help="metric that says what is best at a run's end; default: its first")
    ] = "",
    tuning_seeds: Annotated[
        int,
        typer.Option(min=0, help="number of seeds to tune on; 0: as many as are reported, and 3 at most"),
    ] = 0,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", help="folder of the sweep; default: one in results/ that is named by its plan"
        ),
    ] = None,
    shard: Annotated[
        str,
        typer.Option(
            metavar="NUMBER/COUNT", help="make one part of the runs alone, such as 3/16: for job arrays"
        ),
    ] = "",
    merge: Annotated[
        bool, typer.Option("--merge", help="make no run: table, figure and files of the runs of all shards")
    ] = False,
) -> None:
    """Run every combination of some values: a table, a figure and tidy files of what came of them.

    A run that came to its end is never repeated: the same command goes on where an earlier one was stopped, and with
    -o a larger sweep takes over the runs of a smaller one. A run that fails or diverges is a row that says so; the
    exit code is 1 if a run failed, or none came to its end.

    With --shard one process makes a part of the runs, while others make the other parts in the same folder; the same
    command with --merge in place of --shard then shows what came of all.
    """
    try:
        options = {"tune": tune, "by": by, "tuning-seeds": tuning_seeds}
        part = Shard.read(shard) if shard else None
        if part and merge:
            raise ConfigError(
                f"--shard {shard} and --merge: one at a time; --merge comes after the last shard"
            )
        plan = plan_of(axes, run_config, federation_config, options)
        folder = out.expanduser() if out else default_folder(plan)
        console = Console()
        if part:
            made, failed = make_shard(plan, folder, part, engine=engine, jobs=jobs, console=console)
        else:
            outcome = (
                merge_shards(plan, folder)
                if merge
                else make_sweep(plan, folder, engine=engine, jobs=jobs, console=console)
            )
            paths = write_results(outcome)
    except (*USER_ERRORS, OSError) as error:  # such as a folder that can't be written
        raise SystemExit(f"error: {error}") from None
    except KeyboardInterrupt:
        print("interrupted: the same command goes on from here", file=sys.stderr)
        raise SystemExit(130) from None
    if part:
        _end_shard(part, folder, made, failed)
        return
    show(outcome, console)
    for path in paths:
        print(path.absolute())
    if merge and (missing := missing_text(outcome)):
        raise SystemExit(f"error: {missing}")
    if not outcome.finished:
        raise SystemExit("error: no run came to its end")
    if failed := outcome.failed:
        raise SystemExit(_failed_text(failed, len(outcome.all_runs)))


def _end_shard(shard: Shard, folder: Path, made: int, failed: int) -> None:
    """Say how many of a shard's runs came to their end; end the process if one failed."""
    has = (
        f"{made - failed} of {made} runs came to their end"
        if made
        else "has no run: there are fewer than shards"
    )
    print(f"shard {shard}: {has}; --merge in place of --shard shows what came of all, in {folder.absolute()}")
    if failed:
        raise SystemExit(_failed_text(failed, made))


def _failed_text(failed: int, made: int) -> str:
    return f"error: {failed} of {made} runs failed; the same command tries them again"


def show(outcome: Outcome, console: Console) -> None:
    """Print the table of all cells, the remarks on them, and the verdict."""
    console.print(table(outcome))
    for note in remarks(outcome):
        console.print(note, style="yellow", markup=False, highlight=False)
    for line in outcome.verdict_lines:
        console.print(line, markup=False, highlight=False)


def plan_of(
    axes: list[str],
    run_config: list[str] | None,
    federation_config: list[str] | None,
    options: dict[str, Any],
) -> SweepPlan:
    """Return the plan that a command line makes, or the file it names with what stands beside it.

    Raises
    ------
    ConfigError
        If something isn't as it should be, or is given twice.
    """
    files = [each for each in axes if each.endswith(".toml") and "=" not in each]
    if len(files) > 1:
        raise ConfigError(f"{' '.join(files)}: one plan at a time")
    content: dict[str, Any] = {"base": {}, "grid": {}}
    if files:
        path = Path(files[0]).expanduser()
        if not path.is_file():
            raise ConfigError(f"{files[0]}: no such file")
        content = read_file(path, SweepPlan).model_dump(by_alias=True)
    grid = read_axes([each for each in axes if each not in files])
    content["grid"] = {**content["grid"], **grid}
    axes_keys = {key for axis, choices in content["grid"].items() for key in keys_of(axis, choices)}
    of_a_run, stated = _of_all(run_config, axes_keys)
    # What the command line makes an axis is no longer the same for all.
    of_plan = {key: value for key, value in content["base"].items() if key not in grid}
    content["base"] = of_a_run | of_plan | stated | _clients(federation_config)
    content |= {key: value for key, value in options.items() if value}
    return checked(" ".join(axes), content, SweepPlan)


def _of_all(
    run_config: list[str] | None, of_axes: Collection[str]
) -> tuple[dict[str, Value], dict[str, Value]]:
    """Return the keys of all runs: from a run's config.toml, which has every key, and the keys that the user wrote.

    Keys of a config.toml that are the sweep's own, or on an axis, are left out. Keys in a file of the user's are left
    out if they are on an axis.
    """
    given, num_clients = read_run_options("--run-config", run_config)
    clients = {} if num_clients is None else {NUM_CLIENTS: num_clients}
    stated = stated_options("--run-config", run_config)
    every = {**clients, **given}
    of_a_run = {key: value for key, value in every.items() if key not in (*stated, *TAKEN, *of_axes)}
    beside = read_options("--run-config", [each for each in run_config or [] if not each.endswith(".toml")])
    return of_a_run, {key: every[key] for key in stated if key in beside or key not in of_axes}


def _clients(federation_config: list[str] | None) -> dict[str, Value]:
    """Return the number of clients, if it is given; nothing else of a federation config is read here."""
    given = read_options("--federation-config", federation_config)
    simulation = SimulationConfig.read(given)
    if others := [key for key in given if key != "num-supernodes"]:
        raise ConfigError(
            f"--federation-config {others[0]}: isn't read by a sweep; allowed is num-supernodes"
        )
    return {NUM_CLIENTS: simulation.num_supernodes} if given else {}


def default_folder(plan: SweepPlan) -> Path:
    """Return a folder whose name has the axes, and a digest of the plan."""
    content = json.dumps(plan.model_dump(by_alias=True), sort_keys=True)
    digest = hashlib.sha256(content.encode()).hexdigest()[:6]
    return Path("results") / "-".join(["sweep", *list(plan.grid)[:4], digest]).replace("/", "-")
