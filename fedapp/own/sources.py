"""Which Python files a module of the user's is made of: its own, and those that it imports of the user's, in turn.

Imports count as they are written, wherever in a file; one whose name is worked out isn't seen.
"""

import ast
import hashlib
import logging
import os
import struct
import sys
import sysconfig
from collections.abc import Iterator
from functools import lru_cache
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, resolve_name
from pathlib import Path

log = logging.getLogger("fedapp.own")

_LIBRARIES = tuple(Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
_OWN = ("fedapp", "strategies")  # versions of the app are versions, as those of libraries are

# Of each imported file: its module's spec, and the file's digest when it was imported.
_files: dict[Path, tuple[object, str]] = {}
_warned: set[tuple[Path, str]] = set()


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


def file_digest(path: Path) -> str:
    """Return a digest of a Python file: of one that is imported, as it was then.

    What has been imported stays as it is until its module is loaded again, whatever becomes of the file; where that
    has changed, a line says so.
    """
    then, now = _then_and_now(path)
    if then != now and (path, now) not in _warned:
        _warned.add((path, now))
        log.warning(
            "%s has changed since it was imported, and is used as it was: load the module again "
            "(importlib.reload), or begin a new process",
            path.name,
        )
    return then


def has_changed(path: Path) -> bool:
    """Tell whether a Python file isn't what was imported from it here, and another process would import another."""
    then, now = _then_and_now(path)
    return then != now


def _then_and_now(path: Path) -> tuple[str, str]:
    """Return a file's digest as it was when it was imported, and as it is; twice the latter if it wasn't."""
    now = hashlib.sha256(path.read_bytes()).hexdigest()
    if (spec := _spec_of(path)) is None:
        return now, now
    if (known := _files.get(path)) is None or known[0] is not spec:
        _files[path] = known = spec, _as_imported(path, spec, now)
    return known[1], now


def _spec_of(path: Path) -> object:
    """Return the spec of the module made of a file, another one when it is loaded again; None if none was made."""
    for module in list(sys.modules.values()):
        of_module = getattr(module, "__dict__", {})
        if of_module.get("__file__") == str(path):
            return of_module.get("__spec__") or module
    return None


def _as_imported(path: Path, spec: object, now: str) -> str:
    """Return a file's digest, or another one if Python has noted that what it imported isn't what is there now."""
    # Of a script it is a module.
    compiled = Path((spec.cached if isinstance(spec, ModuleSpec) else None) or "")
    if sys.dont_write_bytecode or not compiled.is_file() or not os.access(compiled, os.W_OK):
        return now
    flags, time, size = struct.unpack("<4xLLL", compiled.read_bytes()[:16])
    stat = path.stat()
    there = int(stat.st_mtime) & 0xFFFFFFFF, stat.st_size & 0xFFFFFFFF
    if flags or (time, size) == there:  # flags: it goes by a hash
        return now
    return hashlib.sha256(f"{now} {time} {size}".encode()).hexdigest()
