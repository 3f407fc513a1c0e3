"""What the declaration of a key says beside its type: its meaning, and which runs read it.

One config swaps the strategy, so keys of other methods are allowed in it; a value that nothing in a run reads is
named (`fedapp.config.unread`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fedapp.config.values import Value
from strategies import REGISTRY, FederatedStrategy

if TYPE_CHECKING:
    from fedapp.data import Dataset


@dataclass(frozen=True)
class Setting:
    """What decides which keys are read.

    Attributes
    ----------
    config : RunConfig
        As given. It is made of the keys that this file is for, so that its type can't be named here.
    strategy : FederatedStrategy
        Made from it.
    dataset : Dataset
    gpus : bool
        Whether a client, or the server, may have a GPU.
    """

    config: Any
    strategy: FederatedStrategy
    dataset: "Dataset"
    gpus: bool


@dataclass(frozen=True)
class Readers:
    """Which runs read a key.

    Attributes
    ----------
    text : callable
        Says so of a key.
    holds : callable
        Tells whether the run of a setting reads a key.
    """

    text: Callable[[str], str]
    holds: Callable[[Setting, str], bool]

    def __and__(self, other: "Readers") -> "Readers":
        """Return those that are both."""
        return Readers(
            lambda key: f"{self.text(key)}; {other.text(key)}",
            lambda setting, key: self.holds(setting, key) and other.holds(setting, key),
        )


@dataclass(frozen=True)
class Key:
    """Meaning and readers of a key, and the unit of its number."""

    meaning: str
    readers: Readers
    unit: str = ""


def _strategies_with(key: str) -> str:
    own = key.replace("-", "_")
    found = {name: kind for name, kind in REGISTRY.items() if own in kind.Config.__dataclass_fields__}
    for has_rounds, said in ((True, "strategies with rounds"), (False, "strategies without rounds")):
        if [*found] == [name for name, kind in REGISTRY.items() if kind.has_rounds is has_rounds]:
            return said
    return ", ".join(found)


def where(key: str, *values: Value) -> Readers:
    """Return the runs in which another key has one of these values."""
    attribute = key.replace("-", "_")
    listed = " or ".join(map(str, values))
    return Readers(
        lambda _: f"{key} = {listed}", lambda setting, _: getattr(setting.config, attribute) in values
    )


def if_(text: str, holds: Callable[[Setting], bool]) -> Readers:
    """Return the runs of which something holds; ``text`` says what."""
    return Readers(lambda _: text, lambda setting, _: holds(setting))


EVERY_RUN = if_("every run", lambda _: True)

# The strategies whose Config has a field of the key's name.
OWN = Readers(_strategies_with, lambda setting, key: hasattr(setting.strategy.config, key.replace("-", "_")))

WITH_GRAPH = if_("a graph of clients", lambda setting: setting.strategy.graph is not None)


def key(meaning: str, readers: Readers = EVERY_RUN) -> Key:
    """Declare a key, in the ``Annotated`` of its type."""
    return Key(meaning, readers)
