"""Arrays of a model that each client keeps for itself: layers of its own, by patterns of their names."""

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache

from torch import nn

from fedapp.training.state import names_of


@dataclass(frozen=True)
class OwnArrays:
    """The arrays of a model that clients keep.

    Attributes
    ----------
    names : tuple of str
        All of them, parameters and buffers.
    trained, shared : tuple of str
        Parameters that take a gradient: those that a client keeps, and the others.
    """

    names: tuple[str, ...]
    trained: tuple[str, ...]
    shared: tuple[str, ...]


def patterns_of(personal: str) -> Sequence[str]:
    """Return the patterns of the config's key ``personal``, with commas between them."""
    return tuple(pattern.strip() for pattern in personal.split(",") if pattern.strip())


@lru_cache(maxsize=8)
def own_arrays(model: nn.Module, personal: str) -> OwnArrays:
    """Return the arrays of a model whose names match one of the patterns: all of a layer, too, by ``layer.*``."""
    names, patterns = names_of(model), patterns_of(personal)
    every = (*names.trained, *names.fixed)
    own = {name for name in every if any(fnmatchcase(name, each) for each in patterns)}
    return OwnArrays(
        tuple(name for name in every if name in own),
        tuple(name for name in names.trained if name in own),
        tuple(name for name in names.trained if name not in own),
    )


def apart(
    model: nn.Module, personal: str, changing: Sequence[str]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names of the arrays that training changes: those shared by all clients, and each client's own."""
    own = set(own_arrays(model, personal).names)
    return tuple(name for name in changing if name not in own), tuple(
        name for name in changing if name in own
    )


def matches_nothing(model: nn.Module, personal: str) -> list[str]:
    """Return the patterns that match no array of a model."""
    names = names_of(model)
    every = (*names.trained, *names.fixed)
    return [each for each in patterns_of(personal) if not any(fnmatchcase(name, each) for name in every)]
