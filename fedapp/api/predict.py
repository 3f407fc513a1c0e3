"""``fedapp predict``: a run's model on new rows, as a CSV file."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedapp.api.command import check_folder
from fedapp.api.results import RunResult
from fedapp.data import DataError
from fedapp.server import USER_ERRORS

if TYPE_CHECKING:
    import pandas as pd


def _free_names(run: Path) -> Iterator[Path]:
    number = 1
    while True:
        yield run / f"predictions-{number:03d}.csv"
        number += 1


def predict(
    run: Annotated[Path, typer.Argument(help="folder of a run")],
    data: Annotated[
        Path, typer.Argument(help="a table, a folder of images, an image, or an .npz with inputs x")
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            "-o", "--out", help="the CSV file; by default predictions-NNN.csv of the run, a new one"
        ),
    ] = None,
) -> None:
    """A run's model on new rows or images: a CSV with class and probability, or numbers (docs/model.md).

    Columns that are no inputs, such as a patient's number, stand beside the predictions.
    """
    try:
        if not (run / "config.toml").is_file():
            raise DataError(f"{run}: holds no run, a folder with a config.toml")
        if out is not None:
            check_folder(out)
        found = RunResult(run).predictions(data)
        path = _write(found.table, run, out)
    except (*USER_ERRORS, OSError) as error:
        raise SystemExit(f"error: {error}") from None
    for remark in found.remarks:
        typer.echo(remark, err=True)
    print(path.absolute())


def _write(table: "pd.DataFrame", run: Path, out: Path | None) -> Path:
    """Write a file that isn't there yet."""
    content = table.to_csv(index=False)
    for path in _free_names(run) if out is None else (out,):
        try:
            with path.open("x", encoding="utf-8", newline="") as file:
                file.write(content)
            return path
        except FileExistsError:
            if out is not None:
                raise DataError(
                    f"--out = {str(out)!r}: is there already, and is kept; another name is needed"
                ) from None
    raise AssertionError
