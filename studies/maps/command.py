"""``fedapp map``: from a map's file to the picture of which method wins where."""

import math
import re
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from fedapp.config import ConfigError, Value, defaults
from fedapp.federation import absolute
from fedapp.names import IN_PROCESS
from fedapp.report.differences import DATA_PATH
from fedapp.report.style import figure_options
from fedapp.server import USER_ERRORS
from fedapp.sweeps.plan import checked, read_file
from fedapp.sweeps.point import DIVERGED
from studies.maps.curves import FILE, MapCurve, metric_in, read_curves
from studies.maps.making import MapRuns
from studies.maps.plan import MapPlan

EMBEDDED = re.compile(r"digits|synthetic(-iid|:.*)?")
DATASET = "dataset"
MOST_TOLD = 10  # runs that failed


@figure_options
def map_command(
    plan_file: Annotated[Path, typer.Argument(metavar="MAP.toml", help="the map: see docs/map.md")],
    data_path: Annotated[str, typer.Option(help="folder with the data; none: as the map's file says")] = "",
    out: Annotated[Path | None, typer.Option("--out", "-o", help="its folder; default: results/NAME")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="runs at a time, each in a process of one thread")] = 1,
    engine: Annotated[str, typer.Option(help=f"what runs the clients: {', '.join(IN_PROCESS)}")] = IN_PROCESS[
        -1
    ],
    minutes: Annotated[
        float, typer.Option(min=0, help="start no run after that, and report on those there are")
    ] = math.inf,
    quick: Annotated[
        bool, typer.Option("--quick", help="the small map that the file's [quick] says")
    ] = False,
    from_results: Annotated[
        bool, typer.Option("--from-results", help=f"only picture and tables, from {FILE}: nothing is run")
    ] = False,
) -> None:
    """Which method wins where: over how unlike the clients' data are, and how unlike their speed.

    Says how many cells are complete and, by the runs so far, how long the others take. A run that came to its end is
    never repeated: the same command goes on where an earlier one was stopped.
    """
    from studies.maps.report import write_report

    try:
        plan = _plan_of(plan_file, data_path, quick=quick)
        folder = (out or Path("results") / plan_file.stem).expanduser()
        if from_results:
            _name_unread(
                data_path=bool(data_path),
                jobs=jobs != 1,
                engine=engine != IN_PROCESS[-1],
                minutes=minutes < math.inf,
            )
            if not (folder / FILE).is_file():
                raise ConfigError(f"--from-results: there is no {folder / FILE}")
            if (kept := metric_in(folder / FILE)) != plan.metric:
                raise ConfigError(f"--from-results: {folder / FILE} has {kept}, not {plan.metric}")
            curves, versions = read_curves(folder / FILE)
        else:
            curves, versions = _made(plan, folder, engine, jobs, minutes)
        if not curves:
            raise ConfigError(f"{plan_file}: no run came to its end")
        paths = write_report(plan, curves, versions, folder)
    except (*USER_ERRORS, OSError) as error:  # such as a folder that can't be written
        raise SystemExit(f"error: {error}") from None
    except KeyboardInterrupt:
        print("interrupted: the same command goes on from here", file=sys.stderr)
        raise SystemExit(130) from None
    for path in paths:
        print(path.absolute())


def _made(
    plan: MapPlan, folder: Path, engine: str, jobs: int, minutes: float
) -> tuple[dict[str, MapCurve], dict[str, str]]:
    """Make the runs that a map lacks and say which failed; return the curves that there are, and the versions."""
    if engine not in IN_PROCESS:
        raise ConfigError(f"--engine {engine}: allowed are {', '.join(IN_PROCESS)}")
    folder.mkdir(parents=True, exist_ok=True)
    runs = MapRuns(plan, folder, engine=engine, jobs=jobs, console=Console(), minutes=minutes)
    runs.make()
    failed = {name: reason for name, reason in runs.failures.items() if not reason.startswith(DIVERGED)}
    for name, reason in list(failed.items())[:MOST_TOLD]:
        print(f"failed: {name}: {reason}", file=sys.stderr)
    if len(failed) > MOST_TOLD:
        print(f"and {len(failed) - MOST_TOLD} more failed", file=sys.stderr)
    return runs.curves, runs.versions


def _plan_of(path: Path, data_path: str, *, quick: bool) -> MapPlan:
    """Read a map's file, with what ``--quick`` leaves of it and the folder of the data.

    Raises
    ------
    ConfigError
        If it isn't as it should be.
    """
    if not path.expanduser().is_file():
        raise ConfigError(f"{path}: no such file")
    plan = read_file(path.expanduser(), MapPlan)
    if quick:
        plan = checked(f"{path}: --quick", plan.quick_content(), MapPlan)
    if not data_path:
        return plan
    folder = Path(absolute(data_path))
    if not folder.exists():
        raise ConfigError(f"--data-path {data_path!r}: no such folder or file")
    if DATA_PATH in plan.base:
        raise ConfigError(f"--data-path {data_path!r}: {path} has a {DATA_PATH} of its own")
    found = _with_data(plan, str(folder))
    if str(folder) not in [
        keys.get(DATA_PATH) for keys in (found.base, *(p.keys for p in found.problems.values()))
    ]:
        raise ConfigError(f"--data-path {data_path!r}: {path} needs no data but what comes with the app")
    return found


def _with_data(plan: MapPlan, folder: str) -> MapPlan:
    """Return a map with the folder of its data, for the datasets that are read from one."""

    def beside(dataset: Value) -> dict[str, Value]:
        return {} if EMBEDDED.fullmatch(str(dataset)) else {DATA_PATH: folder}

    base = {**plan.base, **beside(plan.base.get(DATASET, defaults()[DATASET]))}
    problems = {}
    for name, each in plan.problems.items():
        own: dict[str, Value] = {}
        if (
            DATASET in each.keys
        ):  # one that comes with the app is read from no folder, whatever all others have
            own = {**dict.fromkeys(base.keys() & {DATA_PATH}, ""), **beside(each.keys[DATASET])}
        problems[name] = each.model_copy(update={"keys": {**own, **each.keys}})
    return plan.model_copy(update={"base": base, "problems": problems})


def _name_unread(**options: bool) -> None:
    """Say which options go unread beside ``--from-results``."""
    unread = [f"--{name.replace('_', '-')}" for name, given in options.items() if given]
    if unread:
        print(f"not read with --from-results: {', '.join(unread)}", file=sys.stderr)
