"""Measure how fast federated training is simulated: this app beside stock Flower, other simulators and bare loops.

Each contender runs in a process of its own, in turn (A B C A B C ...); what is shown are medians over the repeats.
Seconds are those between the first round and the last but one, so neither start-up nor evaluation is in them. The
command fails if the contenders' accuracies differ by more than a point.
"""

import json
import os
import shutil
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer
from rich.console import Console

from fedapp.data.errors import DataError
from studies.benchmarks import measure as measuring
from studies.benchmarks.measure import ContenderError, Measurement
from studies.benchmarks.report import draw, tables, write_results
from studies.benchmarks.results import JsonObject, differences, report, rows_of
from studies.benchmarks.sentences import MEASURED, fill_pages
from studies.benchmarks.workloads import (
    CONTENDERS,
    DEFAULT_CONTENDERS,
    PACKAGES,
    SCALES,
    SMALL_SCALES,
    WORKLOADS,
    Data,
    Workload,
    scaled,
)

HERE = Path(__file__).parent
SCALING, SMALL = "scaling", "small"

console = Console()
app = typer.Typer(add_completion=False, help=__doc__)


@app.command(help=__doc__)
def main(
    workloads: Annotated[
        str,
        typer.Option(
            help=f"of {', '.join(WORKLOADS)}, {SCALING} (W1 with 10 samples each, up to 100,000 clients) and "
            f"{SMALL} (of 8x8 pixels, up to a million: 2 GiB of disk, 6 GiB of memory), comma-separated"
        ),
    ] = ",".join((*WORKLOADS, SCALING)),
    contenders: Annotated[str, typer.Option(help=f"of {', '.join(CONTENDERS)}, comma-separated")] = ",".join(
        DEFAULT_CONTENDERS
    ),
    rounds: Annotated[
        int | None, typer.Option(min=3, help="rounds, but of W4; default: each workload's own")
    ] = None,
    events: Annotated[
        int | None, typer.Option(min=1002, help="aggregations of W4; default: 20,000, on Ray 2,500")
    ] = None,
    repeats: Annotated[
        int | None,
        typer.Option(min=1, help="runs of each contender; default: W1, W2 3, W3, W5, W6 2, others 1"),
    ] = None,
    max_clients: Annotated[
        int, typer.Option(min=SCALES[0], help=f"most clients of {SCALING} and {SMALL}")
    ] = SMALL_SCALES[-1],
    data_path: Annotated[
        Path | None, typer.Option(help="MNIST or CIFAR-10 as .npz, in place of what is generated")
    ] = None,
    out: Annotated[Path, typer.Option(help="JSON to write; the figure goes beside it")] = HERE
    / "results/latest.json",
    results: Annotated[
        bool,
        typer.Option(
            "--write-results",
            help="put the tables into studies/benchmarks/RESULTS.md, the JSON beside it, and its figures of speed "
            "into README and docs",
        ),
    ] = False,
    timeout: Annotated[float, typer.Option(min=1, help="seconds that one run may take")] = 1800,
) -> None:
    """Run the command line."""
    names = _choices("--workloads", workloads, (*WORKLOADS, SCALING, SMALL))
    chosen = _installed(_choices("--contenders", contenders, tuple(CONTENDERS)))
    compared, scales = _named(names, max_clients)
    compared = [_adapted(workload, rounds, events, repeats) for workload in compared]
    scales = [_adapted(workload, rounds, events, 1) for workload in scales]
    if all(set(chosen) <= set(workload.without) for workload in (*compared, *scales)):
        raise typer.BadParameter(f"{contenders} can do none of {workloads}", param_hint="--contenders")
    try:
        with TemporaryDirectory(prefix="fedapp-bench-") as folder:
            # What is prepared from generated data goes with it.
            os.environ["FEDAPP_CACHE"] = str(Path(folder, "cache"))
            data = Data(Path(folder), data_path)
            rows, problems = measured_rows(compared, chosen, data, timeout)
            scaling, more = measured_rows(scales, chosen, data, timeout)
    except DataError as error:
        sys.exit(f"error: {error}")
    problems += more
    if not rows and not scaling:
        sys.exit("error: " + "\n".join(problems))
    whole = report(rows, scaling, problems, data_path.name if data_path else "generated images")
    _show(whole, out)
    if results:
        try:
            fill_pages(whole)
        except ValueError as error:
            sys.exit("error: " + "\n".join([*problems, f"--write-results: nothing is put in: {error}"]))
        write_results(whole, HERE / "RESULTS.md")
        shutil.copy(out, MEASURED)
    if problems:
        sys.exit("error: " + "\n".join(problems))


def _show(whole: JsonObject, out: Path) -> None:
    """Write a report and its figure, and show its tables."""
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(whole, indent=2) + "\n", "utf-8")
    for table in tables(whole):
        console.print(table)
    print(out, draw(whole, out.with_suffix(".png")), sep="\n")


def _named(names: list[str], most: int) -> tuple[list[Workload], list[Workload]]:
    """Return the workloads to compare, and those to draw as curves, with at most ``most`` clients."""
    small = [scaled(number, small=True) for number in SMALL_SCALES if number <= most and SMALL in names]
    scales = [scaled(number) for number in SCALES if number <= most and SCALING in names]
    return [WORKLOADS[name] for name in names if name in WORKLOADS] + small, scales


def measured_rows(
    workloads: list[Workload], contenders: list[str], data: Data, timeout: float
) -> tuple[list[JsonObject], list[str]]:
    """Measure workloads; return their rows, and what is wrong with the accuracies.

    A workload of which a contender fails has no rows; those of the others, which may have taken hours, are kept.
    """
    rows: list[JsonObject] = []
    problems: list[str] = []
    for workload in workloads:
        try:
            found = rows_of(workload, interleaved(workload, contenders, data, timeout))
        except ContenderError as error:
            problems.append(f"{workload.name}: {error}")
            continue
        rows += found
        problems += differences(found)
    return rows, problems


def interleaved(
    workload: Workload, contenders: list[str], data: Data, timeout: float
) -> dict[str, list[Measurement]]:
    """Measure the contenders that can do a workload in turn, as often as it says."""
    able = [name for name in contenders if name not in workload.without]
    measured: dict[str, list[Measurement]] = {name: [] for name in able}
    path = data.path(workload.data)
    for repeat in range(workload.repeats):
        for name in able:
            with console.status(f"{workload.name} {name}, run {repeat + 1} of {workload.repeats}"):
                job = workload.job(name, path)
                found = measuring.measure(CONTENDERS[name][0], job, workload.warmup, timeout)
            measured[name].append(found)
            number, unit = workload.unit
            console.print(
                f"{workload.name} {name}: {number * found.seconds:.3f} s per {unit}", highlight=False
            )
    return measured


def _choices(option: str, text: str, allowed: tuple[str, ...]) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in allowed:
            raise typer.BadParameter(f"{name!r}: allowed are {', '.join(allowed)}", param_hint=option)
    return list(dict.fromkeys(names))


def _installed(contenders: list[str]) -> list[str]:
    """Leave out, in a line, what can't run here."""
    missing = [name for name in contenders if name in PACKAGES and find_spec(PACKAGES[name]) is None]
    for name in missing:
        console.print(f"{name}: left out, as {PACKAGES[name]} isn't installed", highlight=False)
    return [name for name in contenders if name not in missing]


def _adapted(workload: Workload, rounds: int | None, events: int | None, repeats: int | None) -> Workload:
    number = events if workload.server_lr else rounds
    workload = replace(workload, repeats=repeats or workload.repeats)
    return workload if number is None else workload.with_rounds(number)


if __name__ == "__main__":
    app()
