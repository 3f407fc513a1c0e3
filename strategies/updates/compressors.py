"""Compressors of a vector, with a compressed size that depends on the layout alone and not on the values.

    fp16        each value rounded to half precision
    int8        each array's values rounded to the nearest of 255 multiples of a scale, max |v| / 127
    topk:F      the share F of all values that is the largest by magnitude, unchanged; the others are 0
    qsgd:BITS   each value of a bucket v of 512 rounded to ‖v‖ sgn(v_j) l / s with s = 2^BITS − 1 and l one of the two
                integers around a = s |v_j| / ‖v‖, ⌊a⌋ + 1 with probability a − ⌊a⌋: unbiased
                (D. Alistarh, D. Grubic, J. Li, R. Tomioka, M. Vojnovic, QSGD, NeurIPS 2017, section 3)

All compressors but the last are biased: they need error feedback, which adds the compression residual to the next
update. Numbers are little endian; ``strategies/updates/compression.py`` defines their place in a message.
"""

import itertools
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from strategies.flower.arrays import ArraysMismatchError, Vector, chunks

NONE = "none"
ALLOWED = "none, fp16, int8, topk:F with F in (0, 1], or qsgd:BITS with BITS 1 to 16"
PATTERN = r"^(none|fp16|int8|topk:[0-9.e+-]+|qsgd:[0-9]{1,2})$"

BUCKET = 512  # values of an array that share a norm
MOST_BITS = 16

_HALF, _SINGLE = np.dtype("<f2"), np.dtype("<f4")
# Number of values whose bits are packed at a time: a multiple of 8, so that a block ends with a whole byte.
_BLOCK = 1 << 16


@dataclass(frozen=True)
class Sizes:
    """The number of values of each array of a vector (D,), and the dtype that holds all values exactly."""

    arrays: tuple[int, ...]
    dtype: np.dtype

    @property
    def total(self) -> int:
        """D, the number of all values."""
        return sum(self.arrays)

    def slices(self) -> list[slice]:
        """Return the slice of each array in the vector."""
        ends = np.cumsum([0, *self.arrays]).tolist()
        return [slice(start, end) for start, end in itertools.pairwise(ends)]


class Code(ABC):
    """A compressor: encodes a vector (D,) of finite numbers in fewer bytes."""

    #: Whether the compressor is biased, and needs error feedback.
    biased: bool = True

    @abstractmethod
    def num_bytes(self, sizes: Sizes) -> int:
        """Return the number of bytes of an encoded vector."""

    @abstractmethod
    def encode(self, vector: Vector, sizes: Sizes, rng: np.random.Generator) -> bytes:
        """Return the encoded vector (D,), ``num_bytes`` bytes."""

    @abstractmethod
    def decode(self, data: memoryview, sizes: Sizes) -> Vector:
        """Return the vector (D,) decoded from ``num_bytes`` bytes.

        Raises
        ------
        ArraysMismatchError
            If the bytes are invalid.
        """


class Fp16(Code):
    """Half precision; values beyond its largest number are clipped."""

    def num_bytes(self, sizes: Sizes) -> int:
        """Return 2 D."""
        return _HALF.itemsize * sizes.total

    def encode(self, vector: Vector, sizes: Sizes, rng: np.random.Generator) -> bytes:
        """Round each value to the nearest half precision number."""
        largest = float(np.finfo(np.float16).max)
        halves = np.empty(len(vector), _HALF)
        for part in chunks(len(vector)):
            halves[part] = np.clip(vector[part], -largest, largest)
        return halves.tobytes()

    def decode(self, data: memoryview, sizes: Sizes) -> Vector:
        """Return the numbers; the check that all are finite follows when the model is read."""
        return np.frombuffer(data, _HALF).astype(np.float64)


class Int8(Code):
    """A scale, and integers from −127 to 127, for each array."""

    def num_bytes(self, sizes: Sizes) -> int:
        """Return Σ (4 + n) over arrays of n values."""
        return sum(_SINGLE.itemsize + size for size in sizes.arrays)

    def encode(self, vector: Vector, sizes: Sizes, rng: np.random.Generator) -> bytes:
        """Round each value to the nearest multiple of its array's max |v| / 127."""
        parts = []
        for place in sizes.slices():
            values = vector[place]
            scale = np.asarray(
                self._scale(max(values.max(initial=0.0), -values.min(initial=0.0)) / 127), _SINGLE
            )
            codes = np.zeros(len(values), np.int8)
            for part in chunks(len(values)) if scale > 0 else []:
                codes[part] = np.clip(np.rint(values[part] / float(scale)), -127, 127)
            parts += [scale.tobytes(), codes.tobytes()]
        return b"".join(parts)

    def _scale(self, least: float) -> float:
        """Return an array's scale, given the least with which the largest value is 127 of it or less."""
        return least

    def decode(self, data: memoryview, sizes: Sizes) -> Vector:
        """Return the integers times the scale of their array."""
        vector, start = np.empty(sizes.total), 0
        for size, place in zip(sizes.arrays, sizes.slices(), strict=True):
            (scale,) = _scales(data[start : start + _SINGLE.itemsize])
            start += _SINGLE.itemsize
            np.multiply(scale, np.frombuffer(data[start : start + size], np.int8), out=vector[place])
            start += size
        return vector


class ExactInt8(Int8):
    """Int8 whose multiples are float32 numbers, so that a decoded vector of float32 is encoded as it was before.

    The scale has 16 bits, rounded up, and its multiples by 7 bits have the 23 that float32 holds.
    """

    def _scale(self, least: float) -> float:
        fraction, exponent = np.frexp(least)
        return float(np.ldexp(np.ceil(np.ldexp(fraction, 16)), exponent - 16))


@dataclass(frozen=True)
class TopK(Code):
    """The k = ⌈F D⌉ values of largest magnitude, at least one; of equal values the first.

    The positions of the values are encoded as indices, each with as many bits as the largest index needs, or as a
    bitmap of all values, whichever is shorter; then follow the values in their order, in the dtype of the arrays.
    """

    share: float

    def count(self, total: int) -> int:
        """Return k of D values."""
        # Rounded first: 0.07 of 100 values is 7, though the product in floating point is a little more.
        return min(total, max(1, math.ceil(round(self.share * total, 6))))

    def num_bytes(self, sizes: Sizes) -> int:
        """Return the bytes of the indices and of k values."""
        return self._where(sizes.total)[1] + self.count(sizes.total) * sizes.dtype.itemsize

    def _where(self, total: int) -> tuple[int, int]:
        """Return the bits of an index, 0 for a bitmap, and the bytes of all indices or of the bitmap."""
        count, width = self.count(total), max(total - 1, 1).bit_length()
        indices, bitmap = _bytes_of(count * width), _bytes_of(total)
        return (width, indices) if indices < bitmap else (0, bitmap)

    def encode(self, vector: Vector, sizes: Sizes, rng: np.random.Generator) -> bytes:
        """Encode the positions and values of the k largest magnitudes."""
        places = largest(np.abs(vector), self.count(sizes.total))
        width, _ = self._where(sizes.total)
        if width:
            where = pack_bits(places, width)
        else:
            bitmap = np.zeros(sizes.total, np.uint8)
            bitmap[places] = 1
            where = np.packbits(bitmap, bitorder="little").tobytes()
        return where + vector[places].astype(sizes.dtype.newbyteorder("<")).tobytes()

    def decode(self, data: memoryview, sizes: Sizes) -> Vector:
        """Return a vector with the k values at their positions, and 0 elsewhere."""
        total, count = sizes.total, self.count(sizes.total)
        width, end = self._where(total)
        if width:
            places = unpack_bits(data[:end], count, width)
        else:
            bits = np.unpackbits(np.frombuffer(data[:end], np.uint8), bitorder="little")
            places = np.flatnonzero(bits)
        if (
            len(places) != count
            or (np.diff(places) <= 0).any()
            or places[-1:].max(initial=0) >= max(total, 1)
        ):
            raise ArraysMismatchError(
                f"its compressed update has no {count} places of {total} in their order"
            )
        vector = np.zeros(total)
        vector[places] = np.frombuffer(data[end:], sizes.dtype.newbyteorder("<"))
        return vector


@dataclass(frozen=True)
class Qsgd(Code):
    """The norms of each array's buckets, and a sign and a level of ``bits`` bits for each value."""

    bits: int
    biased = False

    @property
    def levels(self) -> int:
        """s, the number of levels above 0."""
        return (1 << self.bits) - 1

    def num_bytes(self, sizes: Sizes) -> int:
        """Return 4 bytes per bucket plus 1 + BITS bits per value, padded to a whole byte for each array."""
        return sum(
            _SINGLE.itemsize * _buckets(size) + _bytes_of(size * (self.bits + 1)) for size in sizes.arrays
        )

    def encode(self, vector: Vector, sizes: Sizes, rng: np.random.Generator) -> bytes:
        """Round stochastically: one number in [0, 1) is drawn for each value, in their order."""
        parts = []
        for place in sizes.slices():
            values = vector[place]
            norms = _norms(values)
            spread = np.repeat(norms.astype(np.float64), BUCKET)[: len(values)]
            levels = self.rounded(values, spread, rng.random(len(values)))
            signs = (values < 0) & (levels > 0)
            codes = levels.astype(np.int64) | (signs.astype(np.int64) << self.bits)
            parts += [norms.tobytes(), pack_bits(codes, self.bits + 1)]
        return b"".join(parts)

    def rounded(self, values: Vector, norms: Vector, drawn: Vector) -> Vector:
        """Return the levels l (n,) of values (n,), given each one's norm and a number drawn in [0, 1)."""
        shares = np.divide(np.abs(values), norms, out=np.zeros(len(values)), where=norms > 0)
        exact = self.levels * shares
        return np.asarray(np.floor(exact) + (drawn < exact - np.floor(exact)))

    def decode(self, data: memoryview, sizes: Sizes) -> Vector:
        """Return the quantised values."""
        vector, start = np.empty(sizes.total), 0
        for size, place in zip(sizes.arrays, sizes.slices(), strict=True):
            end = start + _SINGLE.itemsize * _buckets(size)
            norms = np.repeat(_scales(data[start:end]), BUCKET)[:size]
            start, end = end, end + _bytes_of(size * (self.bits + 1))
            codes = unpack_bits(data[start:end], size, self.bits + 1)
            signs = 1 - 2 * (codes >> self.bits)
            vector[place] = norms * signs * (codes & self.levels) / self.levels
            start = end
        return vector


#: The compressors of models that clients are sent, by name; what they leave out isn't sent later.
OF_MODELS: dict[str, Code] = {"fp16": Fp16(), "int8": ExactInt8()}


def code_of(text: str) -> Code | None:
    """Return the compressor of this name; None for ``none``.

    Raises
    ------
    ValueError
        If no compressor has this name.
    """
    name, _, value = text.partition(":")
    plain = {NONE: None, "fp16": Fp16(), "int8": Int8()}
    if text in plain:
        return plain[text]
    try:
        if name == "topk" and 0 < float(value) <= 1:
            return TopK(float(value))
        if name == "qsgd" and value.isascii() and value.isdigit() and 1 <= int(value) <= MOST_BITS:
            return Qsgd(int(value))
    except ValueError:
        pass
    raise ValueError(f"compression = {text!r}: allowed are {ALLOWED}")


def largest(magnitudes: Vector, count: int) -> NDArray[np.intp]:
    """Return the positions (count,) of the largest of numbers (D,), ascending; of equal numbers the first."""
    if count >= len(magnitudes):
        return np.arange(len(magnitudes))
    least = np.partition(magnitudes, -count)[-count]
    above = np.flatnonzero(magnitudes > least)
    equal = np.flatnonzero(magnitudes == least)[: count - len(above)]
    return np.sort(np.concatenate([above, equal]))


def pack_bits(numbers: NDArray[np.integer], width: int) -> bytes:
    """Return numbers (n,) packed with ``width`` bits each; the last byte is padded with zeros."""
    parts, kind = [], _whole(width)
    for start in range(0, len(numbers), _BLOCK):
        block = numbers[start : start + _BLOCK].astype(kind)
        whole = block.view(np.uint8).reshape(len(block), kind.itemsize)
        bits = np.unpackbits(whole, axis=1, count=width, bitorder="little")
        parts.append(np.packbits(bits.ravel(), bitorder="little").tobytes())
    return b"".join(parts)


def unpack_bits(data: memoryview, count: int, width: int) -> NDArray[np.int64]:
    """Return the numbers (count,) that ``pack_bits`` packed with ``width`` bits each."""
    numbers, kind = np.empty(count, np.int64), _whole(width)
    for start in range(0, count, _BLOCK):
        size = min(_BLOCK, count - start)
        part = np.frombuffer(data[start * width // 8 : _bytes_of((start + size) * width)], np.uint8)
        bits = np.zeros((size, 8 * kind.itemsize), np.uint8)
        bits[:, :width] = np.unpackbits(part, count=size * width, bitorder="little").reshape(size, width)
        numbers[start : start + size] = np.packbits(bits, axis=1, bitorder="little").view(kind).ravel()
    return numbers


def _whole(width: int) -> np.dtype:
    """Return the dtype of unsigned integers with ``width`` bits or more."""
    return np.dtype("<u4" if width <= 32 else "<u8")


def _norms(values: Vector) -> NDArray[np.float32]:
    """Return the norm of each bucket, rounded up, so that no value exceeds the norm."""
    padded = np.zeros(_buckets(len(values)) * BUCKET)
    padded[: len(values)] = values
    exact = np.linalg.norm(padded.reshape(-1, BUCKET), axis=1)
    norms: NDArray[np.float32] = exact.astype(_SINGLE)
    short = norms < exact
    norms[short] = np.nextafter(norms[short], np.float32(np.inf))
    return norms


def _scales(data: memoryview) -> Vector:
    with np.errstate(invalid="ignore"):  # a client may send any bits
        scales = np.frombuffer(data, _SINGLE).astype(np.float64)
    if not np.isfinite(scales).all() or (scales < 0).any():
        raise ArraysMismatchError("its compressed update has a scale that isn't a finite number of 0 or more")
    return scales


def _buckets(size: int) -> int:
    return -(-size // BUCKET)


def _bytes_of(bits: int) -> int:
    return -(-bits // 8)
