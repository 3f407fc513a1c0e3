"""Serialisation without Flower's cost for small arrays: the same bytes, the same values, and nothing more trusted."""

import pickle
from io import BytesIO

import numpy as np
import pytest
from flwr.app import Array
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from strategies.flower.arrays import pack, unpack

DTYPES = [
    "?",
    "i1",
    "u1",
    "<i2",
    ">i4",
    "<i8",
    ">u8",
    "<f2",
    "<f4",
    ">f4",
    "<f8",
    ">f8",
    "<c8",
    ">c16",
    "<U3",
    "S2",
    "<M8[s]",
]


@st.composite
def arrays(draw: st.DrawFn) -> np.ndarray:
    """Draw arrays of 0 to 3 dimensions, empty ones too; any bytes, so NaN, −0 and subnormal numbers as well."""
    dtype = np.dtype(draw(st.sampled_from(DTYPES)))
    shape = draw(hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4))
    if dtype.kind in "bUS":
        return draw(hnp.arrays(dtype, shape))
    size = int(np.prod(shape)) * dtype.itemsize
    return np.frombuffer(draw(st.binary(min_size=size, max_size=size)), dtype).reshape(shape)


def fields(array: Array) -> tuple[str, tuple[int, ...], str, bytes]:
    return array.dtype, tuple(array.shape), array.stype, array.data


def assert_same(values: np.ndarray, expected: np.ndarray) -> None:
    assert isinstance(values, np.ndarray)
    assert (values.dtype, values.shape) == (expected.dtype, expected.shape)
    assert values.tobytes() == expected.tobytes()


@given(arrays())
def test_packed_arrays_are_flowers_byte_for_byte(values):
    assert fields(pack(values)) == fields(Array(values))


@given(arrays())
def test_unpacked_values_are_flowers(values):
    for array in (pack(values), Array(values), Array(np.array(values, order="F"))):
        assert_same(unpack(array), array.numpy())
        assert_same(unpack(array), values)


@pytest.mark.parametrize("dtype", ["<f4", ">f8", "<i8"])
def test_any_layout_in_memory_is_packed_in_c_order(dtype):
    base = np.arange(24, dtype=dtype).reshape(2, 3, 4)
    views = [np.asfortranarray(base), base.T, base[:, ::2], base[..., ::-1], base[:, :1], base[1:1]]
    for view in views:
        assert fields(pack(view)) == fields(Array(np.array(view, order="C")))
        assert_same(unpack(pack(view)), np.array(view, order="C"))


def test_a_packed_array_is_a_copy():
    values = np.zeros(3)
    array = pack(values)
    values += 1
    assert unpack(array).tolist() == [0.0, 0.0, 0.0]


def saved(values: np.ndarray, version: tuple[int, int] | None = None) -> bytes:
    buffer = BytesIO()
    np.lib.format.write_array(buffer, values, version)
    return buffer.getvalue()


W = np.arange(6, dtype=np.float32).reshape(2, 3)


@pytest.mark.parametrize(
    ("array", "expected"),
    [
        (Array("float32", (2, 3), "numpy.ndarray", saved(W, (2, 0))), W),
        (Array("float32", (2, 3), "numpy.ndarray", saved(W, (3, 0))), W),
        (Array("float32", (2, 3), "numpy.ndarray", saved(np.asfortranarray(W))), W),
        (Array("float32", (2, 3), "numpy.ndarray", saved(W.astype(">f4"))), W.astype(">f4")),
        # what a record declares isn't believed, neither shape nor dtype
        (Array("float32", (3, 2), "numpy.ndarray", saved(W)), W),
        (Array("float64", (2, 3), "numpy.ndarray", saved(W)), W),
        (Array("no dtype", (2, 3), "numpy.ndarray", saved(W)), W),
        (Array("", (2, 3), "numpy.ndarray", saved(W)), W),
        (Array("float32", (-1, 6), "numpy.ndarray", saved(W)), W),
        # bytes after the values are left alone
        (Array("float32", (2, 3), "numpy.ndarray", saved(W) + b"more"), W),
    ],
)
def test_bytes_that_are_not_ours_are_read_as_flower_reads_them(array, expected):
    assert_same(array.numpy(), expected)
    assert_same(unpack(array), expected)


def header(dtype: str, shape: str) -> bytes:
    text = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': {shape}, }}"
    text += " " * (-(len(text) + 11) % 64) + "\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode()


@pytest.mark.parametrize(
    "array",
    [
        Array("float32", (2, 3), "numpy.ndarray", b""),
        Array("float32", (2, 3), "numpy.ndarray", b"\x93NUMPY torn"),
        Array("float32", (2, 3), "numpy.ndarray", saved(W)[:-4]),
        Array("float32", (2, 3), "numpy.ndarray", saved(W)[:20]),
        Array("float32", (2, 3), "numpy.ndarray", pickle.dumps(W)),
        Array("float32", (2, 3), "pickle", saved(W)),
        # eight bytes of the sender's must not become the address of an object
        Array("object", (1,), "numpy.ndarray", header("|O", "(1,)") + b"\x01" * 8),
        Array("O", (), "numpy.ndarray", header("|O", "()") + b"\x01" * 8),
        Array("float32", (-2, -3), "numpy.ndarray", header("<f4", "(-2, -3)") + b"\x00" * 24),
        Array(
            "float32",
            (10**9, 10**9),
            "numpy.ndarray",
            header("<f4", "(1000000000, 1000000000)") + b"\x00" * 4,
        ),
    ],
    ids=[
        "empty",
        "torn header",
        "torn data",
        "header alone",
        "pickle",
        "other kind",
        "objects",
        "one object",
        "negative shape",
        "huge shape",
    ],
)
def test_what_is_no_array_raises_with_flower_and_here(array):
    for read in (Array.numpy, unpack):
        with pytest.raises(Exception):  # noqa: B017, PT011  # whatever NumPy raises
            read(array)
