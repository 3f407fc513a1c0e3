"""The Python files that a user's module depends on, and their digests.

The files are the module's own and those of the user's modules that it imports, recursively. Import statements count
wherever they stand in a file; an import by a computed name isn't found.
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
_APP_PACKAGES = ("fedapp", "strategies")  # their version identifies them, as a library's does

# Of each imported file: its module's spec, and the file's digest when it was imported.
_files: dict[Path, tuple[object, str]] = {}
_warned: set[tuple[Path, str]] = set()


def is_users(module: str, file: Path) -> bool:
    """Return True if a module is the user's, neither the app's nor a library's."""
    if file.suffix != ".py" or module.partition(".")[0] in _APP_PACKAGES:
        return False
    return not any(file.is_relative_to(each) for each in _LIBRARIES)


def files_of(module: str, file: Path) -> list[Path]:
    """Return a module's file and those of the user's modules that it imports, recursively; sorted.

    Raises
    ------
    OSError
        If a file can't be read.
    """
    found, waiting = {file}, [(module, file)]
    while waiting:
        module, file = waiting.pop()
        if not is_users(module, file):
            continue
        package = module if file.name == "__init__.py" else module.rpartition(".")[0]
        for name in _imported(file.read_bytes(), package):
            for other, place in _modules_along(name):
                if place not in found and is_users(other, place):
                    found.add(place)
                    waiting.append((other, place))
    return sorted(found)


@lru_cache(maxsize=256)
def _imported(source: bytes, package: str) -> tuple[str, ...]:
    """Return the full names of the modules and attributes that Python code imports."""
    try:
        nodes = list(ast.walk(ast.parse(source)))
    except (SyntaxError, ValueError):  # the file is being written
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
                except ImportError:  # the relative import leaves the package, or there is no package
                    continue
            found |= dict.fromkeys(f"{base}.{each.name}" for each in node.names)
    return tuple(found)


def _modules_along(name: str) -> Iterator[tuple[str, Path]]:
    """Yield the modules along a dotted name, with their files, without importing them."""
    module, *rest = name.split(".")
    try:
        spec = find_spec(module)
    except (ImportError, ValueError):  # ValueError: __main__, or a module without a spec
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
    """Return the digest of a Python file, for an imported file as it was at the import.

    An imported module stays as it is until it is loaded again. If its file has changed since, a warning is logged.
    """
    then, now = _digests(path)
    if then != now and (path, now) not in _warned:
        _warned.add((path, now))
        log.warning(
            "%s has changed since it was imported, and is used as it was: load the module again "
            "(importlib.reload), or begin a new process",
            path.name,
        )
    return then


def has_changed(path: Path) -> bool:
    """Return True if a Python file has changed since this process imported it."""
    then, now = _digests(path)
    return then != now


def _digests(path: Path) -> tuple[str, str]:
    """Return a file's digest at its import and its digest now; twice the latter if it wasn't imported."""
    now = hashlib.sha256(path.read_bytes()).hexdigest()
    if (spec := _module_spec(path)) is None:
        return now, now
    if (known := _files.get(path)) is None or known[0] is not spec:
        _files[path] = known = spec, _digest_as_imported(path, spec, now)
    return known[1], now


def _module_spec(path: Path) -> object:
    """Return the spec of the module imported from a file, a new object after a reload; None if it wasn't imported."""
    for module in list(sys.modules.values()):
        of_module = getattr(module, "__dict__", {})
        if of_module.get("__file__") == str(path):
            return of_module.get("__spec__") or module
    return None


def _digest_as_imported(path: Path, spec: object, now: str) -> str:
    """Return a file's digest, or another one if its bytecode file was compiled from a former version."""
    # A script has a module in place of a spec.
    compiled = Path((spec.cached if isinstance(spec, ModuleSpec) else None) or "")
    if sys.dont_write_bytecode or not compiled.is_file() or not os.access(compiled, os.W_OK):
        return now
    flags, time, size = struct.unpack("<4xLLL", compiled.read_bytes()[:16])
    stat = path.stat()
    there = int(stat.st_mtime) & 0xFFFFFFFF, stat.st_size & 0xFFFFFFFF
    if flags or (time, size) == there:  # flags: the bytecode file is checked by a hash
        return now
    return hashlib.sha256(f"{now} {time} {size}".encode()).hexdigest()
