"""Records to vectors and back, and what is refused."""

from io import BytesIO

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from strategies.flower.arrays import ArraysMismatchError, Layout

DTYPES = st.sampled_from([np.float16, np.float32, np.float64, np.int64])


@st.composite
def arrays(draw: st.DrawFn) -> np.ndarray:
    """Draw an array of 0 to 3 dimensions; whole numbers that float64 holds exactly."""
    dtype = draw(DTYPES)
    shape = draw(hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3))
    elements = st.integers(-(2**53), 2**53) if dtype is np.int64 else None
    if elements is None:
        largest = 2.0**15 if dtype is np.float16 else 2.0**50  # a model with values beyond is refused
        elements = st.floats(-largest, largest, width=np.dtype(dtype).itemsize * 8)
    return draw(hnp.arrays(dtype, shape, elements=elements))


@given(st.lists(arrays(), max_size=4))
def test_record_to_vector_and_back_is_the_same_bit_for_bit(values):
    record = ArrayRecord({f"layer.{i}": Array(array) for i, array in enumerate(values)})
    layout = Layout.of(record)
    vector = layout.to_vector(record)
    assert vector.dtype == np.float64
    assert vector.shape == (layout.size,) == (sum(array.size for array in values),)
    back = layout.to_record(vector)
    assert list(back) == list(record)
    for name, array in zip(back, values, strict=True):
        read = back[name].numpy()
        assert (read.dtype, read.shape, read.tobytes()) == (array.dtype, array.shape, array.tobytes())


def test_vector_holds_the_arrays_in_order():
    record = ArrayRecord(
        {"z": Array(np.array([[1.0, 2.0], [3.0, 4.0]])), "a": Array(np.array(5, dtype=np.int64))}
    )
    assert Layout.of(record).to_vector(record).tolist() == [1.0, 2.0, 3.0, 4.0, 5.0]


def test_column_major_arrays_read_as_row_major_ones():
    values = np.asfortranarray([[1.0, 2.0], [3.0, 4.0]])
    record = ArrayRecord({"w": Array(values)})
    assert Layout.of(record).to_vector(record).tolist() == [1.0, 2.0, 3.0, 4.0]


def test_values_of_integer_arrays_are_rounded_to_the_nearest():
    # Truncation would turn the mean 2.9 of counters into 2, and −2.9 into −2.
    layout = Layout(("n",), ((4,),), (np.dtype(np.int64),))
    record = layout.to_record(np.array([2.9, -2.9, 3.2, 7.0]))
    assert record["n"].numpy().tolist() == [3, -3, 3, 7]
    assert record["n"].dtype == "int64"


@pytest.mark.parametrize(
    ("value", "dtype"), [(2**53 + 1, "i8"), (-(2**63), "i8"), (2**63 - 1, "i8"), (2**64 - 1, "u8")]
)
def test_whole_numbers_that_float64_does_not_hold_are_refused(value, dtype):
    # The mean of equal values would be another value: of 2^63 − 1 it would be −2^63.
    held, beyond = (ArrayRecord({"n": Array(np.array(each, dtype))}) for each in (2**53, value))
    layout = Layout.of(held)
    assert layout.to_record(layout.to_vector(held))["n"].numpy() == 2**53
    for read in (layout.flat, layout.to_vector):
        with pytest.raises(ArraysMismatchError, match=r"^array 'n' holds whole numbers beyond ±2\^53, which"):
            read(beyond)


def test_float32_values_are_the_nearest_ones():
    layout = Layout(("w",), ((1,),), (np.dtype(np.float32),))
    assert layout.to_record(np.array([0.1]))["w"].numpy()[0] == np.float32(0.1)


@pytest.fixture
def layout():
    """The layout of the model that the replies below should have."""
    return Layout.of(_record())


def _record(w: np.ndarray | None = None, b: np.ndarray | None = None) -> ArrayRecord:
    w = np.zeros((2, 3), np.float32) if w is None else w
    return ArrayRecord({"w": Array(w), "b": Array(np.zeros(2) if b is None else b)})


def _with_bytes(data: bytes) -> ArrayRecord:
    record = _record()
    record["w"] = Array("float32", (2, 3), "numpy.ndarray", data)
    return record


def _npz() -> bytes:
    buffer = BytesIO()
    np.savez(buffer, w=np.zeros((2, 3), np.float32))
    return buffer.getvalue()


def _pickled() -> bytes:
    buffer = BytesIO()
    np.save(buffer, np.array([{"a": 1}], dtype=object), allow_pickle=True)
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: ArrayRecord({"w": Array(np.zeros(6))}), r"arrays are \['w'\], the model's are \['w', 'b'\]"),
        (ArrayRecord, r"arrays are \[\]"),
        (
            lambda: _record(w=np.zeros((3, 2), np.float32)),
            r"'w' is float32\[3, 2\], the model's is float32\[2, 3\]",
        ),
        (lambda: _record(b=np.zeros((2, 1))), r"'b' is float64\[2, 1\], the model's is float64\[2\]"),
        (lambda: _record(b=np.zeros(2, np.complex128)), r"'b' is complex128\[2\]"),
        (lambda: _record(b=np.array([1.0, np.nan])), "aren't finite"),
        (lambda: _record(b=np.array([-np.inf, 1.0])), "aren't finite"),
        (lambda: _record(b=np.array([-1e30, 1.0])), r"norm is 1.0e\+30, whose square overflows float32"),
        (lambda: _with_bytes(b""), "'w' can't be read"),
        (lambda: _with_bytes(b"\x93NUMPY torn"), "'w' can't be read"),
        (lambda: _with_bytes(_record()["w"].data[:-4]), "'w' can't be read"),
        (lambda: _with_bytes(_pickled()), "'w' can't be read"),
        (lambda: _with_bytes(_npz()), "'w'"),
    ],
    ids=[
        *("missing name", "empty", "transposed", "one more axis"),
        *(
            "complex numbers",
            "NaN",
            "infinity",
            "1e30",
            "no bytes",
            "torn header",
            "torn data",
            "pickle",
            "npz archive",
        ),
    ],
)
def test_arrays_that_are_not_the_models_are_refused(layout, make, text):
    with pytest.raises(ArraysMismatchError, match=text):
        layout.to_vector(make())


def test_arrays_of_another_order_or_byte_order_are_converted(layout):
    arrays = {"w": np.array([[1, 2, 3], [4, 5, 6]], ">f4"), "b": np.float64([7, 8])}
    for names in (["w", "b"], ["b", "w"]):
        record = ArrayRecord({name: Array(arrays[name]) for name in names})
        assert layout.to_vector(record).tolist() == [1, 2, 3, 4, 5, 6, 7, 8]


@pytest.mark.parametrize("dtype", ["int8", "int64", "bool"])
def test_arrays_of_another_kind_are_refused_with_one_line(layout, dtype):
    arrays = {"w": np.array([[1, 2, 3], [4, 5, 6]], dtype), "b": np.float64([7, 8])}
    record = ArrayRecord({name: Array(values) for name, values in arrays.items()})
    said = rf"^array 'w' is {dtype}\[2, 3\], the model's is float32\[2, 3\]$"
    with pytest.raises(ArraysMismatchError, match=said):
        layout.to_vector(record)


@pytest.mark.parametrize("dtype", ["complex64", "S3", "no-such-dtype"])
def test_a_dtype_that_is_no_real_number_is_refused_by_name(dtype):
    record = ArrayRecord({"w": Array(np.zeros(2)), "b": Array(dtype, (2,), "numpy.ndarray", b"")})
    with pytest.raises(
        ArraysMismatchError, match=rf"^array 'b' is {dtype}; allowed are real numbers of NumPy's"
    ):
        Layout.of(record)


def test_bfloat16_is_refused_by_name():
    bfloat16 = np.dtype(pytest.importorskip("ml_dtypes").bfloat16)  # NumPy takes it for raw bytes
    with pytest.raises(ArraysMismatchError, match=r"^array 'w' is bfloat16; allowed are"):
        Layout.of(ArrayRecord({"w": Array(np.zeros(2, bfloat16))}))


@pytest.mark.parametrize(("value", "too_large"), [(65519.0, False), (65520.0, True), (-7e4, True)])
def test_what_overflows_a_float16_array_is_seen(value, *, too_large):
    arrays = {"w": np.zeros(2, np.float32), "h": np.zeros((1, 2), np.float16), "b": np.zeros(1, np.float32)}
    layout = Layout.of(ArrayRecord({name: Array(values) for name, values in arrays.items()}))
    assert layout.overflows(np.array([0, 0, 0, value, 0])) is too_large
    assert not layout.overflows(np.array([value, value, 0, 0, value]))


def test_declared_shape_and_dtype_are_not_believed(layout):
    # The record says float32 (2, 3); its bytes are five doubles.
    with pytest.raises(ArraysMismatchError, match=r"'w' is float64\[5\]"):
        layout.to_vector(_with_bytes(Array(np.zeros(5)).data))


def test_other_serialisations_are_refused(layout):
    record = _record()
    record["w"] = Array("float32", (2, 3), "pickle", record["w"].data)
    with pytest.raises(ArraysMismatchError, match="can't be read"):
        layout.to_vector(record)


def test_the_text_stays_short_for_models_of_many_arrays():
    record = ArrayRecord({f"layer{i}": Array(np.zeros(1)) for i in range(100)})
    with pytest.raises(ArraysMismatchError, match=r"\['layer0', …, 'layer99'\] \(100\)") as error:
        Layout.of(record).to_vector(ArrayRecord())
    assert len(str(error.value)) < 120
