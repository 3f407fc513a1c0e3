"""The app's cache folder, and texts that are kept there as they follow from the sources alone."""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

PACKAGES = ("fedapp", "strategies")
TEXTS = "texts.json"


def default_cache_dir() -> Path:
    """Return the cache folder: $FEDAPP_CACHE, else fedapp in the user's cache (XDG base directories)."""
    if chosen := os.environ.get("FEDAPP_CACHE"):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fedapp"


def remembered(make: Callable[[], str], *question: str) -> str:
    """Return the text that ``make`` returns, or returned before from the same sources, which then aren't imported.

    Parameters
    ----------
    make : callable
        Returns a text that depends on the sources of the app and the library, and on ``question``, alone.
    question : sequence of str
        What tells the text from others.
    """
    file, sources, asked = default_cache_dir() / TEXTS, list(_sources()), json.dumps(question)
    texts: dict[str, str] = {}
    with suppress(OSError, ValueError, KeyError, TypeError):  # damaged, or another version's: it is made anew
        kept = json.loads(file.read_text("utf-8"))
        if kept["sources"] == sources:
            texts = dict(kept["texts"])
            return texts[asked]
    texts[asked] = make()
    temporary = file.with_suffix(f".{os.getpid()}")
    with suppress(OSError):  # a folder that can't be written: the text is made each time
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps({"sources": sources, "texts": texts}), "utf-8")
        temporary.replace(file)
    return texts[asked]


def _sources() -> Iterator[list[str | int]]:
    """Yield each source's path, size and time of its last change, and Flower's version."""
    yield ["flwr", version("flwr")]
    for package in PACKAGES:
        spec = find_spec(package)
        for folder in spec.submodule_search_locations or () if spec else ():
            for path in sorted(Path(folder).rglob("*.py")):
                found = path.stat()
                yield [str(path), found.st_size, found.st_mtime_ns]
