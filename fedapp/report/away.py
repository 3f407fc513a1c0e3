"""When clients weren't there, by their availability: ``away.parquet``, the last 100,000 times of a run."""

from array import array
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import parquet

from fedapp.report.replacing import replacing

NAME = "away.parquet"
MOST = 100_000

Stretch = tuple[float, float]
# Clients and when they weren't there, from one clock time to another.
AwayFn = Callable[[float, float], Iterable[tuple[int, Iterator[Stretch]]]]

_COLUMNS = {"client": pa.int32(), "began": pa.float64(), "ended": pa.float64()}


class Away(NamedTuple):
    """When clients weren't there, [began, ended) by the run's clock, from one time of it to another."""

    client: NDArray[np.int32]
    began: NDArray[np.float64]
    ended: NDArray[np.float64]
    since: float
    until: float


def last_away(away: AwayFn, until: float) -> Away:
    """Return when clients weren't there up to now: of more than ``MOST`` times those of the last stretch of time."""
    since = 0.0
    while True:
        clients, begins, ends = array("i"), array("d"), array("d")
        asked, most = 0, MOST
        for client, stretches in away(since, until):
            asked += 1
            most = max(MOST, asked)  # each may have one, however short the time is
            for began, ended in islice(stretches, most + 1):
                clients.append(client)
                begins.append(began)
                ends.append(ended)
            if len(clients) > most:
                break
        else:
            return Away(np.array(clients, np.int32), np.array(begins), np.array(ends), since, until)
        # Somewhat less than there is room for, as seen so far.
        share = asked / sum(1 for _ in away(until, until))
        since = until - 0.8 * (until - since) * share * most / len(clients)


def write_away(run_dir: Path, away: Away) -> None:
    """Write ``away.parquet`` in place of what there was."""
    told = {"since": repr(float(away.since)), "until": repr(float(away.until))}
    schema = pa.schema(list(_COLUMNS.items()), metadata=told)
    with replacing(run_dir / NAME) as new:
        parquet.write_table(pa.table(list(away[:3]), schema=schema), new, compression="zstd")


def read_away(run_dir: Path) -> Away | None:
    """Return when a run's clients weren't there; None if that isn't on record."""
    path = run_dir / NAME
    if not path.is_file():
        return None
    table = parquet.read_table(path)
    told = table.schema.metadata
    client, began, ended = (table[name].to_numpy() for name in _COLUMNS)
    return Away(client, began, ended, float(told[b"since"]), float(told[b"until"]))
