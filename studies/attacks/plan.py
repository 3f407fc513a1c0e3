"""Which runs the study makes, and the rule that its table is judged by, written before the runs."""

from collections.abc import Iterator

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
    """Yield every run: those on one division of one seed follow each other, so that their data stay loaded.

    The rare writer's federation is run with honest clients only, and running statistics are attacked on IID data only.
    """
    for division in (IID, NON_IID, RARE):
        for clients, hostile in FEDERATIONS:
            for seed in seeds:
                for method in METHODS:
                    for mode in MODES:
                        if mode == RULE and method not in TAKES_RULE:
                            continue
                        yield from _attacked(division, clients, hostile, method, mode, seed)


def _attacked(division: str, clients: int, hostile: int, method: str, mode: str, seed: int) -> Iterator[Cell]:
    yield Cell(division, clients, hostile, method, mode, HONEST, statistics=False, seed=seed)
    if division == RARE:
        return
    if division == IID:
        yield Cell(division, clients, hostile, method, mode, HONEST, statistics=True, seed=seed)
    for name, attack in ATTACKS.items():
        if attack.statistics and division != IID:
            continue
        yield Cell(division, clients, hostile, method, mode, name, statistics=attack.statistics, seed=seed)
