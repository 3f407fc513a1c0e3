"""The table: a row for each method, attack and federation, with what honest clients reach first."""

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
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
        Accuracy with honest clients only, and under the attack; equal for ``HONEST``.
    lowest : mapping of str to float
        Accuracy of the worst seed under the attack.
    seeds : int
        Number of seeds that all means are over.
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
    """Return the rows of all runs, in their order; an attack without its honest runs has none.

    Every mean of a row is over the same seeds: those that all of its runs have.
    """
    values: dict[tuple[object, ...], dict[int, float]] = {}
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
        values.setdefault(key, {})[cell.seed] = 100 * accuracy
    rows = []
    for start in dict.fromkeys(key[:-1] for key in values):
        division, clients, hostile, method, attack, statistics = start
        of_attack = {mode: found for mode in MODES if (found := values.get((*start, mode)))}
        of_honest = {
            mode: found for mode in MODES if (found := values.get((*start[:-2], HONEST, statistics, mode)))
        }
        seeds = set.intersection(*(set(found) for found in (*of_attack.values(), *of_honest.values())))
        if OFF not in of_honest or ON not in of_attack or not seeds:
            continue
        honest, attacked = (
            {mode: [found[seed] for seed in sorted(seeds)] for mode, found in each.items()}
            for each in (of_honest, of_attack)
        )
        rows.append(
            Row(
                str(division),
                int(str(clients)),
                int(str(hostile)),
                str(method),
                str(attack),
                bool(statistics),
                {mode: fmean(found) for mode, found in honest.items()},
                {mode: fmean(found) for mode, found in attacked.items()},
                {mode: min(found) for mode, found in attacked.items()},
                len(seeds),
            )
        )
    return rows


def in_words(rows: list[Row]) -> str:
    """Return the table of docs/protection.md: what honest clients reach, and what is left after the worst attack.

    A cell has a number for each federation.
    """
    titles = ["strategy"]
    for division in (IID, NON_IID):
        titles += [f"{WORDS[division]}: honest", "safeguards, worst attack", "and trimmed mean"]
    lines = [f"| {' | '.join(titles)} |", f"|{'---|' * len(titles)}"]
    for method in METHODS:
        cells = [f"`{method}`"]
        for division in (IID, NON_IID):
            own = [row for row in rows if (row.division, row.method) == (division, method)]
            honest = [row.honest[OFF] for row in own if row.attack == HONEST and not row.statistics]
            for accuracies in (honest, _left(own, ON), _left(own, RULE)):
                cells.append(", ".join(f"{each:.0f}" for each in accuracies) or "–")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def verdict(rows: list[Row]) -> str:
    """Return what the rows say of the plan's bounds, as docs/protection.md has it."""
    judged = [row for row in rows if row.division == IID and row.attack != HONEST]
    others = [row for row in rows if row.division == NON_IID]
    unguarded = [
        accuracy
        for division, method in product((IID, NON_IID), METHODS)
        for accuracy in _left([row for row in rows if (row.division, row.method) == (division, method)], OFF)
    ]
    costs = []
    for clients, hostile in FEDERATIONS:
        worst = max((row for row in others if row.clients == clients), key=lambda row: row.lost(ON))
        costs.append(f"{worst.lost(ON):.0f} ({hostile} of {clients}, `{worst.method}`)")
    honest = [row for row in rows if row.attack == HONEST]
    by_rule = max(row.lost(RULE) for row in honest if RULE in row.attacked)
    lowest, lowest_other = (min(row.lowest[ON] for row in some) for some in (judged, others))
    return (
        f"Without safeguards the worst attack leaves {min(unguarded):.0f} to {max(unguarded):.0f} %. With safeguards "
        f"an attack on IID data costs at most {MOST_BY_ATTACK:g} points in {sum(row.holds for row in judged)} of "
        f"{len(judged)} rows, in the mean; the worst single run ends at {lowest:.0f} %. On non-IID data, where the "
        f"hostile devices' data are missing as well, it costs up to {' and '.join(costs)}, and the worst run ends at "
        f"{lowest_other:.0f} %. Where all devices are honest, safeguards cost at most "
        f"{max(row.lost(ON) for row in honest):.1f} points, and the trimmed mean up to {by_rule:.0f}. After the "
        f"worst attack the trimmed mean keeps more than the weighted mean {_kept(judged)} on IID data, and "
        f"{_kept(others)} on non-IID data."
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


def _left(rows: list[Row], mode: str) -> list[float]:
    """Return one method's accuracy after the attack that costs it most, for each federation that has the mode."""
    found = []
    for clients, _ in FEDERATIONS:
        attacked = [
            row for row in rows if row.attack != HONEST and row.clients == clients and mode in row.attacked
        ]
        if attacked:
            found.append(max(attacked, key=lambda row: row.lost(mode)).attacked[mode])
    return found


def write_table(path: Path, rows: list[Row]) -> None:
    """Write the table: the federation, method and attack, then accuracies of honest clients and under the attack."""
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
