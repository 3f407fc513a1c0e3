"""A digest of a class or function: two parts with equal digests behave alike.

The source text alone isn't enough: two functions with the same text may differ in their default arguments, in the
variables that they close over, or in globals. The digest covers the code, these values, and the objects that the
values are made of, recursively. A part that holds an object without comparable content, such as an open file, has no
digest.

Of a user's module the digest covers the file and the values that the code reads from the module. It doesn't follow
modules that this module imports, attributes behind a package (``package.settings.width``), or imports inside a
function.
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
# Attributes of a code object that decide what it computes; names of files and line numbers are left out.
_CODE_ATTRIBUTES = (
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
# Attributes that Python adds to a class by itself.
_ADDED_BY_PYTHON = (
    "__dict__",
    "__weakref__",
    "__module__",
    "__doc__",
    "__firstlineno__",
    "__static_attributes__",
    "_abc_impl",
)


def fingerprint(part: object) -> str | None:
    """Return a digest of all that a part's behaviour depends on, equal in every process; None if it has none.

    The module's docstring says which dependencies aren't followed.
    """
    try:
        digest = _Digest()
        digest.add(part)
    except Exception:  # a user-defined object may raise anything when its content is read
        return None
    return digest.content.hexdigest()


class _Digest:
    """Digest of an object and of the objects that it is made of, each visited once."""

    def __init__(self) -> None:
        self.content = hashlib.sha256()
        self._seen: dict[int, int] = {}
        self._alive: list[object] = []  # keeps visited objects alive, so that no address is used twice

    def add(self, value: Any) -> None:
        """Add a value to the digest."""
        if isinstance(value, _PLAIN):
            if type(value) in _PLAIN:
                return self._update(f"{type(value).__name__} {value!r}")
        elif type(value) is tuple:
            return self._add_all("tuple", value)
        if id(value) in self._seen:
            return self._update(f"again {self._seen[id(value)]}")
        self._seen[id(value)] = len(self._seen)
        self._alive.append(value)
        return self._add_content(value)

    def _update(self, text: str) -> None:
        self.content.update(f"{len(text)}:{text}".encode("utf-8", "surrogatepass"))

    def _add_all(self, what: str, values: Any) -> None:
        self._update(f"{what} {len(values)}")
        for value in values:
            self.add(value)

    def _add_content(self, value: Any) -> None:
        """Add what code is made of: modules, functions, classes, and what a class holds; else a value's data."""
        if isinstance(value, ModuleType):
            self._update(f"module {value.__name__} {_source_of(value)}")
        elif isinstance(value, CodeType):
            self._add_all("code", [getattr(value, name) for name in _CODE_ATTRIBUTES])
        elif (place := _import_path(value)) is not None:
            self._update(place)
        elif isinstance(value, FunctionType):
            self._function(value)
        elif isinstance(value, type):
            self._class(value)
        elif isinstance(value, MethodType):
            self._add_all("method", (value.__func__, value.__self__))
        elif isinstance(value, staticmethod | classmethod):
            self._add_all(type(value).__name__, (value.__func__,))
        elif isinstance(value, property):
            self._add_all("property", (value.fget, value.fset, value.fdel))
        elif inspect.ismemberdescriptor(value) or inspect.isgetsetdescriptor(value):
            self._update(f"descriptor {value.__qualname__}")
        else:
            self._add_data(value)

    def _add_data(self, value: Any) -> None:
        if type(value) is list:
            self._add_all("list", value)
        elif type(value) in (dict, MappingProxyType):
            self._add_all("dict", [part for item in value.items() for part in item])
        elif type(value) in (set, frozenset):
            self._add_all(type(value).__name__, sorted(_digest_of(each) for each in value))
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
        for module, found in known:  # its values may have been set since the import
            if isinstance(found, ModuleType) and _source_of(found):
                read |= {f"{module}.{name}": vars(found)[name] for name in names if name in vars(found)}
        own = (function.__defaults__, function.__kwdefaults__, function.__dict__)
        self._add_all("function", (function.__code__, *own, around, read))

    def _class(self, kind: type) -> None:
        written = sorted(vars(kind).keys() - set(_ADDED_BY_PYTHON))
        self._add_all(f"class {kind.__qualname__}", (type(kind), *kind.__bases__))
        self._add_all("with", [part for name in written for part in (name, vars(kind)[name])])

    def _array(self, array: Any) -> None:
        """Add a NumPy array, or a PyTorch tensor, which may be on a GPU and have a type that NumPy lacks."""
        import numpy as np

        kind = f"{type(array).__qualname__} {array.dtype} {tuple(array.shape)}"
        if not isinstance(array, np.ndarray):
            kind += f" {array.device} {array.requires_grad}"
            values = array.detach().cpu()
            array = (
                values.float() if "float" in str(values.dtype) and values.itemsize < 4 else values
            ).numpy()
        if array.dtype.hasobject:
            return self._add_all(kind, array.ravel().tolist())
        self._update(kind)
        self.content.update(np.ascontiguousarray(array).view(np.uint8).data if array.size else b"")
        return None

    def _object(self, value: Any) -> None:
        """Add any other object by what pickle would store of it."""
        reduce = copyreg.dispatch_table.get(type(value))
        made = reduce(value) if reduce else value.__reduce_ex__(4)
        if isinstance(made, str):  # the name by which pickle would look it up in a module
            if (place := _path_in_module(value, pickle.whichmodule(value, made), made)) is not None:  # type: ignore[attr-defined]
                return self._update(place)
            return self._add_all(f"{type(value).__qualname__} of", (value.__wrapped__,))
        parts = [list(part) if isinstance(part, Iterator) else part for part in made]
        return self._add_all("object", (type(value), *parts))


def _import_path(value: Any) -> str | None:
    """Return the import path of a class or function, with its file's digest; None if it can't be imported."""
    if not isinstance(value, type | FunctionType | BuiltinFunctionType):
        return None
    return _path_in_module(value, getattr(value, "__module__", None), value.__qualname__)


def _path_in_module(value: Any, module: Any, path: str) -> str | None:
    """Return an object's import path, with its file's digest; None if the module lacks it or is ``__main__``."""
    if not isinstance(module, str) or module == "__main__":
        return None
    found: Any = sys.modules.get(module)
    source = _source_of(found)
    for name in path.split("."):
        found = getattr(found, name, None)
    return f"{module}:{path} {source}" if found is value else None


def _source_of(module: ModuleType | None) -> str:
    """Return the digest of a user's module's file; an empty text for the app's and for libraries' modules."""
    name, file = getattr(module, "__name__", ""), getattr(module, "__file__", None)
    if not file or name == "__main__":
        return ""
    return file_digest(Path(file)) if is_users(name, Path(file)) else ""


def _digest_of(value: Any) -> str:
    alone = _Digest()
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
    except ValueError:  # the cell has no value yet
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
