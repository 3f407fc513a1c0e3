"""``fedapp reproduce``: from an experiment's name to its report."""

import math
import os
import sys
import time
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Annotated

import typer
from click.core import ParameterSource
from rich.console import Console
from rich.markdown import Markdown

from fedapp.config import ConfigError
from fedapp.data import DataError
from fedapp.federation import absolute, dataset_of
from fedapp.names import IN_PROCESS
from fedapp.report.style import OPTIONS, figure_options
from fedapp.server import USER_ERRORS
from fedapp.sweeps.point import PlannedRun, is_finished
from fedapp.sweeps.runner import run_missing
from studies.reproduce.experiment import RUNS, collect, report_on
from studies.reproduce.plan import Plan, plan_names, read_plan
from studies.reproduce.store import FILE, read_stored
from studies.reproduce.summary import write_summary


@figure_options
def reproduce(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="an experiment (see --list), or a TOML file with one")] = "",
    list_all: Annotated[bool, typer.Option("--list", help="show every experiment and end")] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="minutes on two cores: fewer rounds, clients or seeds")
    ] = False,
    engine: Annotated[str, typer.Option(help=f"what runs the clients: {', '.join(IN_PROCESS)}")] = IN_PROCESS[
        -1
    ],
    data_path: Annotated[
        str, typer.Option(help="folder with the data sets; none: from the Hugging Face hub")
    ] = "",
    jobs: Annotated[int, typer.Option(min=1, help="runs at a time, each in a process of one thread")] = 1,
    only: Annotated[
        str, typer.Option(help="shell pattern: start only runs with such a name, e.g. 'MNIST*'")
    ] = "*",
    minutes: Annotated[
        float, typer.Option(min=0, help="start no run after that, and report on those there are")
    ] = math.inf,
    from_curves: Annotated[
        bool, typer.Option("--from-results", help="only the report, from curves.parquet: nothing is run")
    ] = False,
    summary: Annotated[
        bool, typer.Option("--summary", help="only the table of all verdicts, into README.md in --out")
    ] = False,
    out: Annotated[Path, typer.Option(help="folder for the experiment's folder: its runs and report")] = Path(
        "results/reproduce"
    ),
) -> None:
    """Reproduce a figure or table of the papers: runs, figure, table, and a verdict on each published claim.

    A finished run is never repeated: the same command goes on where an earlier one was stopped. What a report needs
    of the runs is kept in curves.parquet, from which --from-results makes it again.
    """
    try:
        _check_options(context)
        if not from_curves:
            _check_data_path(name, data_path)
    except ConfigError as error:
        raise SystemExit(f"error: {error}") from None
    if summary:
        print(write_summary(out).absolute())
        return
    if list_all or not name:
        show_list(Console())
        return
    if engine not in IN_PROCESS:
        raise SystemExit(f"error: --engine {engine}: allowed are {', '.join(IN_PROCESS)}")
    try:
        path = (
            from_results(name, out, quick=quick)
            if from_curves
            else make(
                name,
                out,
                quick=quick,
                engine=engine,
                data_path=absolute(data_path),
                jobs=jobs,
                minutes=minutes,
                only=only,
                console=Console(),
            )
        )
    except USER_ERRORS as error:
        raise SystemExit(f"error: {error}") from None
    except KeyboardInterrupt:
        print("interrupted: the same command goes on from here", file=sys.stderr)
        raise SystemExit(130) from None
    print(path.absolute())


# What else each of these reads.
_ALONE = {"summary": {"out"}, "list_all": set[str](), "from_curves": {"name", "quick", "out", *OPTIONS}}
_OF_RUNS = ("engine", "jobs", "only", "minutes")


def _check_options(context: typer.Context) -> None:
    """Refuse options that go unread beside others."""
    flags = {param.name or "": param.opts[0] for param in context.command.params}
    given = [name for name in flags if context.get_parameter_source(name) == ParameterSource.COMMANDLINE]
    for alone, beside in _ALONE.items():
        unread = [flags[name] for name in given if name != alone and name not in beside]
        if alone in given and unread:
            if alone != "from_curves":
                raise ConfigError(f"{flags[alone]}: doesn't read {', '.join(unread)}")
            print(f"not read with {flags[alone]}: {', '.join(unread)}", file=sys.stderr)
    if "name" in given and "summary" not in given:
        plan = read_plan(context.params["name"])
        unread = [flags[name] for name in _OF_RUNS if name in given]
        if plan.is_study and unread:
            raise ConfigError(
                f"{context.params['name']}: is a study without runs, which doesn't read {', '.join(unread)}"
            )
    elif given and not set(_ALONE) & set(given):
        raise ConfigError(
            f"{', '.join(flags[name] for name in given)}: of which experiment? --list names them"
        )


def _check_data_path(name: str, data_path: str) -> None:
    if not name or not data_path:
        return
    if not Path(absolute(data_path)).is_dir():
        raise ConfigError(f"--data-path {data_path!r}: no such folder")
    plan = read_plan(name)
    if not plan.reads_data(data_path):
        raise ConfigError(f"--data-path {data_path!r}: {name} needs no data but what comes with the app")


def compare(results: Path, engine: str = IN_PROCESS[-1]) -> Path:
    """Run every strategy on the embedded digits, print the table, and return the path of the figure."""
    console = Console()
    folder = make(
        "compare",
        results,
        quick=False,
        engine=engine,
        data_path="",
        jobs=os.cpu_count() or 1,
        console=console,
    ).parent
    report = (folder / "report.md").read_text("utf-8")
    from studies.reproduce.beyond import METHODS  # matplotlib is slow to import

    console.print(Markdown(next(part for part in report.split("\n## ") if part.startswith(f"{METHODS}\n"))))
    return folder / "comparison.png"


def make(
    name: str,
    out: Path,
    *,
    quick: bool,
    engine: str,
    data_path: str,
    jobs: int,
    console: Console,
    minutes: float = math.inf,
    only: str = "*",
) -> Path:
    """Make an experiment's runs, curves.parquet and report in ``out/NAME`` (``NAME-quick``).

    Returns
    -------
    Path
        The report.

    Raises
    ------
    ConfigError
        If there is no such experiment, or its file asks for something impossible.
    DataError
        If there are none of the data that its runs need.
    """
    plan, folder = _plan_and_folder(name, out, quick)
    folder.mkdir(parents=True, exist_ok=True)
    failures: dict[str, str] = {}
    until = time.monotonic() + 60 * minutes
    met: set[str] = set()
    # What is to be judged is known when what is tried is there.
    for judging in range(2 if plan.tuning else 1):
        have = read_stored(folder / FILE).curves
        planned = [run for run in plan.runs(data_path, have) if run.key not in met]
        if not judging:
            _check_only(plan, planned, data_path, only)
        met |= {run.key for run in planned}
        if planned and (not judging or any(fnmatch(run.name, only) for run in planned)):
            missing = [
                run for run in planned if run.key not in have and not is_finished(folder / RUNS / run.name)
            ]
            _check_data([run for run in missing if fnmatch(run.name, only)])
            failures |= run_missing(
                planned,
                folder / RUNS,
                engine=engine,
                jobs=jobs,
                minutes=max(0.0, until - time.monotonic()) / 60,
                only=only,
                console=console,
                have=have,
            )
        for remark in collect(plan, folder, data_path=data_path, failures=failures):
            console.print(remark, markup=False)
    report = report_on(plan, folder)
    if failures and not read_stored(folder / FILE).curves:
        name, reason = next(iter(failures.items()))
        raise ConfigError(
            f"every run failed, {name} with: {reason}; {report.absolute()} is a report on nothing"
        )
    return report


def _check_only(plan: Plan, planned: Sequence[PlannedRun], data_path: str, only: str) -> None:
    """Refuse a pattern of runs to judge, before it is known of which."""
    if not any(fnmatch(run.name, only) for run in planned) and any(
        fnmatch(run.name, only) for run in plan.runs(data_path)
    ):
        raise ConfigError(
            f"--only {only}: which of these are judged is known when {planned[0].name} and others like it are there"
        )


def _check_data(missing: Sequence[PlannedRun]) -> None:
    """Refuse runs of which none can be made, before each has tried to download its data by itself."""
    problems = []
    for run in {(run.config.dataset, run.config.data_path): run for run in missing}.values():
        try:
            dataset_of(run.config, run.num_clients)
        except DataError as error:
            problems.append(error)
        else:
            return
    if problems:
        raise problems[0]


def from_results(name: str, out: Path, *, quick: bool) -> Path:
    """Make an experiment's report from ``curves.parquet`` in its folder alone; return its path.

    Raises
    ------
    ConfigError
        If there is no such experiment, or no such file.
    """
    plan, folder = _plan_and_folder(name, out, quick)
    if not (folder / FILE).exists():
        raise ConfigError(f"--from-results: there is no {folder / FILE}")
    return report_on(plan, folder)


def _plan_and_folder(name: str, out: Path, quick: bool) -> tuple[Plan, Path]:
    plan = read_plan(name)
    return plan.as_quick() if quick else plan, out.expanduser() / (Path(name).stem + "-quick" * quick)


def show_list(console: Console) -> None:
    """Print every experiment: its name, title and claims."""
    width = max(map(len, plan_names()))
    for name in plan_names():
        plan = read_plan(name)
        claims = f" [{', '.join(plan.claims)}]" if plan.claims else ""
        console.print(f"{name:<{width}} {plan.title}{claims}", markup=False, highlight=False, soft_wrap=True)
