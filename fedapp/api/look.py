"""``fedapp look`` and ``fedapp partition``: data, and their division over clients, before any training."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tomli_w
import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fedapp import federation
from fedapp.api.command import check_folder, keys_of_words
from fedapp.config import ConfigError, RunConfig, Value
from fedapp.config.options import SimulationConfig
from fedapp.data import DataError, Dataset, Partition
from fedapp.data.facts.look import (
    ColumnLook,
    ImagesLook,
    TableLook,
    is_folder_of_images,
    look_at_images,
    look_at_table,
)
from fedapp.data.partition import OWN, names_of_clients
from fedapp.data.remarks import remarks, tested_on
from fedapp.data.tables import TABLES
from fedapp.meant import NUM_CLIENTS
from fedapp.models import ModelError
from fedapp.own import OwnPartError
from fedapp.report.style import current_style, figure_options

Words = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE | FILE.toml]…", help="keys of the run config")
]

USER_ERRORS = (ConfigError, DataError, ModelError, OwnPartError, OSError)

_CLIENTS, _CLASSES = 60, 12  # most lines and columns of the table of a partition
_LISTED = 20  # most names in a line


@figure_options
def look(
    data: Annotated[
        str, typer.Argument(help="a table, a folder of tables or images, an .npz, or a dataset's name")
    ],
    words: Words = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "-o", "--out", help="a new TOML file for the config; the picture goes beside it, as .png"
        ),
    ] = None,
) -> None:
    """Data before any training: columns, gaps, ids, classes, sites, damaged images, and a config to begin with.

    Nothing is trained, and nothing is written without --out.
    """
    console = Console()
    try:
        _check_out(out)
        if (options := current_style().given) and not out:
            raise ConfigError(f"{options}: goes with --out, beside which the picture is")
        given, clients = keys_of_words(words or [])
        found, notes, is_guess = _looked_at(data, given, console)
        keys: dict[str, Any] = {**found, **given}
        if clients is not None:
            keys[NUM_CLIENTS] = clients
        divided = _divided(keys, notes) if is_guess else _division_with(keys)
        if divided is not None:
            _say_form(divided[1], console)
    except USER_ERRORS as error:
        raise SystemExit(f"error: {error}") from None
    for note in notes:
        _say(console, note)
    if divided is not None:
        console.print(_table_of(*divided))
    text = tomli_w.dumps(keys)
    console.print("A config to begin with:" if out is None else f"A config to begin with, in {out}:")
    print("\n" + text, end="")
    if out is not None:
        out.write_text(text, "utf-8")
        if divided is not None:
            _draw(out.with_suffix(".png"), *divided)


@figure_options
def partition(
    words: Words = None,
    out: Annotated[Path, typer.Option("-o", "--out", help="the picture's file, a .png")] = Path(
        "partition.png"
    ),
) -> None:
    """Which client has which rows with these keys, as a table and a picture, without training."""
    console = Console()
    try:
        if out.suffix != ".png":
            raise ConfigError(f"--out = {str(out)!r}: the picture is a PNG; the file's name must end in .png")
        check_folder(out)
        given, clients = keys_of_words(words or [])
        divided = _division(given, clients)
        console.print(_table_of(*divided))
        config, dataset, division = divided
        for note in (*dataset.remarks, *remarks(dataset, division, config.normalize)):
            _say(console, note)
        if named := tested_on(dataset, division, config.partitioner, config.test_on):
            _say(console, named)
        _draw(out, *divided)
    except USER_ERRORS as error:
        raise SystemExit(f"error: {error}") from None


Divided = tuple[RunConfig, Dataset, Partition]


def _check_out(out: Path | None) -> None:
    if out is None:
        return
    if out.suffix != ".toml":
        raise ConfigError(f"--out = {str(out)!r}: the config is a TOML file; its name must end in .toml")
    check_folder(out)
    if out.exists():
        raise ConfigError(f"--out = {str(out)!r}: is there already, and is kept; another name is needed")


def _say(console: Console, line: str) -> None:
    console.print(line, style="yellow", markup=False, highlight=False, soft_wrap=True)


def _looked_at(
    data: str, given: Mapping[str, Value], console: Console
) -> tuple[dict[str, Any], list[str], bool]:
    """Print what data hold; return keys to begin with, notes, and whether some of the keys are guesses."""
    path = Path(data).expanduser()
    if not path.exists():
        if path.suffix or ("/" in data and not data.startswith("hf:")):
            raise DataError(f"{data}: no such file or folder")
        return {"dataset": data}, [], False
    if is_folder_of_images(path):
        images = look_at_images(path)
        _print_images(images, console)
        keys = images.keys | {"data-path": data}
        return keys, _image_notes(images, path), True
    if path.is_dir() or path.suffix.lower() in TABLES:
        config = RunConfig.load({**given, "dataset": "files", "data-path": data})
        columns = replace(federation.columns_of(config), label=str(given.get("label-column", "")))
        table = look_at_table(path, columns)
        _print_table(table, console)
        notes = [*table.notes, *(note for each in table.columns for note in each.notes)]
        return table.keys | {"data-path": data}, notes, True
    return {"dataset": "files", "data-path": data}, [], False


def _divided(keys: Mapping[str, Any], notes: list[str]) -> Divided | None:
    """Return the division with the keys; None, and a note that says why, if there is none."""
    try:
        divided = _division_with(keys)
    except (ConfigError, DataError) as error:
        notes.append(f"no division over clients with these keys: {error}")
        return None
    config, dataset, division = divided
    notes += [
        note
        for note in (*dataset.remarks, *remarks(dataset, division, config.normalize))
        if note not in notes
    ]
    return divided


def _division_with(keys: Mapping[str, Any]) -> Divided:
    values = {key: value for key, value in keys.items() if key != NUM_CLIENTS}
    return _division(values, keys.get(NUM_CLIENTS))


def _say_form(dataset: Dataset, console: Console) -> None:
    """Say how many rows a model gets, of which shape, and what it is to foretell."""
    kind = {"parts": "several inputs", "vector": "inputs"}.get(dataset.kind, dataset.kind)
    shape = "x".join(map(str, dataset.input_shape))
    what = (
        f"{dataset.num_classes} classes" if dataset.targets == "classes" else f"{dataset.y.shape[1]} numbers"
    )
    line = f"A model gets {len(dataset.y):,} rows: {kind} {shape}, and {what} to foretell"
    console.print(line, markup=False, highlight=False, soft_wrap=True)


def _division(values: Mapping[str, Value], clients: Value | None) -> Divided:
    config = RunConfig.load(dict(values))
    if clients is None:
        clients = federation.natural_clients(config) or None
    number = SimulationConfig.read({} if clients is None else {NUM_CLIENTS: clients}).num_supernodes
    config = config.model_copy(update=federation.local_folders(config))
    return config, federation.dataset_of(config, number), federation.partition_of(config, number)


def _print_table(look: TableLook, console: Console) -> None:
    table = Table(
        title=f"{look.rows:,} rows, {len(look.columns)} columns", box=box.SIMPLE_HEAD, collapse_padding=True
    )
    for header, justify in (("column", "left"), ("holds", "left"), ("values", "left")):
        table.add_column(header, justify=justify, overflow="fold")  # type: ignore[arg-type]
    for header in ("different", "empty"):
        table.add_column(header, justify="right")
    table.add_column("is", overflow="fold")
    for each in look.columns:
        table.add_row(
            *map(Text, (each.name, each.kind, each.holds, str(each.distinct), str(each.gaps), _role(each)))
        )
    console.print(table)
    for what, counts in (("classes", look.classes), ("sites", look.sites)):
        if counts:
            console.print(
                f"{len(counts)} {what}: {_counts(counts)}", markup=False, highlight=False, soft_wrap=True
            )


def _role(column: ColumnLook) -> str:
    return {"dropped": "left out"}.get(column.role, column.role) + ("?" if column.markers else "")


def _print_images(look: ImagesLook, console: Console) -> None:
    table = Table(title=f"{sum(look.shapes.values()):,} images that can be read", box=box.SIMPLE_HEAD)
    table.add_column("class", overflow="fold")
    table.add_column("images", justify="right")
    for name, number in look.classes.items():
        table.add_row(Text(name), str(number))
    console.print(table)
    shapes = {
        f"{h}x{w} {'grey' if c == 1 else 'colour'}": number for (c, h, w), number in look.shapes.items()
    }
    console.print(
        f"{len(shapes)} sizes and modes: {_counts(shapes)}", markup=False, highlight=False, soft_wrap=True
    )


def _image_notes(look: ImagesLook, root: Path) -> list[str]:
    notes = []
    if empty := [name for name, number in look.classes.items() if not number]:
        notes.append(f"{len(empty)} class folders have no image that can be read: {', '.join(empty)}")
    if look.damaged:
        damaged = ", ".join(file.relative_to(root).as_posix() for file in look.damaged)
        notes.append(f"{len(look.damaged)} images can't be read: {damaged}")
    if look.turned:
        notes.append(f"{look.turned} photos are turned by their EXIF orientation")
    return notes


def _counts(counts: Mapping[str, int]) -> str:
    listed = [f"{name} {number:,}" for name, number in list(counts.items())[:_LISTED]]
    return ", ".join(listed) + (f", … ({len(counts)})" if len(counts) > _LISTED else "")


def _class_counts(dataset: Dataset, division: Partition) -> Any:
    counts = np.zeros((division.num_clients, dataset.num_strata), np.int64)
    owners = np.repeat(np.arange(division.num_clients), division.sizes)
    np.add.at(counts, (owners, np.asarray(dataset.strata)[division.client_indices]), 1)
    return counts


def _table_of(config: RunConfig, dataset: Dataset, division: Partition) -> Table:
    """Return the table of a division: a line for each client, and the number of its rows of each class."""
    counts, names = _class_counts(dataset, division), names_of_clients(dataset, division, config.partitioner)
    sizes, tests = division.sizes, np.diff(division.test_offsets)
    unused = len(dataset.y) - len(division.client_indices) - len(division.test_indices)
    table = Table(
        title=f"{config.partitioner}: {division.num_clients:,} clients, {sizes.sum():,} rows to train on, "
        f"{len(division.test_indices):,} to test on" + f", {unused:,} in no client" * bool(unused),
        caption=f"rows of a client: least {sizes.min():,}, median {np.median(sizes):,.9g}, most {sizes.max():,}; "
        f"columns: rows of each {dataset.strata_are}",
        box=box.SIMPLE_HEAD,
        collapse_padding=True,
    )
    table.add_column("client", overflow="fold")
    table.add_column("rows", justify="right")
    own = config.test_on == OWN
    if own:
        table.add_column("test rows", justify="right")
    strata = dataset.names_of_strata or tuple(map(str, range(dataset.num_strata)))
    shown = strata if len(strata) <= _CLASSES else ()
    for name in shown:
        table.add_column(Text(name), justify="right")
    if not shown:
        table.add_column("classes", justify="right")
    for client in range(min(division.num_clients, _CLIENTS)):
        row = [
            names[client] if names else str(client),
            str(sizes[client]),
            *([str(tests[client])] if own else []),
        ]
        row += map(str, counts[client].tolist()) if shown else [str(int((counts[client] > 0).sum()))]
        table.add_row(*map(Text, row))
    if division.num_clients > _CLIENTS:
        table.add_row("…")
    return table


def _draw(path: Path, config: RunConfig, dataset: Dataset, division: Partition) -> None:
    """Draw a division, and print the paths of the pictures."""
    from fedapp.report.figures import draw_division  # matplotlib is slow to import
    from fedapp.report.files import data_of

    names = names_of_clients(dataset, division, config.partitioner)
    source = f"{data_of({'dataset': config.dataset, 'data-path': config.data_path})}, {config.partitioner}"
    counts = _class_counts(dataset, division)
    draw_division(path, counts, source, names, dataset.names_of_strata, strata=dataset.strata_are)
    for each in current_style().paths(path):
        print(each.absolute())
