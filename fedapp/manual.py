"""What ``fedapp keys`` and ``fedapp methods`` print, without importing the declarations, and Flower with them.

``manual.json`` is made of the declarations by ``python -m fedapp.config.manual``.
"""

import json
import textwrap
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from fedapp.meant import unknown_key

FILE = Path(__file__).with_suffix(".json")


@cache
def _manual() -> Mapping[str, Any]:
    return json.loads(FILE.read_text("utf-8"))  # type: ignore[no-any-return]


def keys_in_words(names: Sequence[str] = (), *, every: bool = False) -> str:
    """Return keys with meaning, default, what each accepts and who reads it, as text of 80 columns.

    Parameters
    ----------
    names : sequence of str
        Keys or topics; any other name stands for all keys that it is a part of. Without names: the everyday keys.
    every : bool
        Whether no names stand for all keys.

    Raises
    ------
    LookupError
        If there is no key that has a name in it.
    """
    manual = _manual()
    keys, everyday = manual["keys"], manual["everyday"]
    if chosen := dict.fromkeys(key for name in names for key in _called(name)):
        return "\n".join(keys[key] for key in chosen)
    text = "\n".join(keys[key] for key in (keys if every else everyday))
    if every:
        return text
    more = (
        f"{len(everyday)} everyday keys of {len(keys)}: `fedapp keys --all` shows all, `fedapp keys NAME` those "
        f"with a name, `fedapp keys TOPIC` those of {', '.join(manual['topics'])}."
    )
    return f"{text}\n{textwrap.fill(more, 80)}\n"


def _called(name: str) -> Sequence[str]:
    manual = _manual()
    keys: Sequence[str] = [*manual["keys"]]
    if name in keys:
        return [name]
    if name in manual["topics"]:
        return manual["topics"][name]  # type: ignore[no-any-return]
    found = [key for key in keys if name in key]
    if not found:
        raise LookupError(unknown_key(name, keys))
    return found


def methods_in_words(names: Sequence[str] = ()) -> str | None:
    """Return all methods in short, or those that are named in full, as text of 80 columns; None: one is unknown."""
    methods = _manual()["methods" if names else "methods-in-short"]
    if not set(names) <= methods.keys():
        return None
    return "\n".join(methods[name] for name in names or methods)
