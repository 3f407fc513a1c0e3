"""Conversion of models between ArrayRecords and flat float64 vectors, with which strategies compute.

``pack`` and ``unpack`` are Flower's own serialisation (NumPy's .npy) without its cost for small arrays, which comes
from writing and parsing the header.
"""

import math
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache
from io import BytesIO
from itertools import accumulate
from math import prod
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord
from numpy.typing import NDArray

from strategies.flower import messages

Vector = NDArray[np.float64]
"""A model, or an update, as one float64 array (D,): see `Layout`."""


# Parts of error messages about invalid arrays.
NOT_FINITE, OVERFLOWS = "aren't finite", "overflows float32"
TOO_LARGE = "holds whole numbers beyond ±2^53, which averages, in float64, would change"

REAL = "fiub"  # allowed kinds of dtypes: floats, signed and unsigned integers, booleans
HALF = np.dtype(np.float16)

BLOCK = 8192  # values of a vector that are worked on at once: 64 KiB in float64, which a core's cache holds
# Values of an update that are worked on at once: the L2 cache holds them with w̄ and the sum.
CHUNK = 4 * BLOCK
HEADER = 4096  # upper bound of the bytes of an array's header
LARGEST_SQUARE = float(np.finfo(np.float32).max)  # upper bound of the square of a model's norm
# A square that was summed in lower precision, and is at most this, is valid.
SURELY_VALID = LARGEST_SQUARE / 2
OWN_PRECISION = (np.dtype(np.float32), np.dtype(np.float64))  # squares of whole numbers would wrap around
LARGEST_WHOLE = 2**53  # whole numbers up to this are the same in float64


class ArraysMismatchError(ValueError):
    """A client's arrays can't be combined with the global model; the message gives the reason."""

    def __init__(self, reason: str) -> None:
        super().__init__(messages.clean(reason))  # the reason may contain names that the client sent


@dataclass(frozen=True)
class Layout:
    """Names, shapes and dtypes of a model's arrays, in order; converts vectors to records and back.

    Attributes
    ----------
    names : tuple of str
        The names of the arrays.
    shapes : tuple of tuple of int
        The shape of each array.
    dtypes : tuple of dtype
        The type of each array's values.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[np.dtype, ...]

    @classmethod
    def of(cls, record: ArrayRecord) -> "Layout":
        """Read the layout of a record.

        Raises
        ------
        ArraysMismatchError
            If an array is of a dtype that NumPy can't calculate with as real numbers, such as JAX's bfloat16.
        """
        return cls(
            tuple(record),
            tuple(tuple(array.shape) for array in record.values()),
            tuple(_dtype_of(name, array) for name, array in record.items()),
        )

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Return the number of values of each array."""
        return tuple(prod(shape) for shape in self.shapes)

    @cached_property
    def spans(self) -> tuple[slice, ...]:
        """Return the slice of each array in a model's vector (D,)."""
        ends = accumulate(self.sizes)
        return tuple(slice(end - size, end) for size, end in zip(self.sizes, ends, strict=True))

    @cached_property
    def size(self) -> int:
        """D, the number of values."""
        return sum(self.sizes)

    @cached_property
    def num_bytes(self) -> int:
        """Size in bytes of a record of this layout, with headers."""
        return sum(
            len(npy_header(dtype, shape)[1]) + dtype.itemsize * prod(shape)
            for shape, dtype in zip(self.shapes, self.dtypes, strict=True)
        )

    @cached_property
    def most_bytes(self) -> int:
        """Upper bound of the bytes of a record of this layout in any accepted dtypes, with headers of any writer."""
        return sum(8 * size + HEADER for size in self.sizes)

    @property
    def is_bytes(self) -> bool:
        """Whether the arrays are bytes, such as a serialised model, and not numbers to calculate with."""
        return bool(self.dtypes) and all(dtype == np.uint8 for dtype in self.dtypes)

    @property
    def narrow(self) -> np.dtype:
        """The narrowest dtype that holds all values of a model exactly, for storing vectors."""
        return np.result_type(*self.dtypes) if self.dtypes else np.dtype(np.float64)

    def rounded(self, vector: Vector, *, in_place: bool = False) -> Vector:
        """Return a vector (D,) rounded to the dtypes of the arrays, as ``to_record`` does; maybe in its memory."""
        if len(set(self.dtypes)) == 1 and self.narrow.kind == "f":
            rounded = vector if in_place else np.empty(len(vector))
            for place in chunks(len(vector)):
                rounded[place] = vector[place].astype(self.narrow)
            return rounded
        return self.to_vector(self.to_record(vector))

    def to_vector(self, record: ArrayRecord) -> Vector:
        """Flatten a record of this layout to float64, shape (D,).

        The arrays of the record may have another order, another byte order, and another precision (``is_readable``);
        they may be named by their positions, as in ``ArrayRecord([array, …])``.

        Raises
        ------
        ArraysMismatchError
            If the record has other names, shapes or kinds of dtypes, or holds a value that isn't finite, values such
            as 1e30, whose squared norm overflows float32, or whole numbers beyond ±2^53, which float64 doesn't hold.
        """
        model = ModelView(self, self.flat(record))
        vector = model.to_vector()
        if not model.square() <= SURELY_VALID:
            check_values(vector)
        return vector

    @cached_property
    def pieces(self) -> list[list[tuple[int, slice, slice]]]:
        """The pieces of arrays of which each chunk of a vector (D,) consists.

        A piece is the number of an array, a slice of the flat array, and the place of the slice in the chunk.
        """
        pieces, first = list[list[tuple[int, slice, slice]]](), 0
        for chunk in chunks(self.size):
            pieces.append([])
            while self.spans[first].stop <= chunk.start:
                first += 1
            for array in range(first, len(self.spans)):
                span = self.spans[array]
                if span.start >= chunk.stop:
                    break
                low, high = max(span.start, chunk.start), min(span.stop, chunk.stop)
                if low < high:
                    inside = slice(low - span.start, high - span.start)
                    pieces[-1].append((array, inside, slice(low - chunk.start, high - chunk.start)))
        return pieces

    def flat(self, record: ArrayRecord) -> list[NDArray[Any]]:
        """Return the arrays of a record of this layout, flat, in this order; views of its bytes where that can be.

        Raises
        ------
        ArraysMismatchError
            If the record has other names, shapes or kinds of dtypes, or whole numbers beyond ±2^53; other values
            aren't checked.
        """
        if tuple(record) != self.names and set(record) != set(self.names):
            record = self._named(record)
        if (size := messages.num_bytes(record)) > self.most_bytes:  # checked before arrays are unpacked
            raise ArraysMismatchError(
                f"its arrays take {size} bytes, those of the model at most {self.most_bytes}"
            )
        arrays = []
        for name, shape, dtype in zip(self.names, self.shapes, self.dtypes, strict=True):
            values = _decode(name, record[name])
            if values.shape != shape or not is_readable(values.dtype, dtype):
                raise ArraysMismatchError(
                    f"array {name!r} is {values.dtype}{list(values.shape)}, the model's is {dtype}{list(shape)}"
                )
            if values.dtype.itemsize == 8 and values.dtype.kind in "iu" and not _held_by_float64(values):
                raise ArraysMismatchError(f"array {name!r} {TOO_LARGE}")
            arrays.append(values.ravel())
        return arrays

    def _named(self, record: ArrayRecord) -> ArrayRecord:
        """Return a record with the model's names whose arrays are named by position, as Flower names those of a list.

        Raises
        ------
        ArraysMismatchError
            If the record has other names.
        """
        if list(record) == [str(place) for place in range(len(self.names))]:
            return ArrayRecord(dict(zip(self.names, record.values(), strict=True)))
        hint = "; trained names the arrays that clients train, if they aren't all"
        raise ArraysMismatchError(
            f"its arrays are {_brief(record)}, the model's are {_brief(self.names)}"
            f"{hint if record and set(record) < set(self.names) else ''}"
        )

    def faults(self, record: ArrayRecord) -> list[str]:
        """Return the reasons why ``to_vector`` refuses values of a record of this layout, one for each array."""
        faults = []
        for name in self.names:
            values = _decode(name, record[name]).astype(np.float64)
            with np.errstate(over="ignore"):
                norm = float(np.sqrt(np.square(values).sum()))
            if not np.isfinite(values).all():
                faults.append(f"array {name!r} holds values that {NOT_FINITE} (NaN or infinity)")
            elif norm**2 > LARGEST_SQUARE:
                faults.append(f"array {name!r} has the norm {norm:.1e}, whose square {OVERFLOWS}")
        return faults

    def overflows(self, vector: Vector) -> bool:
        """Return True if a finite value of a vector (D,) is infinite in its array: above 65504 in float16."""
        if HALF not in self.dtypes:
            return False
        with np.errstate(over="ignore"):
            return any(
                bool(np.isinf(vector[span].astype(dtype)).any())
                for span, dtype in zip(self.spans, self.dtypes, strict=True)
                if dtype == HALF
            )

    def to_record(self, vector: Vector) -> ArrayRecord:
        """Return a vector (D,) as a record; values of integer arrays are rounded to the nearest integer."""
        record = ArrayRecord()
        for name, shape, dtype, span in zip(self.names, self.shapes, self.dtypes, self.spans, strict=True):
            record[name] = _rounded(vector[span], dtype, shape)
        return record


@dataclass(frozen=True)
class ModelView:
    """A model (D,) whose values are still in the bytes of a record; they are read chunk by chunk.

    Attributes
    ----------
    arrays : list of array
        The values of each array, flat, in the order of the layout.
    """

    layout: Layout
    arrays: list[NDArray[Any]]

    def converted(self) -> str:
        """Return the dtypes of the first array whose precision isn't the model's, in words; "" if there is none."""
        for values, dtype in zip(self.arrays, self.layout.dtypes, strict=True):
            if not _same(values.dtype, dtype):
                return f"{values.dtype} arrays for a model of {dtype}"
        return ""

    def to_vector(self) -> Vector:
        """Return a copy of the model (D,)."""
        vector = np.empty(self.layout.size)
        for values, span in zip(self.arrays, self.layout.spans, strict=True):
            vector[span] = values
        return vector

    def exchange(self, arrays: Iterable[int], base: NDArray[Any]) -> Vector:
        """Return the values (B,) of some arrays, by number, and replace them by those of a model ``base`` (D,)."""
        values = np.concatenate([self.arrays[number] for number in arrays], dtype=np.float64)
        for number in arrays:
            self.arrays[number] = base[self.layout.spans[number]]
        return values

    def read(self, place: slice, out: Vector) -> None:
        """Copy the values of a chunk, given its place in the vector (D,), to ``out``."""
        for array, inside, at in self.layout.pieces[place.start // CHUNK]:
            out[at] = self.arrays[array][inside]

    def square(self) -> float:
        """Return ‖w‖², summed in the arrays' own precision; it isn't finite if a value isn't."""
        square = 0.0
        with np.errstate(over="ignore", invalid="ignore"):
            for values in self.arrays:
                square = sum_of_squares(values, square)
        return square


def is_readable(dtype: np.dtype, of_model: np.dtype) -> bool:
    """Return True if values of a dtype can be values of a model's array: as precise, or of the same kind.

    Floats are read as any array's, whose dtype the model then has; whole numbers as those of other widths. Whole
    numbers for an array of floats are refused, as they are probably truncated.
    """
    return dtype.kind == "f" or {dtype.kind, of_model.kind} <= {*"iu"} or _same(dtype, of_model)


def _same(dtype: np.dtype, other: np.dtype) -> bool:
    """Return True if two dtypes differ in the byte order at most."""
    return dtype.newbyteorder("=") == other.newbyteorder("=")


def chunks(size: int) -> list[slice]:
    """Return the places of the chunks of a vector of ``size`` values."""
    return [slice(start, min(start + CHUNK, size)) for start in range(0, size, CHUNK)]


def check_values(vector: Vector) -> None:
    """Raise ArraysMismatchError if a model (D,) isn't finite, or its squared norm overflows float32."""
    # The square shows NaN, infinity, and a model whose gradients would overflow. It isn't computed by BLAS, whose
    # threads wait for each other while clients keep every core busy.
    square = float(np.einsum("i,i->", vector, vector))
    if not square <= LARGEST_SQUARE and (why := wrong_with(square, finite=bool(np.isfinite(vector).all()))):
        raise ArraysMismatchError(why)


def wrong_with(square: float, *, finite: bool) -> str:
    """Return the fault of a model with this squared norm, "" if it has none; ``finite``: all values are finite."""
    if not finite:
        return f"its arrays hold values that {NOT_FINITE} (NaN or infinity)"
    if not square <= LARGEST_SQUARE:
        return f"its arrays' norm is {square**0.5:.1e}, whose square {OVERFLOWS}"
    return ""


def clip_update(model: Vector, base: NDArray[Any], bound: float) -> bool:
    """Move a model (D,), in place, to within ``bound`` of ``base`` (D,); return True if it was further away.

    w ← w̄ + Δ min(1, S / ‖Δ‖₂) with Δ = w − w̄ and S the bound: no client moves the global model by more than d_i S.
    """
    return shorten_update(model, base, bound, distance(model, base))


def shorten_update(model: Vector, base: NDArray[Any], bound: float, norm: float) -> bool:
    """Do what ``clip_update`` does, given ‖w − w̄‖."""
    if norm <= bound:
        return False
    for start in range(0, len(model), BLOCK):
        values, origin = model[start : start + BLOCK], base[start : start + BLOCK]
        np.add(origin, (values - origin) * (bound / norm), out=values)
    return True


def distance(model: Vector, base: NDArray[Any]) -> float:
    """Return ‖w − w̄‖ of two models (D,), summed block by block: no copy, the same bits for any number of threads."""
    square = 0.0
    for start in range(0, len(model), BLOCK):
        delta = model[start : start + BLOCK] - base[start : start + BLOCK]
        square += float(delta.dot(delta))
    return math.sqrt(square)


def sum_of_squares(values: NDArray[Any], square: float = 0.0) -> float:
    """Return ``square`` + ‖values‖² of an array (n,), added block by block; floats in their own precision."""
    for start in range(0, len(values), BLOCK):
        part = values[start : start + BLOCK]
        if part.dtype not in OWN_PRECISION:
            part = part.astype(np.float64)
        square += float(part.dot(part))
    return square


def pack(values: np.ndarray) -> Array:
    """Serialise an array, to the same bytes as ``Array(values)``."""
    name, header = npy_header(values.dtype, values.shape)
    data = b"".join((header, values.reshape(-1).view(np.uint8).data))  # copied once
    return Array(dtype=name, shape=values.shape, stype="numpy.ndarray", data=data)


def _rounded(values: Vector, dtype: np.dtype, shape: tuple[int, ...]) -> Array:
    """Serialise values (n,) in another dtype, as ``pack`` does; each value is read and written once."""
    name, header = npy_header(dtype, shape)
    # The bytes are allocated once: BytesIO writes into bytes that nobody else has, and returns them.
    data = BytesIO(bytes(len(header) + dtype.itemsize * len(values)))
    data.write(header)
    for place in chunks(len(values)):
        part = values[place] if dtype.kind == "f" else np.rint(values[place])
        data.write(part.astype(dtype).view(np.uint8).data)
    return Array(dtype=name, shape=shape, stype="numpy.ndarray", data=data.getvalue())


def unpack(array: Array) -> np.ndarray:
    """Return an array's values, as ``array.numpy()`` does; they may be read-only.

    Raises
    ------
    Exception
        Any exception that NumPy raises for invalid bytes.
    """
    try:
        dtype, shape = np.dtype(array.dtype), tuple(array.shape)
        _, header = npy_header(dtype, shape)
    except (TypeError, ValueError):
        return array.numpy()
    if array.stype == "numpy.ndarray" and array.data.startswith(header):
        size = len(array.data) - len(header)
        if size == dtype.itemsize * prod(shape):
            return np.frombuffer(array.data, dtype, offset=len(header)).reshape(shape)
    return array.numpy()


@lru_cache(maxsize=4096)
def npy_header(dtype: np.dtype, shape: tuple[int, ...]) -> tuple[str, bytes]:
    """Return a dtype's name, and the header of a .npy file of an array in C order."""
    header = BytesIO()
    fields = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(header, fields)
    return str(dtype), header.getvalue()


def _dtype_of(name: str, array: Array) -> np.dtype:
    with suppress(TypeError):  # the name of a dtype of a package that isn't installed
        if (dtype := np.dtype(array.dtype)).kind in REAL:
            return dtype
    raise ArraysMismatchError(
        f"array {name!r} is {array.dtype}; allowed are real numbers of NumPy's own, such as float32"
    )


def _decode(name: str, array: Array) -> np.ndarray:
    try:
        values = unpack(array)
    except Exception as error:  # whatever bytes a client sends must not stop the server
        raise ArraysMismatchError(f"array {name!r} can't be read: {error}") from error
    if not isinstance(values, np.ndarray):  # an npz archive
        raise ArraysMismatchError(f"array {name!r} can't be read: its bytes are no single array")
    return values


def _held_by_float64(values: np.ndarray) -> bool:
    return int(values.min(initial=0)) >= -LARGEST_WHOLE and int(values.max(initial=0)) <= LARGEST_WHOLE


def _brief(names: Iterable[str]) -> str:
    listed = [messages.clean(name, messages.LONGEST_NAME) for name in names]
    return str(listed) if len(listed) <= 4 else f"[{listed[0]!r}, …, {listed[-1]!r}] ({len(listed)})"


def flat(record: ArrayRecord) -> NDArray[Any]:
    """Return all values of a record as one vector (D,) of the narrowest dtype that holds them exactly."""
    empty = np.empty(0, Layout.of(record).narrow)
    return np.concatenate([empty, *(unpack(array).ravel() for array in record.values())])


def equal_values(record: ArrayRecord, other: ArrayRecord) -> bool:
    """Return True if two records hold the same values in their order."""
    return len(record) == len(other) and all(
        np.array_equal(unpack(array), unpack(each))
        for array, each in zip(record.values(), other.values(), strict=True)
    )
