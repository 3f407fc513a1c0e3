"""The study's runs: made, written one by one into a file, and read back."""

import csv
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import astuple, fields
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import torch

from studies.attacks.cell import Cell, accuracy

FILE = "runs.csv"
ACCURACY = "accuracy"
NAMES = tuple(field.name for field in fields(Cell))


def made(planned: Sequence[Cell], data_path: str, jobs: int) -> Iterator[tuple[Cell, float]]:
    """Yield every run with its final accuracy; more than one job: in processes of one thread each."""
    if jobs == 1:
        for cell in planned:
            yield cell, accuracy(cell, data_path)
        return
    context = get_context("spawn")
    with ProcessPoolExecutor(
        jobs, mp_context=context, initializer=torch.set_num_threads, initargs=(1,)
    ) as pool:
        work = partial(accuracy, data_path=data_path)
        yield from zip(planned, pool.map(work, planned, chunksize=12), strict=True)


def write(path: Path, runs: Iterable[tuple[Cell, float]]) -> None:
    """Add runs to a file, each as soon as it is there."""
    new = not path.exists()
    with path.open("a", newline="", encoding="utf-8") as file:
        rows = csv.writer(file, lineterminator="\n")
        if new:
            rows.writerow([*NAMES, ACCURACY])
        for cell, value in runs:
            rows.writerow(
                [*(int(each) if isinstance(each, bool) else each for each in astuple(cell)), f"{value:.4f}"]
            )
            file.flush()


def read(path: Path) -> dict[Cell, float]:
    """Return the runs in a file; none if there is no file."""
    if not path.exists():
        return {}
    with path.open(newline="", encoding="utf-8") as file:
        return {_cell(row): float(row[ACCURACY]) for row in csv.DictReader(file)}


def _cell(row: dict[str, str]) -> Cell:
    clients, hostile, seed = (int(row[name]) for name in ("clients", "hostile", "seed"))
    what = row["method"], row["mode"], row["attack"]
    return Cell(row["division"], clients, hostile, *what, row["statistics"] == "1", seed)
