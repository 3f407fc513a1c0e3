"""The command ``fedapp``: what one does around runs."""

import contextlib
import itertools
import sys
from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import EntryPoint, entry_points, version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from fedapp.config import ConfigError, RunConfig
from fedapp.config.options import read_options
from fedapp.data import DataError
from fedapp.deploy.cli import app as deploy_app
from fedapp.federation.graph import graph_arrays
from fedapp.sweeps.command import sweep
from fedapp.sweeps.looking import compare_command, list_command
from strategies.clients import graph

if TYPE_CHECKING:
    from fedapp.report.graph_figures import GraphPanel

app = typer.Typer(no_args_is_help=True, help=__doc__, pretty_exceptions_show_locals=False)
app.add_typer(deploy_app, name="deploy")
app.command("sweep")(sweep)
app.command("list")(list_command)
app.command("runs", hidden=True)(list_command)  # what it was called
app.command("compare")(compare_command)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"fedapp {version('fedapp')}, flwr {version('flwr')}")
        raise typer.Exit


@app.callback()
def commands(
    show_version: Annotated[
        bool,
        typer.Option(
            "--version", is_eager=True, callback=_show_version, help="say which version this is, and end"
        ),
    ] = False,
) -> None:
    """Federated runs, and the tools around them."""


@app.command(
    "run",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
    add_help_option=False,
)
def run_command(context: typer.Context) -> None:
    """Simulate a federation: --run-config, --federation-config, --engine, --way; run --help says more."""
    from fedapp.api import command  # Flower's simulation and PyTorch are slow to import

    description = "Simulate a federation, with the options of flwr run."
    raise SystemExit(command.run(command.parser_of("fedapp run", description).parse_args(context.args)))


def _add_commands(entries: Iterable[EntryPoint]) -> None:
    """Add the commands that other distributions bring, such as the studies that come with the app's source."""
    for entry in sorted(entries, key=lambda each: each.name):
        try:
            command = entry.load()
        except ModuleNotFoundError as error:
            if error.name != entry.module.partition(".")[0]:
                raise
        else:
            app.command(entry.name)(command)


_add_commands(entry_points(group="fedapp.commands"))


@app.command("graph")
def graph_command(
    run_config: Annotated[
        list[str] | None,
        typer.Option("--run-config", "-c", help="keys of the run config: 'KEY=VALUE …' or a TOML file"),
    ] = None,
    num_clients: Annotated[int, typer.Option(min=2, help="C, clients of the federation")] = 100,
    class_imbalance: Annotated[str, typer.Option(help="values of κ⁻¹, comma-separated")] = "0,1,10,100",
    data_imbalance: Annotated[str, typer.Option(help="values of φ², comma-separated")] = "0,1",
    seeds: Annotated[int, typer.Option(min=1, help="repetitions, with seeds from the run config's on")] = 1,
    out: Annotated[Path, typer.Option(help="folder for graph.npz of each setting, and the figures")] = Path(
        "results/graph"
    ),
) -> None:
    """Graphs of clients over a grid of class and data imbalance: figures 3.3 to 3.5 of Buttaci 2024.

    Prints homogeneity and the fitted lognormal (θ, φ) of the misalignments, writes graph.npz for each setting and
    draws the misalignments, the Laplacian's spectrum and the homogeneity. Directions are without the noise of
    message-epsilon.
    """
    from fedapp.report.graph_figures import draw_graph  # matplotlib is slow to import

    try:
        given = read_options("--run-config", run_config)
        _check_graph(given)
        grid = itertools.product(_numbers(data_imbalance), _numbers(class_imbalance), range(seeds))
        configs = [_on_grid(given, *point) for point in grid]
        with _written_to(out):
            out.mkdir(parents=True, exist_ok=True)
        panels, table = [], _table(configs[0], num_clients)
        for config in track(configs, description="graphs", transient=True):
            arrays = graph_arrays(config, num_clients)
            with _written_to(out):
                _write_arrays(out, config, arrays)
            panels.append(_panel(config, arrays))
            table.add_row(*_cells(config, arrays, panels[-1]))
        with _written_to(out):
            figures = draw_graph(out, panels, f"{configs[0].dataset}, {num_clients} clients")
    except (ConfigError, DataError) as error:
        raise SystemExit(f"error: {error}") from None
    Console().print(table)
    for path in figures:
        print(path.absolute())


@app.command("report")
def report_command(
    runs: Annotated[list[Path], typer.Argument(help="folders of runs, or of one run each")],
    out: Annotated[
        Path | None, typer.Option("-o", "--out", help="the page's file; report.html by default")
    ] = None,
    live: Annotated[bool, typer.Option("--live", help="serve the page here, and follow the runs")] = False,
    port: Annotated[int, typer.Option(min=0, max=65535, help="with --live; 0: any that is free")] = 0,
) -> None:
    """Runs as one page that opens without a network: curves, clients, data, graph, configs (docs/report.md)."""
    from fedapp.report.page.command import report  # pyarrow and Plotly are slow to import

    report(runs, out, live=live, port=port)


@app.command("timeline")
def timeline_command(
    run: Annotated[Path, typer.Argument(help="folder of a run, also of an earlier version")],
    since: Annotated[
        float | None, typer.Option(help="seconds of the run's clock from which clients are drawn")
    ] = None,
    until: Annotated[float | None, typer.Option(help="… and up to which")] = None,
    out: Annotated[
        Path | None, typer.Option("-o", "--out", help="the figure's file; timeline.png of the run by default")
    ] = None,
) -> None:
    """What each client of a run did when, and how its tasks ended, as timeline.png (docs/report.md)."""
    from fedapp.report.gantt import draw_timeline  # matplotlib is slow to import

    if not (run / "config.toml").is_file():
        raise SystemExit(f"error: {run}: holds no run, a folder with a config.toml")
    try:
        path = draw_timeline(run, since, until, out)
    except (OSError, ValueError) as error:
        raise SystemExit(f"error: {error}") from None
    if path is None:
        raise SystemExit(f"error: {run}: has no task on record (tasks.parquet)")
    print(path.absolute())


@app.command()
def keys(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME]…", help="keys, or parts of their names; none: all")
    ] = None,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="all of them as docs/config.md has them")
    ] = False,
    strategy: Annotated[
        str, typer.Option(help="only the keys that this strategy of your own adds, module:Class")
    ] = "",
) -> None:
    """Every key of the run config, or some: meaning, default, what it accepts, who reads it."""
    from fedapp.config.document import document, document_of, in_words

    if (markdown or strategy) and names:
        option = "--markdown" if markdown else "--strategy"
        raise SystemExit(f"error: {option}: is of all its keys, not of {', '.join(names)}")
    try:
        text = document_of(strategy) if strategy else document() if markdown else in_words(names or [])
        print(text, end="")
    except ConfigError as error:
        raise SystemExit(f"error: {error}") from None


@app.command()
def methods(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME]…", help="strategies, each in full; none: all, in short"),
    ] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="the table of docs/methods.md")] = False,
) -> None:
    """Every value of strategy, or some: source, rule, what it needs, sends and keeps, where it helps, own keys."""
    from fedapp.config.methods import methods_in_words, table

    if markdown and names:
        raise SystemExit(f"error: --markdown: is of all methods, not of {', '.join(names)}")
    try:
        print(table() if markdown else methods_in_words(names or []), end="")
    except ConfigError as error:
        raise SystemExit(f"error: {error}") from None


def _check_graph(given: Mapping[str, Any]) -> None:
    """Refuse the keys that the grid sets; name those that a graph alone doesn't read."""
    options = {"class-imbalance": "--class-imbalance", "data-imbalance": "--data-imbalance"}
    for key in given:
        if key in ("partitioner", *options):
            instead = f"; {options[key]} says which values" if key in options else ""
            raise ConfigError(f"{key} = {given[key]!r}: the grid sets it{instead}")
    if unread := [f"{key} = {value!r}" for key, value in given.items() if key not in _OF_GRAPHS]:
        RunConfig.load(given)  # a wrong key or value is no unread one
        print(f"not read by fedapp graph: {', '.join(unread)}", file=sys.stderr)


# What a graph without a run reads beside what the grid sets.
_OF_GRAPHS = (
    "dataset",
    "data-path",
    "input-column",
    "label-column",
    "group-column",
    "loss",
    "normalize",
    "test-fraction",
    "test-on",
    "min-samples",
    "seed",
    "message-floor",
    "neighbours",
)


def _on_grid(given: Mapping[str, Any], phi: float, kappa: float, repetition: int) -> RunConfig:
    return RunConfig.load(
        {
            **given,
            "partitioner": "label-quantity-skew",
            "class-imbalance": kappa,
            "data-imbalance": phi,
            "seed": RunConfig.load(given).seed + repetition,
        }
    )


@contextlib.contextmanager
def _written_to(out: Path) -> Iterator[None]:
    """Say of which option a folder is that can't be written to."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"--out {out}: can't be written to ({error.strerror or error})") from None


def _write_arrays(out: Path, config: RunConfig, arrays: Mapping[str, np.ndarray]) -> None:
    folder = out / f"class-{config.class_imbalance:g}-data-{config.data_imbalance:g}-seed-{config.seed}"
    folder.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(folder / "graph.npz", **arrays)  # type: ignore[arg-type]


def _panel(config: RunConfig, arrays: Mapping[str, np.ndarray]) -> "GraphPanel":
    from fedapp.report.graph_figures import GraphPanel

    fit = graph.fit_lognormal(arrays["misalignment"], config.message_floor)
    return GraphPanel.of(
        config.class_imbalance,
        config.data_imbalance,
        arrays["misalignment"],
        arrays["eigenvalues"],
        graph.homogeneity(arrays["adjacency"]),
        fit.theta,
        fit.phi,
    )


def _cells(config: RunConfig, arrays: Mapping[str, np.ndarray], panel: "GraphPanel") -> tuple[str, ...]:
    return (
        f"{config.class_imbalance:g}",
        f"{config.data_imbalance:g}",
        str(config.seed),
        f"{panel.homogeneity:.4f}",
        f"{panel.theta:.4f}",
        f"{panel.phi:.4f}",
        *_normality(arrays["misalignment"], config.message_floor),
    )


def _normality(mis: np.ndarray, floor: float) -> tuple[str, str]:
    if len(mis) < 6:
        return "-", "-"
    test = graph.normality(mis, floor)
    return f"{test.p_value:.2g}", f"{test.skewness:+.2f}"


def _table(config: RunConfig, num_clients: int) -> Table:
    title = f"{config.dataset}, {num_clients} clients: misalignment ~ lognormal(−θ, φ²)"
    table = Table(title=title)
    for name in ("κ⁻¹", "data φ²", "seed", "homogeneity", "θ", "φ", "normal: p", "skew"):
        table.add_column(name, justify="right")
    return table


def _numbers(text: str) -> list[float]:
    try:
        return [float(number) for number in text.split(",")]
    except ValueError:
        raise ConfigError(f"{text!r}: must be numbers with commas between them") from None


def main() -> None:
    """Run the command line."""
    app()


if __name__ == "__main__":
    main()
