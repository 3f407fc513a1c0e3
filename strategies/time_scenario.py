"""How long clients' tasks take, in virtual time.

Source: Fraboni et al. 2023, section 5.1; ``half-normal``: Nguyen et al. 2022 (FedBuff), whose tasks take that long.
"""

import csv
import re
from collections import defaultdict
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri

from strategies import streams

ALLOWED = "F0 to F99, exponential or half-normal, alone or with :F0 to :F99, or trace:FILE"
PATTERN = r"^(F\d{1,2}|(exponential|half-normal)(:F\d{1,2})?|trace:.+)$"
_DRAWN = ("exponential", "half-normal")


_WIDTH = (np.pi / 2) ** 0.5  # of a half-normal law with mean 1


class TimeScenario:
    """Task times T_i of a federation, and their means τ_i, in seconds.

    ``F-X``: fixed, evenly spaced from 1 − X/100 (client 0, the fastest) to 1 (the last); F0: all 1.
    ``exponential``: T_i ~ Exp(mean τ_i), drawn anew for every task, with the τ_i of F80, or of another F-X that is
    named after a colon. ``half-normal``: likewise T_i = |N|, N ~ N(0, π/2 τ_i²), whose mean is τ_i.
    ``trace:FILE``: a CSV of ``client,seconds`` rows; a client's rows are its tasks, in turn and from the first again
    when they are used up.

    Parameters
    ----------
    name : str
        One of these.
    num_clients : int
        C.
    seed : int
        Fixes the draws of ``exponential`` and ``half-normal``.

    Attributes
    ----------
    means : array (C,)
        τ_i > 0.

    Raises
    ------
    ValueError
        If the scenario is none of these, or the file isn't as it should be.
    """

    def __init__(self, name: str, num_clients: int, seed: int = 0) -> None:
        kind, _, argument = name.partition(":")
        self.seed = seed
        self.law = kind if kind in _DRAWN else ""
        self.trace: list[list[float]] = []
        if kind == "trace":
            self.trace = _read_trace(argument, num_clients)
            self.means = np.array([np.mean(times) for times in self.trace])
        else:
            self.means = _spaced((argument or "F80") if self.law else name, num_clients, name)

    def task_time(self, client: int, task: int) -> float:
        """Return the seconds that task number ``task`` (from 1) of client ``client`` takes."""
        if client >= len(self.means):  # joined later than the scenario was laid out: as slow as the slowest
            return float(self.means.max())
        if self.trace:
            return self.trace[client][(task - 1) % len(self.trace[client])]
        if self.law:
            rng, mean = streams.generator(self.seed, "task-times", client, task), self.means[client]
            drawn = rng.exponential(mean) if self.law == "exponential" else mean * abs(rng.normal(0, _WIDTH))
            return float(drawn)
        return float(self.means[client])

    def distribution(self, client: int) -> NDArray[np.float64]:
        """Return equally likely values of T_i: all that there are, or 2,000 quantiles of what is drawn."""
        if client < len(self.means) and self.trace:
            return np.array(self.trace[client])
        mean = self.means[min(client, len(self.means) - 1)]
        levels = (np.arange(2000) + 0.5) / 2000
        if self.law == "exponential":
            return np.asarray(-mean * np.log1p(-levels))
        if self.law:
            return np.asarray(mean * _WIDTH * ndtri((1 + levels) / 2))
        return np.array([mean])


def _spaced(fixed: str, num_clients: int, name: str) -> NDArray[np.float64]:
    match = re.fullmatch(r"F(\d{1,2})", fixed)
    if match is None:
        raise ValueError(f"time_scenario = {name!r}: allowed are {ALLOWED}")
    return np.linspace(1 - int(match[1]) / 100, 1.0, num_clients) if num_clients > 1 else np.ones(1)


def _read_trace(name: str, num_clients: int) -> list[list[float]]:
    """Read a trace; no message quotes what is in the file, which may be another."""

    def wrong(reason: str) -> ValueError:
        return ValueError(f"time_scenario = 'trace:{name[:200]}': {reason}")

    try:
        path = Path(name).expanduser()
        path.exists()  # a name may be too long
    except (OSError, RuntimeError, ValueError) as error:
        raise wrong(f"can't be found ({getattr(error, 'strerror', None) or error})") from None
    times: dict[int, list[float]] = defaultdict(list)
    if not path.is_file():
        raise wrong("is no file")
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file)
            rows = [(reader.line_num, row) for row in reader if row]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise wrong(f"can't be read ({error})") from None
    for at, (number, row) in enumerate(rows):
        if at == 0 and [cell.strip() for cell in row] == ["client", "seconds"]:
            continue
        try:
            client, seconds = int(row[0]), float(row[1])
            sensible = len(row) == 2 and client >= 0 and 0 < seconds < float("inf")
        except (ValueError, IndexError):
            sensible = False
        if not sensible:
            raise wrong(f"row {number} must be client,seconds with seconds > 0")
        times[client].append(seconds)
    if missing := [client for client in range(num_clients) if client not in times]:
        raise wrong(f"has no row for client {missing[0]}; there are {num_clients} clients, from 0")
    return [times[client] for client in range(num_clients)]
