"""``fedapp reproduce``: from an experiment's name to its report."""

import importlib
import math
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markdown import Markdown

from fedapp.config import ConfigError
from fedapp.data import DataError
from fedapp.engine.in_process import IN_PROCESS
from fedapp.federation import absolute
from fedapp.reproduce.plan import Plan, plan_names, read_plan
from fedapp.reproduce.report import Report, write_report
from fedapp.reproduce.runner import run_missing
from fedapp.reproduce.runs import Runs

# A report function: the finished runs of a plan → the report, its figures in a folder.
Reporter = Callable[[Runs, Path], Report]

RUNS = "runs"


def reproduce(
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
    out: Annotated[Path, typer.Option(help="folder for the experiment's folder: its runs and report")] = Path(
        "results/reproduce"
    ),
) -> None:
    """Reproduce a figure or table of the papers: runs, figure, table, and a verdict on each published claim.

    A finished run is never repeated: the same command goes on where an earlier one was stopped.
    """
    if list_all or not name:
        show_list(Console())
        return
    if engine not in IN_PROCESS:
        raise SystemExit(f"error: --engine {engine}: allowed are {', '.join(IN_PROCESS)}")
    try:
        path = make(
            name, out, quick=quick, engine=engine, data_path=absolute(data_path), jobs=jobs, minutes=minutes,
            only=only, console=Console(),
        )  # fmt: skip
    except (ConfigError, DataError) as error:
        raise SystemExit(f"error: {error}") from None
    except KeyboardInterrupt:
        print("interrupted: the same command goes on from here", file=sys.stderr)
        raise SystemExit(130) from None
    print(path.absolute())


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
    console.print(Markdown((folder / "report.md").read_text("utf-8").split("\n## ")[-1]))
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
    """Make an experiment's runs and report in ``out/NAME`` (``NAME-quick``); return the path of the report.

    Raises
    ------
    ConfigError
        If there is no such experiment, or its file asks for something impossible.
    """
    plan = read_plan(name)
    folder = out.expanduser() / (Path(name).stem + "-quick" * quick)
    folder.mkdir(parents=True, exist_ok=True)
    if plan.is_study:
        study = importlib.import_module(f"fedapp.reproduce.{plan.report}")
        study.run(folder, quick=quick, data_path=data_path, engine=engine, jobs=jobs)
        return folder / "report.md"
    planned = plan.runs(quick=quick, data_path=data_path)
    began = time.monotonic()
    runs, failures = run_missing(
        planned, folder / RUNS, engine=engine, jobs=jobs, minutes=minutes, only=only, console=console
    )
    took = time.monotonic() - began
    module, _, function = plan.report.partition(":")
    reporter: Reporter = getattr(importlib.import_module(f"fedapp.reproduce.{module}"), function)
    report = reporter(runs, folder) if runs else Report()
    report.notes += [f"Not there: {name}: {_one_line(reason)}" for name, reason in sorted(failures.items())]
    return write_report(
        folder, report, title=plan.title, source=plan.source, claims=plan.claims,
        setting=_setting(plan, quick, runs, len(planned), engine, jobs, took),
    )  # fmt: skip


def _setting(
    plan: Plan, quick: bool, runs: Runs, planned: int, engine: str, jobs: int, took: float
) -> list[str]:
    seconds = {run.path: run.summary["wall-seconds"] for run in runs}
    work = f"{len(runs)} of {planned} runs, {sum(seconds.values()) / 60:.1f} minutes of work in all"
    return [
        f"**Quick**: {plan.quick.note}" if quick else "Full settings.",
        f"{work}; this time {took / 60:.1f} minutes, engine {engine}, {jobs} at a time",
    ]


def _one_line(text: str) -> str:
    return " ".join(text.split())


def show_list(console: Console) -> None:
    """Print every experiment: its name, title and claims."""
    for name in plan_names():
        plan = read_plan(name)
        claims = f" [{', '.join(plan.claims)}]" if plan.claims else ""
        console.print(f"{name:<16} {plan.title}{claims}", markup=False, highlight=False, soft_wrap=True)
