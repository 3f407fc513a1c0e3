"""User-defined models, losses, data, metrics, optimizers and strategies, by ``module:name``.

A part that is given as a Python object and can't be imported, such as a class defined in a notebook, is called
``python:NAME`` and exists in this process alone.
"""

import hashlib
import importlib
import inspect
import sys
import sysconfig
import traceback
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

from fedapp.own.fingerprint import fingerprint
from fedapp.own.sources import file_digest, files_of, has_changed
from strategies.flower.higher_is_better import split_direction

HERE = "python"  # stands for the module of parts that exist in this process alone

# Keys whose values may be user-defined parts, by module:name.
PARTS = ("strategy", "model", "loss", "dataset", "metrics", "optimizer")

_registered: dict[str, object] = {}


class OwnPartError(ValueError):
    """A user-defined part can't be imported or doesn't fit; the text names the key, the value and what is allowed."""


def is_own(name: str) -> bool:
    """Return True if a value names a user-defined part."""
    return ":" in name


def imported(key: str, name: str) -> object:
    """Import the object ``module:name`` that is the value of a key.

    Modules are looked up on Python's path and in the working directory, which isn't on a console script's path.

    Raises
    ------
    OwnPartError
        If there is no such object, or its module raises an error.
    """
    module, colon, attribute = name.partition(":")
    if not (module and colon and attribute):
        raise OwnPartError(f"{key} = {name!r}: can't be imported; it must be module:name")
    if module == HERE:
        if attribute not in _registered:
            raise OwnPartError(
                f"{key} = {name!r}: was handed over in Python, and is known in that process alone"
            )
        return _registered[attribute]
    _add_working_directory(module.partition(".")[0])
    try:
        found = importlib.import_module(module)
    except Exception as error:  # a user's module may raise anything; the message has the cause
        raise OwnPartError(
            f"{key} = {name!r}: can't be imported ({type(error).__name__}: {error})"
        ) from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise OwnPartError(f"{key} = {name!r}: can't be imported (there is no {attribute!r} in {module})")
        found = getattr(found, part)
    return found


def register(part: Any) -> str:
    """Return the name of a class or function for a key: ``module:name``, or ``python:NAME`` if no module has it.

    The name of a part that no module has ends in a digest of all that its behaviour depends on, so that two different
    parts have different names (``fedapp.own.fingerprint`` says what isn't followed). A part that has no digest, for
    example because it holds an open file, gets a name drawn at random.
    """
    module, path = getattr(part, "__module__", "") or "", getattr(part, "__qualname__", type(part).__name__)
    if module not in ("", "__main__") and "<" not in path:
        with suppress(OwnPartError):
            if imported("", f"{module}:{path}") is part:
                return f"{module}:{path}"
    called = path.rpartition(".")[2].strip("<>")
    if digest := fingerprint(part):
        name = f"{called}_{digest[:8]}"
    else:
        known = (name for name, other in _registered.items() if other is part)
        name = next(known, f"{called}_{uuid4().hex[:8]}")
    _registered[name] = part
    return f"{HERE}:{name}"


def in_process_names(values: Mapping[str, Any]) -> dict[str, str]:
    """Return by key the config's values that name parts of this process alone."""
    here = {
        key: [name for name in names if name.startswith(f"{HERE}:")]
        for key, names in own_parts(values).items()
    }
    return {key: names[0] for key, names in here.items() if names}


def own_parts(values: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return by key the names of the user-defined parts in a config's values."""
    named = {key: str(values.get(key, "")).split(",") for key in PARTS}
    named["metrics"] = [split_direction(name)[1] for name in named["metrics"]]
    return {key: own for key, names in named.items() if (own := [name for name in names if is_own(name)])}


def source_digest(name: str) -> str:
    """Return a digest of the Python files that ``module:name`` depends on; an empty text if there are none."""
    try:
        digests = [(file.name, file_digest(file)) for file in source_files(name)]
    except (OwnPartError, OSError):
        return ""
    if len(digests) < 2:
        return digests[0][1][:10] if digests else ""
    return hashlib.sha256(repr(sorted(digests)).encode()).hexdigest()[:10]


def sources_of(values: Mapping[str, Any]) -> dict[str, str]:
    """Return by key the digests of the user-defined parts in a config's values, separated by commas."""
    return {key: ",".join(map(source_digest, names)) for key, names in own_parts(values).items()}


def raised_by(error: BaseException, values: Mapping[str, Any]) -> str:
    """Return a line that names the user-defined part that raised an error, and where; "" if none of a config's did.

    The place is the innermost line of the traceback that is in a file of the part.
    """
    frames = traceback.extract_tb(error.__traceback__)[::-1]
    for key, names in own_parts(values).items():
        for name in names:
            try:
                files = {str(file) for file in source_files(name)}
            except (OwnPartError, OSError):
                continue
            if place := next(
                (frame for frame in frames if str(Path(frame.filename).resolve()) in files), None
            ):
                return (
                    f"{key} = {name!r}: raised {type(error).__name__}: {error} "
                    f"({Path(place.filename).name}, line {place.lineno}, in {place.name})"
                )
    return ""


# Where installed packages and the standard library are.
_INSTALLED = tuple(
    str(folder)
    for key in ("stdlib", "purelib", "platlib")
    for path in [Path(sysconfig.get_paths()[key])]
    for folder in (path, path.resolve())
)


def described(error: BaseException) -> str:
    """Return an error of a user's own code in one line, such as ``KeyError: 'x'; nets.py, line 5, in forward``.

    The place is the innermost line of the traceback that is neither of this project nor of an installed package.
    """
    text = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        file, module = frame.f_code.co_filename, str(frame.f_globals.get("__name__", ""))
        if module.partition(".")[0] in ("fedapp", "strategies") or file.startswith(("<frozen", *_INSTALLED)):
            continue
        return f"{text}; {Path(file).name}, line {line}, in {frame.f_code.co_name}"
    return text


def changed_since(values: Mapping[str, Any]) -> str:
    """Return a message on a part that other processes would import in another version; an empty text if all agree."""
    for key, names in own_parts(values).items():
        for name in names:
            with suppress(OwnPartError, OSError):
                if changed := next(filter(has_changed, source_files(name)), None):
                    return (
                        f"{key} = {name!r}: {changed.name} has changed since it was imported, and other processes "
                        "would import it as it is now: load it again (importlib.reload), or begin a new process"
                    )
    return ""


def source_files(name: str) -> list[Path]:
    """Return the Python files that ``module:name`` depends on, sorted; none for a part of this process alone.

    They are the file of its module, the file in which it is defined, and those of the user's modules that these
    import, recursively (``fedapp.own.sources``).

    Raises
    ------
    OwnPartError
        If the part can't be imported.
    OSError
        If a file can't be read.
    """
    part, module = imported("", name), name.partition(":")[0]
    if module == HERE:  # its name has the digest
        return []
    found = {module: getattr(sys.modules[module], "__file__", None)}
    with suppress(TypeError, ValueError):  # not a function or class, or it wraps itself
        function: Any = inspect.unwrap(part)  # type: ignore[arg-type]
        found[function.__module__] = inspect.getsourcefile(function)
    files = [files_of(each, Path(file)) for each, file in found.items() if file and file.endswith(".py")]
    return sorted({file for each in files for file in each})


def _add_working_directory(package: str) -> None:
    here = Path.cwd()
    if package in sys.modules or str(here) in sys.path or "" in sys.path:
        return
    if (here / package).is_dir() or (here / f"{package}.py").is_file():
        sys.path.append(str(here))
