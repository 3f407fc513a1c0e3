"""``fedapp graph``: graphs of clients over a grid of class and data imbalance."""

import contextlib
import itertools
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from fedapp.config import ConfigError, RunConfig
from fedapp.config.options import read_options
from fedapp.data import DataError
from fedapp.federation.graph import graph_arrays
from fedapp.report.style import current_style, figure_options
from strategies.clients import graph
from studies.graphs.figures import MAX_COLUMNS, MAX_ROWS, GraphPanel, draw_graph
from studies.graphs.lognormal import fit_lognormal, normality


@figure_options
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
    try:
        given = read_options("--run-config", run_config)
        _check_graph(given)
        grid = itertools.product(
            _numbers("--data-imbalance", data_imbalance, MAX_ROWS),
            _numbers("--class-imbalance", class_imbalance, MAX_COLUMNS),
            range(seeds),
        )
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
        for each in current_style().paths(path):
            print(each.absolute())


def _check_graph(given: Mapping[str, Any]) -> None:
    """Refuse keys that the grid sets; name keys that a graph without a run doesn't read."""
    options = {"class-imbalance": "--class-imbalance", "data-imbalance": "--data-imbalance"}
    for key in given:
        if key in ("partitioner", *options):
            instead = f"; {options[key]} has its values" if key in options else ""
            raise ConfigError(f"{key} = {given[key]!r}: the grid sets it{instead}")
    if unread := [f"{key} = {value!r}" for key, value in given.items() if key not in _OF_GRAPHS]:
        RunConfig.load(given)  # a wrong key or value is an error before it is unread
        print(f"not read by fedapp graph: {', '.join(unread)}", file=sys.stderr)


# The keys that a graph without a run reads, beside those that the grid sets.
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
    """Turn an OSError into a ConfigError that names the option ``--out``."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"--out {out}: can't be written to ({error.strerror or error})") from None


def _write_arrays(out: Path, config: RunConfig, arrays: Mapping[str, np.ndarray]) -> None:
    folder = out / f"class-{config.class_imbalance:g}-data-{config.data_imbalance:g}-seed-{config.seed}"
    folder.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(folder / "graph.npz", **arrays)  # type: ignore[arg-type]


def _panel(config: RunConfig, arrays: Mapping[str, np.ndarray]) -> GraphPanel:
    fit = fit_lognormal(arrays["misalignment"], config.message_floor)
    return GraphPanel.of(
        config.class_imbalance,
        config.data_imbalance,
        arrays["misalignment"],
        arrays["eigenvalues"],
        graph.homogeneity(arrays["adjacency"]),
        fit.theta,
        fit.phi,
    )


def _cells(config: RunConfig, arrays: Mapping[str, np.ndarray], panel: GraphPanel) -> tuple[str, ...]:
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
    test = normality(mis, floor)
    return f"{test.p_value:.2g}", f"{test.skewness:+.2f}"


def _table(config: RunConfig, num_clients: int) -> Table:
    title = f"{config.dataset}, {num_clients} clients: misalignment ~ lognormal(−θ, φ²)"
    table = Table(title=title)
    for name in ("κ⁻¹", "data φ²", "seed", "homogeneity", "θ", "φ", "normal: p", "skew"):
        table.add_column(name, justify="right")
    return table


def _numbers(option: str, text: str, most: int) -> list[float]:
    """Return the different numbers of an option, at most ``most``: a figure has no room for more."""
    try:
        numbers = list(dict.fromkeys(float(number) for number in text.split(",")))
    except ValueError:
        raise ConfigError(f"{option} {text!r}: must be numbers with commas between them") from None
    if len(numbers) > most:
        raise ConfigError(f"{option} {text!r}: must be at most {most} numbers, are {len(numbers)}")
    return numbers
