"""What tells one part from another: all that its doings depend on, as one digest.

Source text doesn't: of two functions with the same, one may have other defaults, other values from around it or
other globals. A part's code, these, and what they are made of in turn are gone through. What has no content to
compare, such as an open file, makes the whole unknown.

Of a module of the user's there are its file, and the values that the code reads from it. Not followed are modules
that it imports in turn, those behind a package (``package.settings.width``), and what a function imports when it is
called.
"""

import copyreg
import dis
import hashlib
import inspect
import pickle
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, MappingProxyType, MethodType, ModuleType
from typing import Any

from fedapp.own.sources import file_digest, is_users

_PLAIN = (type(None), bool, int, float, complex, str, bytes, type(...), type(NotImplemented))
# Of code, all that it does; not where it stands.
_OF_CODE = (
    "co_code",
    "co_names",
    "co_varnames",
    "co_freevars",
    "co_cellvars",
    "co_flags",
    "co_argcount",
    "co_posonlyargcount",
    "co_kwonlyargcount",
    "co_exceptiontable",
    "co_consts",
)
# What Python notes in a class beside what was written.
_NOTES = (
    "__dict__",
    "__weakref__",
    "__module__",
    "__doc__",
    "__firstlineno__",
    "__static_attributes__",
    "_abc_impl",
)


def fingerprint(part: object) -> str | None:
    """Return a digest of all that a part's doings depend on, the same in every process; None if there is none.

    But for what isn't followed, which the head of this file names.
    """
    try:
        gone_through = _Through()
        gone_through.add(part)
    except Exception:  # whatever other people's objects raise when asked what they are made of
        return None
    return gone_through.content.hexdigest()


class _Through:
    """Goes through an object and all that it is made of, once each."""

    def __init__(self) -> None:
        self.content = hashlib.sha256()
        self._seen: dict[int, int] = {}
        self._alive: list[object] = []  # an address that is free may be another's

    def add(self, value: Any) -> None:
        """Take in a value."""
        if isinstance(value, _PLAIN):
            if type(value) in _PLAIN:
                return self._say(f"{type(value).__name__} {value!r}")
        elif type(value) is tuple:
            return self._all("tuple", value)
        if id(value) in self._seen:
            return self._say(f"again {self._seen[id(value)]}")
        self._seen[id(value)] = len(self._seen)
        self._alive.append(value)
        return self._made_of(value)

    def _say(self, text: str) -> None:
        self.content.update(f"{len(text)}:{text}".encode("utf-8", "surrogatepass"))

    def _all(self, what: str, values: Any) -> None:
        self._say(f"{what} {len(values)}")
        for value in values:
            self.add(value)

    def _made_of(self, value: Any) -> None:
        if isinstance(value, ModuleType):
            self._say(f"module {value.__name__} {_source_of(value)}")
        elif isinstance(value, CodeType):
            self._all("code", [getattr(value, name) for name in _OF_CODE])
        elif (place := _place(value)) is not None:
            self._say(place)
        elif isinstance(value, FunctionType):
            self._function(value)
        elif isinstance(value, type):
            self._class(value)
        elif isinstance(value, MethodType):
            self._all("method", (value.__func__, value.__self__))
        elif isinstance(value, staticmethod | classmethod):
            self._all(type(value).__name__, (value.__func__,))
        elif isinstance(value, property):
            self._all("property", (value.fget, value.fset, value.fdel))
        elif inspect.ismemberdescriptor(value) or inspect.isgetsetdescriptor(value):
            self._say(f"descriptor {value.__qualname__}")
        elif type(value) is list:
            self._all("list", value)
        elif type(value) in (dict, MappingProxyType):
            self._all("dict", [part for item in value.items() for part in item])
        elif type(value) in (set, frozenset):
            self._all(type(value).__name__, sorted(_digest_of(each) for each in value))
        elif _is_array(value):
            self._array(value)
        else:
            self._object(value)

    def _function(self, function: FunctionType) -> None:
        around = [_contents(cell) for cell in function.__closure__ or ()]
        read = {
            name: function.__globals__[name]
            for name in sorted(set(_globals_of(function.__code__)))
            if name in function.__globals__
        }
        names = sorted(set(_names_of(function.__code__)))
        cells = zip(function.__code__.co_freevars, around, strict=True)
        known = [*read.items(), *((name, value) for name, held in cells for value in held)]
        for module, found in known:  # whose values may have been set since it was imported
            if isinstance(found, ModuleType) and _source_of(found):
                read |= {f"{module}.{name}": vars(found)[name] for name in names if name in vars(found)}
        own = (function.__defaults__, function.__kwdefaults__, function.__dict__)
        self._all("function", (function.__code__, *own, around, read))

    def _class(self, kind: type) -> None:
        self._all(f"class {kind.__qualname__}", (type(kind), *kind.__bases__))
        self._all(
            "with",
            [part for name in sorted(vars(kind)) if name not in _NOTES for part in (name, vars(kind)[name])],
        )

    def _array(self, array: Any) -> None:
        """Take in an array of NumPy, or a tensor, which has other types and may be on a GPU."""
        import numpy as np

        kind = f"{type(array).__qualname__} {array.dtype} {tuple(array.shape)}"
        if not isinstance(array, np.ndarray):
            kind += f" {array.device} {array.requires_grad}"
            values = array.detach().cpu()
            array = (
                values.float() if "float" in str(values.dtype) and values.itemsize < 4 else values
            ).numpy()
        if array.dtype.hasobject:
            return self._all(kind, array.ravel().tolist())
        self._say(kind)
        self.content.update(np.ascontiguousarray(array).view(np.uint8).data if array.size else b"")
        return None

    def _object(self, value: Any) -> None:
        """Take in any other object, by what it would be copied from."""
        reduce = copyreg.dispatch_table.get(type(value))
        made = reduce(value) if reduce else value.__reduce_ex__(4)
        if isinstance(made, str):  # a name, by which it is found in a module, or else isn't found
            if (place := _found_at(value, pickle.whichmodule(value, made), made)) is not None:  # type: ignore[attr-defined]
                return self._say(place)
            return self._all(f"{type(value).__qualname__} of", (value.__wrapped__,))
        parts = [list(part) if isinstance(part, Iterator) else part for part in made]
        return self._all("object", (type(value), *parts))


def _place(value: Any) -> str | None:
    """Return where a class or function is imported from; None if it can't be, and of all else."""
    if not isinstance(value, type | FunctionType | BuiltinFunctionType):
        return None
    return _found_at(value, getattr(value, "__module__", None), value.__qualname__)


def _found_at(value: Any, module: Any, path: str) -> str | None:
    """Return the name of an object in a module, and what that is; None if it isn't there, or is the program's own."""
    if not isinstance(module, str) or module == "__main__":
        return None
    found: Any = sys.modules.get(module)
    source = _source_of(found)
    for name in path.split("."):
        found = getattr(found, name, None)
    return f"{module}:{path} {source}" if found is value else None


def _source_of(module: ModuleType | None) -> str:
    """Return a digest of a module's file if it is the user's; of the app and of libraries nothing."""
    name, file = getattr(module, "__name__", ""), getattr(module, "__file__", None)
    if not file or name == "__main__":
        return ""
    return file_digest(Path(file)) if is_users(name, Path(file)) else ""


def _digest_of(value: Any) -> str:
    alone = _Through()
    alone.add(value)
    return alone.content.hexdigest()


def _is_array(value: Any) -> bool:
    known = [
        getattr(sys.modules.get(module), name, None)
        for module, name in (("numpy", "ndarray"), ("torch", "Tensor"))
    ]
    return isinstance(value, tuple(kind for kind in known if kind))


def _contents(cell: Any) -> Any:
    try:
        return (cell.cell_contents,)
    except ValueError:  # nothing is in it yet
        return ()


@cache
def _globals_of(code: CodeType) -> tuple[str, ...]:
    """Return the names that code, and code within it, looks up outside of all functions."""
    own = (each.argval for each in dis.get_instructions(code) if each.opname in ("LOAD_GLOBAL", "LOAD_NAME"))
    within = (name for each in code.co_consts if isinstance(each, CodeType) for name in _globals_of(each))
    return (*own, *within)


def _names_of(code: CodeType) -> Iterator[str]:
    """Yield the names of globals and attributes in code, and in code within it."""
    yield from code.co_names
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from _names_of(each)
