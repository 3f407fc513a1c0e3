"""Checks at import: whether Flower still has what the library uses of it, and whether another module has its name."""

import logging
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

log = logging.getLogger("flwr.strategies")

#: The versions of Flower that all tests of the library have passed.
TESTED = ("1.41.0", "1.42.0")

PACKAGE = Path(__file__).parents[1]


@contextmanager
def needed_for(what: str) -> Iterator[None]:
    """Import, or look up, what isn't public in Flower; ``what`` doesn't work without it.

    Raises
    ------
    ImportError
        In one line: what of Flower is gone, and what doesn't work without it.
    """
    try:
        yield
    except (ImportError, AttributeError) as error:
        gone = str(error).partition(" (")[0]  # without the file's path
        raise ImportError(
            f"flwr {version('flwr')}: {gone}, so {what} can't work; strategies is tested with flwr "
            f"{' and '.join(TESTED)}"
        ) from None


def namesakes(folders: Iterable[str], package: Path = PACKAGE) -> list[Path]:
    """Return the modules and packages in these folders that have the library's name, and aren't the library."""
    found = []
    for folder in dict.fromkeys(Path(folder or ".").resolve() for folder in folders):
        for path in (folder / package.name / "__init__.py", folder / f"{package.name}.py"):
            if path.is_file() and not (path.parent / "flower" / "internals.py").is_file():
                found.append(path)
    return found


def warn_of_namesakes() -> None:
    """Warn in one line if ``sys.path`` has another module of the library's name: it can't be imported."""
    if others := namesakes(sys.path):
        log.warning(
            "import %s is the library in %s, and hides the module of the same name in %s: rename one's own module",
            PACKAGE.name,
            PACKAGE,
            ", ".join(map(str, others)),
        )
