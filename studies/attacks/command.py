"""``fedapp attacks``: hostile clients against every method that averages, with and without safeguards."""

import sys
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import track

from fedapp.report.style import figure_options
from studies.attacks.cell import ON
from studies.attacks.plan import SEEDS, cells
from studies.attacks.runs import FILE, made, read, write
from studies.attacks.table import rows_of, write_table


@figure_options
def attacks_command(
    data_path: Annotated[
        str, typer.Option(help="folder with mnist.npz; none: scikit-learn's digits, of 8x8")
    ] = "",
    out: Annotated[Path, typer.Option("--out", "-o", help="folder of runs, table and figure")] = Path(
        "results/attacks"
    ),
    jobs: Annotated[int, typer.Option(min=1, help="runs at a time")] = 2,
    only: Annotated[
        str, typer.Option(help="pattern of runs' names: division/clients/hostile/method/mode/attack/…/seed")
    ] = "*",
    first_seed: Annotated[int, typer.Option(min=0, help="the first of three seeds")] = SEEDS[0],
) -> None:
    """What one of five and two of ten hostile clients make of every method that averages.

    Writes every run, a table, and a figure. A run that is there isn't repeated: a new folder begins anew.
    """
    from studies.attacks.picture import draw  # matplotlib is slow to import

    if data_path and not (Path(data_path) / "mnist.npz").is_file():
        raise SystemExit(f"error: --data-path {data_path!r}: has no mnist.npz")
    seeds = tuple(first_seed + seed for seed in range(len(SEEDS)))
    chosen = [cell for cell in cells(seeds) if fnmatchcase(cell.name, only)]
    if not chosen:
        raise SystemExit(
            f"error: --only {only!r}: no run has such a name; they are called like {next(cells(seeds)).name}"
        )
    try:
        out.mkdir(parents=True, exist_ok=True)
        there = read(out / FILE)
    except OSError as error:
        raise SystemExit(f"error: --out: {error}") from None
    missing = [cell for cell in chosen if cell not in there]
    try:
        runs = track(made(missing, data_path, jobs), "runs", len(missing), transient=True)
        write(out / FILE, runs)
    except KeyboardInterrupt:
        print("interrupted: the same command goes on from here", file=sys.stderr)
        raise SystemExit(130) from None
    rows = rows_of(read(out / FILE))
    write_table(out / "table.csv", rows)
    for row in rows:
        if not row.holds:
            print(
                f"{row.division}, {row.hostile} of {row.clients}, {row.method}, {row.attack}: "
                f"loses {row.lost(ON):.1f} points"
            )
    for path in (out / "table.csv", *draw(out / "attacks.png", rows)):
        print(path.absolute())
