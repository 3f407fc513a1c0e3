"""The order in which people sort names: hospital 2 before hospital 10, Genève before Zürich and after Basel."""

import re
import unicodedata
from collections.abc import Iterable
from decimal import Decimal

Key = tuple[tuple[str | Decimal, ...], str]

_NUMBER = re.compile(r"(\d+(?:\.\d+)?)", re.ASCII)


def natural_key(name: str) -> Key:
    """Return the key by which a name is sorted: numbers by value, letters without regard to case and accents.

    Names that differ in case or accents alone are in the order of their characters.
    """
    decomposed = unicodedata.normalize("NFKD", name).casefold()
    plain = "".join(each for each in decomposed if not unicodedata.combining(each))
    # Texts and numbers alternate, so that keys of any two names can be compared.
    parts = _NUMBER.split(plain)
    return tuple(Decimal(part) if place % 2 else part for place, part in enumerate(parts)), name


def naturally_sorted(names: Iterable[str]) -> list[str]:
    """Return names as people sort them."""
    return sorted(names, key=natural_key)
