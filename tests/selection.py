"""Which cases of a large product `make test` runs. The others are marked `thorough`, for `make test-all`."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import combinations, product
from typing import Any

import pytest

from strategies import REGISTRY

THOROUGH = pytest.mark.thorough


def covering(
    *axes: Iterable[Any],
    together: int = 2,
    possible: Callable[..., bool] = lambda *_: True,
    rest: bool = True,
) -> list[Any]:
    """Return every possible case of a product; the default run has each ``together`` values of different axes once.

    The cases of the default run are chosen greedily: first those with the most combinations that none before has.
    Without ``rest`` there are no other cases.
    """
    cases = [case for case in product(*axes) if possible(*case)]
    inside = {case: set(combinations(enumerate(case), together)) for case in cases}
    missing = set().union(*inside.values())
    chosen, used = set[Any](), Counter[Any]()
    while missing:
        best = max(
            cases, key=lambda case: (len(inside[case] & missing), -sum(used[at] for at in enumerate(case)))
        )
        chosen.add(best)
        missing -= inside[best]
        used.update(enumerate(best))
    kept = [case for case in cases if rest or case in chosen]
    return [pytest.param(*case, marks=() if case in chosen else THOROUGH) for case in kept]


def only(cases: Sequence[Any], number: int) -> list[Any]:
    """Return all cases, of which the default run has the first ``number``."""
    return [case if k < number else pytest.param(case, marks=THOROUGH) for k, case in enumerate(cases)]


def spread(cases: Sequence[Any], number: int) -> list[Any]:
    """Return all cases of several values, of which the default run has ``number``, evenly spread over the list."""
    kept = {k * len(cases) // number for k in range(number)}
    return [pytest.param(*case, marks=() if k in kept else THOROUGH) for k, case in enumerate(cases)]


def methods(*capabilities: str, **wanted: Any) -> list[str]:
    """Return the names of the registered methods with these capabilities (those named are true)."""
    wanted |= dict.fromkeys(capabilities, True)
    known = {name: vars(kind.capabilities) for name, kind in REGISTRY.items()}
    return [name for name, has in known.items() if wanted.items() <= has.items()]


def one_of_each(*capabilities: str) -> list[Any]:
    """Return all registered methods; the default run has the first with each combination of these capabilities."""
    seen, names = set[Any](), list[Any]()
    for name, kind in REGISTRY.items():
        combination = tuple(getattr(kind.capabilities, key) for key in capabilities)
        names.append(pytest.param(name, marks=THOROUGH) if combination in seen else name)
        seen.add(combination)
    return names
