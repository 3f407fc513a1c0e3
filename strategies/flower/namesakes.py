"""The check at import whether another module has the library's name."""

import logging
import sys
from collections.abc import Iterable
from pathlib import Path

log = logging.getLogger("flwr.strategies")

PACKAGE = Path(__file__).parents[1]


def namesakes(folders: Iterable[str]) -> list[Path]:
    """Return the modules and packages in these folders that have the library's name, and aren't the library."""
    found = []
    for folder in dict.fromkeys(Path(folder or ".").resolve() for folder in folders):
        for path in (folder / PACKAGE.name / "__init__.py", folder / f"{PACKAGE.name}.py"):
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
