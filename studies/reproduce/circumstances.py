"""When, with what and where something was computed: kept with the results, and printed from there."""

import platform
from collections.abc import Mapping
from datetime import date
from importlib.metadata import version

from fedapp.server.journal import machine
from fedapp.server.run_directory import PACKAGES


def circumstances() -> dict[str, object]:
    """Return today's ``date``, the ``versions`` by package, and the ``machine``."""
    return {"date": date.today().isoformat(), "versions": versions(), "machine": machine()}


def versions() -> dict[str, str]:
    """Return the versions of Python and of what computes the results, as config.toml has them."""
    return {"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}}


def versions_text(of: Mapping[str, str]) -> str:
    """Write versions in one line."""
    return ", ".join(f"{name.replace('python', 'Python')} {number}" for name, number in of.items())


def _version(package: str) -> str:
    try:
        return version(package)
    except ModuleNotFoundError:
        return "not installed"
