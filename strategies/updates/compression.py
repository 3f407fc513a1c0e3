"""Compressed updates: their format, and the decompression on the server.

A strategy with ``compression = "topk:0.01"`` or another compressor of ``strategies/updates/compressors.py`` names
the compressor in its training requests. A ClientApp that supports compression has ``compress_updates`` among its
mods, before mods that read the model, such as Flower's for clipping, and after ``unpack_arrays``::

    app = ClientApp(mods=[unpack_arrays, compress_updates])

In place of the trained model the client then sends one array of bytes: the encoded v = Δ + e, with Δ the trained
model minus the model that was sent, followed by the buffers, which aren't compressed. e is the compression residual
of the earlier updates, and v minus the decoded v is the next residual (error feedback: F. Seide et al., 2014; S.
Stich et al., 2018; S. P. Karimireddy et al., 2019); an unbiased compressor has no residual. The residual is kept in
the client's ``context.state`` (``strategies/updates/compression_residual.py``). Random numbers are drawn from the
run's seed, the client and its task.

The size of a compressed update depends on the model's layout alone (``size_of``); the strategy refuses any other
size before it decodes the update. The strategy adds the decoded update to the model that it sent, in the one place
where it reads replies, so that all later steps see an ordinary model.

The mod is in ``strategies/updates/client_compression.py``.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord
from numpy.typing import NDArray

from strategies.flower import messages
from strategies.flower.arrays import ArraysMismatchError, Layout, Vector, check_values
from strategies.updates.buffers import UNTRAINED, untrained_names, untrained_positions
from strategies.updates.compressors import NONE, Code, Sizes, code_of

COMPRESSED = "strategies.compressed"  # serialisation type, and name, of the array


def size_of(layout: Layout, compression: str = NONE, untrained: Sequence[str] = UNTRAINED) -> int:
    """Return the size in bytes of a client's model in its reply, as ``bytes-up`` counts them.

    Parameters
    ----------
    layout : Layout
        Layout of the model: ``Layout.of(arrays)``.
    compression : str
        Name of a compressor, the strategy's parameter ``compression``: see ``strategies.updates.compressors``.
    untrained : sequence of str
        Patterns of the names of buffers, beside arrays of integers; buffers aren't compressed.

    Raises
    ------
    ValueError
        If no compressor has this name.
    """
    found = compressing(compression, layout, untrained)
    return layout.num_bytes if found is None else found.num_bytes


def compressing(compression: str, layout: Layout, untrained: Sequence[str]) -> "Compression | None":
    """Return the compression of a model of this layout, None for ``none``; ValueError for an unknown compressor."""
    code = code_of(compression)
    return None if code is None else Compression(compression, code, layout, tuple(untrained))


@dataclass(frozen=True)
class Compression:
    """A compressor for the models of one layout.

    Attributes
    ----------
    name : str
        Name of the compressor, the strategy's parameter ``compression``.
    untrained : tuple of str
        Patterns of the names of buffers.
    """

    name: str
    code: Code
    layout: Layout
    untrained: tuple[str, ...]

    @cached_property
    def apart(self) -> frozenset[str]:
        """The names of the buffers."""
        return frozenset(untrained_names(self.layout, self.untrained))

    @cached_property
    def trained(self) -> NDArray[np.bool_]:
        """Mask (D,) of the trained values of a model."""
        mask = np.ones(self.layout.size, dtype=bool)
        mask[untrained_positions(self.layout, self.untrained)] = False
        return mask

    @cached_property
    def sizes(self) -> Sizes:
        """Sizes and dtype of the trained arrays, as the compressor needs them."""
        arrays = [(size, dtype) for name, size, dtype in self._arrays() if name not in self.apart]
        exact = np.result_type(*(dtype for _, dtype in arrays)) if arrays else np.dtype(np.float32)
        return Sizes(tuple(size for size, _ in arrays), exact)

    @cached_property
    def rest(self) -> list[tuple[int, np.dtype]]:
        """Number of values and dtype of each buffer; the buffers follow the encoded update."""
        return [(size, dtype.newbyteorder("<")) for name, size, dtype in self._arrays() if name in self.apart]

    def _arrays(self) -> Iterator[tuple[str, int, np.dtype]]:
        layout = self.layout
        return zip(layout.names, layout.sizes, layout.dtypes, strict=True)

    @property
    def num_bytes(self) -> int:
        """Size of a compressed update in bytes, with the buffers."""
        return self.code.num_bytes(self.sizes) + sum(size * dtype.itemsize for size, dtype in self.rest)

    def trained_of(self, model: Vector) -> Vector:
        """Return the trained values of a model (D,), not copied where they are all."""
        return model[self.trained] if self.rest else model

    def buffers_of(self, model: Vector) -> Vector:
        """Return a copy of the buffers of a model (D,)."""
        return model[~self.trained] if self.rest else np.empty(0)

    def write(self, update: Vector, buffers: Vector, rng: np.random.Generator) -> tuple[ArrayRecord, Vector]:
        """Return the record of an update of the trained values, and its compression residual."""
        data = self.encode(update, buffers, rng)
        record = ArrayRecord({self.name: Array("uint8", (len(data),), COMPRESSED, data)})
        decoded = self.code.decode(memoryview(data)[: self.code.num_bytes(self.sizes)], self.sizes)
        return record, np.subtract(update, decoded, out=decoded)

    def encode(self, trained: Vector, buffers: Vector, rng: np.random.Generator) -> bytes:
        """Return the encoded trained values, followed by the buffers."""
        parts, start = [self.code.encode(trained, self.sizes, rng)], 0
        for size, dtype in self.rest:
            values, start = buffers[start : start + size], start + size
            parts.append((values if dtype.kind == "f" else np.rint(values)).astype(dtype).tobytes())
        return b"".join(parts)

    def read(self, record: ArrayRecord, base: NDArray[Any]) -> Vector:
        """Return the model (D,) from a compressed record and the model (D,) that the client was sent.

        Raises
        ------
        ArraysMismatchError
            If the record is invalid; its size is checked before it is decoded.
        """
        ((name, array),) = record.items()
        if name != self.name:
            known = messages.clean(name, messages.LONGEST_NAME)
            raise ArraysMismatchError(f"its update is compressed by {known!r}, asked was {self.name!r}")
        if len(array.data) != self.num_bytes:
            raise ArraysMismatchError(
                f"its compressed update takes {len(array.data)} bytes; one of this model takes {self.num_bytes}"
            )
        model = self.decode(array.data, base)
        check_values(model)
        return model

    def decode(self, encoded: bytes, base: NDArray[Any]) -> Vector:
        """Return a model (D,) of what ``encode`` has encoded: buffers, and values that are added to ``base`` (D,)."""
        data, start = memoryview(encoded), self.code.num_bytes(self.sizes)
        model = np.array(base, dtype=np.float64)
        others = [np.empty(0)]
        with np.errstate(invalid="ignore", over="ignore"):  # a client may send any bits
            if not self.rest:
                model += self.code.decode(data, self.sizes)
                return model
            model[self.trained] += self.code.decode(data[:start], self.sizes)
            for size, dtype in self.rest:
                others.append(np.frombuffer(data, dtype, size, start).astype(np.float64))
                start += size * dtype.itemsize
        model[~self.trained] = np.concatenate(others)
        return model


def is_compressed(record: ArrayRecord) -> bool:
    """Return True if ``compress_updates`` has written the record."""
    return [array.stype for array in record.values()] == [COMPRESSED]


def request_fields(
    compression: str, seed: int, run: int, key: str, untrained: Sequence[str]
) -> dict[str, Any]:
    """Return the fields of a training request that tell a client to compress its update; none for ``none``.

    Parameters
    ----------
    seed, run : int
        Seed of the run's random numbers, and the run's unique number.
    key : str
        The name of the record of arrays.
    untrained : sequence of str
        Patterns of the names of buffers.
    """
    if compression == NONE:
        return {}
    fields = {messages.COMPRESSION: compression, messages.SEED: seed, messages.RUN: run}
    named = {messages.MODEL: key} if key != messages.ARRAYS else {}
    return {**fields, **named, messages.UNTRAINED: list(untrained)}
