"""Which runs the study makes, and the rule that its table is judged by, written before the runs."""

from collections.abc import Iterator
from itertools import product

from studies.attacks.cell import METHODS, MODES, RULE, TAKES_RULE, Cell
from studies.attacks.hostile import ATTACKS, HONEST
from studies.attacks.problem import IID, NON_IID, RARE

#: Clients, and how many of them are hostile.
FEDERATIONS = ((5, 1), (10, 2))
SEEDS = (0, 1, 2)

#: What a method may lose, in points of final accuracy, means over the seeds: by an attack on IID data, against
#: honest clients without safeguards; and by the safeguards where all are honest, whatever the data.
MOST_BY_ATTACK = 15.0
MOST_BY_SAFEGUARDS = 2.0


def cells(seeds: tuple[int, ...] = SEEDS) -> Iterator[Cell]:
    """Yield every run: those on one division of one seed follow each other, so that their data stay loaded."""
    for division in (IID, NON_IID, RARE):
        for clients, hostile in FEDERATIONS:
            for seed, method, mode in product(seeds, METHODS, MODES):
                if mode == RULE and method not in TAKES_RULE:
                    continue
                for attack, statistics in _attacks(division, mode):
                    yield Cell(division, clients, hostile, method, mode, attack, statistics, seed)


def _attacks(division: str, mode: str) -> Iterator[tuple[str, bool]]:
    """Yield the attacks on some data, and whether the model has running statistics; honest clients first.

    A robust rule meets false statistics on IID data alone.
    """
    yield HONEST, False
    if division == RARE:
        return
    yield from ((name, False) for name, attack in ATTACKS.items() if not attack.statistics)
    if division == IID or mode != RULE:
        yield from ((name, True) for name in (HONEST, "statistics"))
