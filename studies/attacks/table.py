"""The table: a row for each method, attack and federation, with what honest clients reach first."""

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from studies.attacks.cell import METHODS, MODES, OFF, ON, RULE, Cell
from studies.attacks.hostile import HONEST
from studies.attacks.plan import FEDERATIONS, MOST_BY_ATTACK, MOST_BY_SAFEGUARDS
from studies.attacks.problem import IID, NON_IID, WORDS

FILE = "table.csv"


@dataclass(frozen=True)
class Row:
    """Final accuracies, means over the seeds, in percent, by mode.

    Attributes
    ----------
    honest, attacked : mapping of str to float
        With honest clients only, and under the attack; for ``HONEST`` the same.
    lowest : mapping of str to float
        Under the attack, of the worst seed.
    seeds : int
        How many there are.
    """

    division: str
    clients: int
    hostile: int
    method: str
    attack: str
    statistics: bool
    honest: Mapping[str, float]
    attacked: Mapping[str, float]
    lowest: Mapping[str, float]
    seeds: int

    def lost(self, mode: str) -> float:
        """Return the points that are lost against honest clients without safeguards."""
        return self.honest[OFF] - self.attacked[mode]

    @property
    def holds(self) -> bool:
        """Whether the row is within the bounds of the plan; an attack on data that aren't IID has none."""
        if self.attack == HONEST:
            return self.lost(ON) <= MOST_BY_SAFEGUARDS
        return self.division != IID or self.lost(ON) <= MOST_BY_ATTACK


def rows_of(runs: Mapping[Cell, float]) -> list[Row]:
    """Return the rows of all runs, in their order; an attack without its honest runs has none."""
    values: dict[tuple[object, ...], list[float]] = {}
    for cell, accuracy in runs.items():
        key = (
            cell.division,
            cell.clients,
            cell.hostile,
            cell.method,
            cell.attack,
            cell.statistics,
            cell.mode,
        )
        values.setdefault(key, []).append(100 * accuracy)
    rows = []
    for start in dict.fromkeys(key[:-1] for key in values):
        division, clients, hostile, method, attack, statistics = start
        there = [mode for mode in MODES if (*start, mode) in values]
        honest = {
            mode: fmean(found)
            for mode in MODES
            if (found := values.get((*start[:-2], HONEST, statistics, mode)))
        }
        if OFF not in honest or ON not in there:
            continue
        attacked = {mode: values[(*start, mode)] for mode in there}
        rows.append(
            Row(
                str(division),
                int(str(clients)),
                int(str(hostile)),
                str(method),
                str(attack),
                bool(statistics),
                honest,
                {mode: fmean(found) for mode, found in attacked.items()},
                {mode: min(found) for mode, found in attacked.items()},
                len(attacked[ON]),
            )
        )
    return rows


def in_words(rows: list[Row]) -> str:
    """Return the table of docs/protection.md: what honest clients reach, and what is left after the worst attack."""
    titles = ["data", "strategy"]
    for clients, hostile in FEDERATIONS:
        titles += [f"honest, C = {clients}", "safeguards on"]
        titles += [f"{hostile} of {clients} hostile", "safeguards on", "and trimmed mean"]
    lines = [f"| {' | '.join(titles)} |", f"|{'---|' * len(titles)}"]
    for division in (IID, NON_IID):
        for method in METHODS:
            cells = [WORDS[division], f"`{method}`"]
            for clients, _ in FEDERATIONS:
                own = [r for r in rows if (r.division, r.clients, r.method) == (division, clients, method)]
                honest = next((row for row in own if row.attack == HONEST and not row.statistics), None)
                attacked = [row for row in own if row.attack != HONEST]
                cells += (
                    ["–", "–"] if honest is None else [f"{honest.honest[mode]:.0f}" for mode in (OFF, ON)]
                )
                cells += [_worst(attacked, mode) for mode in MODES]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def verdict(rows: list[Row]) -> str:
    """Return what the rows say of the plan's bounds, as docs/protection.md has it."""
    judged = [row for row in rows if row.division == IID and row.attack != HONEST]
    honest = max((row.lost(ON) for row in rows if row.attack == HONEST), default=0.0)
    more = [
        f"{row.lost(ON):.1f} by `{row.attack}` with `{row.method}`, {row.hostile} of {row.clients}"
        for row in judged
        if not row.holds
    ]
    others = [row for row in rows if row.division == NON_IID]
    costs = []
    for clients, hostile in FEDERATIONS:
        if own := [row for row in others if row.clients == clients and row.attack != HONEST]:
            least, worst = min(row.lost(ON) for row in own), max(own, key=lambda row: row.lost(ON))
            costs.append(
                f"{hostile} of {clients} costs {least:.0f} to {worst.lost(ON):.0f} points, most by `{worst.attack}` "
                f"with `{worst.method}`"
            )
    by_rule = [
        max(row.lost(RULE) for row in of if RULE in row.attacked and (row.attack == HONEST) == honest_ones)
        for of, honest_ones in ((judged, False), (others, False), (others, True))
    ]
    within = f"in {len(judged) - len(more)} of {len(judged)} rows" if more else f"in all {len(judged)} rows"
    return (
        f"With safeguards an attack on IID data costs at most {MOST_BY_ATTACK:g} points {within}"
        + (f", and more in the others: {'; '.join(more)}" if more else "")
        + ". "
        f"Where all devices are honest, safeguards cost at most {honest:.1f} points, on non-IID data and with a rare "
        f"writer, too. On non-IID data, where the hostile devices' own are missing as well, {', and '.join(costs)}. "
        f"With the trimmed mean as well an attack costs up to {by_rule[0]:.0f} points on IID data and up to "
        f"{by_rule[1]:.0f} on non-IID data, where the rule alone costs up to {by_rule[2]:.0f} if all are honest. "
        f"After the attack that costs most the trimmed mean keeps more than the weighted mean {_kept(judged)} on IID "
        f"data, and {_kept(others)} on non-IID data."
    )


def _kept(rows: list[Row]) -> str:
    """Return in how many cases the trimmed mean keeps more than the weighted mean, each after its worst attack."""
    cases: dict[tuple[str, int, int], list[Row]] = {}
    for row in rows:
        if row.attack != HONEST and RULE in row.attacked:
            cases.setdefault((row.method, row.hostile, row.clients), []).append(row)
    less = [
        f"`{method}`, {hostile} of {clients}"
        for (method, hostile, clients), own in cases.items()
        if max(row.lost(RULE) for row in own) >= max(row.lost(ON) for row in own)
    ]
    if len(less) in (0, len(cases)):
        return f"in {'none' if less else 'all'} of {len(cases)} cases"
    return f"in {len(cases) - len(less)} of {len(cases)} cases (not {'; '.join(less)})"


def _worst(rows: list[Row], mode: str) -> str:
    """Return the least accuracy under any attack, and by which; of several that lose as much, the first."""
    there = [row for row in rows if mode in row.attacked]
    if not there:
        return "–"
    worst = max(there, key=lambda row: row.lost(mode))
    return f"{worst.attacked[mode]:.0f} ({worst.attack})"


def write_table(path: Path, rows: list[Row]) -> None:
    """Write the table: what it is of, what honest clients reach, and what is reached under the attack."""
    with path.open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(
            ["division", "clients", "hostile", "method", "attack", "statistics", "seeds"]
            + [f"honest {mode}" for mode in MODES]
            + [f"attacked {mode}" for mode in MODES]
            + [f"lowest {mode}" for mode in MODES]
            + ["holds"]
        )
        for row in rows:
            numbers = [
                f"{values[mode]:.1f}" if mode in values else ""
                for values in (row.honest, row.attacked, row.lowest)
                for mode in MODES
            ]
            what = [
                row.division,
                row.clients,
                row.hostile,
                row.method,
                row.attack,
                int(row.statistics),
                row.seeds,
            ]
            table.writerow([*what, *numbers, "yes" if row.holds else "no"])
