"""Which Python files a module of the user's is made of: its own, and those that it imports of the user's, in turn.

Imports count as they are written, wherever in a file; one whose name is worked out isn't seen.
"""

import ast
import sysconfig
from collections.abc import Iterator
from functools import lru_cache
from importlib.util import find_spec, resolve_name
from pathlib import Path

_LIBRARIES = tuple(Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
_OWN = ("fedapp", "strategies")  # versions of the app are versions, as those of libraries are


def is_users(module: str, file: Path) -> bool:
    """Tell whether a module is the user's, and neither the app's nor a library's."""
    if file.suffix != ".py" or module.partition(".")[0] in _OWN:
        return False
    return not any(file.is_relative_to(each) for each in _LIBRARIES)


def files_of(module: str, file: Path) -> list[Path]:
    """Return a module's file and, if it is the user's, those of the user's that it imports, in turn; sorted.

    Raises
    ------
    OSError
        If one can't be read.
    """
    found, waiting = {file}, [(module, file)]
    while waiting:
        module, file = waiting.pop()
        if not is_users(module, file):
            continue
        package = module if file.name == "__init__.py" else module.rpartition(".")[0]
        for name in _imported(file.read_bytes(), package):
            for other, place in _modules(name):
                if place not in found and is_users(other, place):
                    found.add(place)
                    waiting.append((other, place))
    return sorted(found)


@lru_cache(maxsize=256)
def _imported(source: bytes, package: str) -> tuple[str, ...]:
    """Return the full names of what Python code imports: of modules, or of what is in them."""
    try:
        nodes = list(ast.walk(ast.parse(source)))
    except (SyntaxError, ValueError):  # it is being written
        return ()
    found: dict[str, None] = {}
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= dict.fromkeys(each.name for each in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                try:
                    base = resolve_name("." * node.level + base, package)
                except ImportError:  # beyond the package, or there is none
                    continue
            found |= dict.fromkeys(f"{base}.{each.name}" for each in node.names)
    return tuple(found)


def _modules(name: str) -> Iterator[tuple[str, Path]]:
    """Yield the modules along a full name, with their files; nothing is imported for it."""
    module, *rest = name.split(".")
    try:
        spec = find_spec(module)
    except (ImportError, ValueError):  # ValueError: of a script, or what isn't there as others are
        return
    if spec is None:
        return
    if spec.origin:
        yield module, Path(spec.origin)
    places = [Path(place) for place in spec.submodule_search_locations or ()]
    for part in rest:
        module = f"{module}.{part}"
        files = [file for place in places for file in (place / part / "__init__.py", place / f"{part}.py")]
        if file := next(filter(Path.is_file, files), None):
            yield module, file
        places = [place / part for place in places if (place / part).is_dir()]
