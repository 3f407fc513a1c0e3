"""Codes of updates: numbers by hand, sizes from the layout alone, right in the mean, and no bytes that do harm."""

import itertools
import math
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from strategies.flower.arrays import ArraysMismatchError
from strategies.updates.compressors import BUCKET, Qsgd, Sizes, code_of, largest, pack_bits, unpack_bits

NAMES = ["fp16", "int8", "topk:0.01", "topk:0.3", "topk:1", "qsgd:1", "qsgd:4", "qsgd:16"]
F4, F8 = np.dtype(np.float32), np.dtype(np.float64)


class Drawn:
    """A generator that draws given numbers."""

    def __init__(self, *numbers: float) -> None:
        self.numbers = list(numbers)

    def random(self, size: int) -> Any:
        taken, self.numbers = self.numbers[:size], self.numbers[size:]
        return np.array(taken)


def coded(name: str, values: list[float], arrays: tuple[int, ...], dtype: Any = F4, *drawn: float) -> Any:
    """Return the bytes of a code, and what they mean."""
    code, sizes = code_of(name), Sizes(arrays, dtype)
    assert code is not None
    data = code.encode(np.array(values, dtype=np.float64), sizes, Drawn(*drawn))  # type: ignore[arg-type]
    return data, code.decode(memoryview(data), sizes).tolist()


# By hand ---------------------------------------------------------------------------------------------------------


def test_half_precision_by_hand():
    # 1 + 2⁻¹¹ lies between 1 and 1 + 2⁻¹⁰, and goes to the even one; what is too large is cut off.
    data, meant = coded("fp16", [1.0, 1 + 2**-11, -2.5, 1e9], (3, 1))
    assert data == bytes.fromhex("003c 003c 00c1 ff7b")
    assert meant == [1.0, 1.0, -2.5, 65504.0]


def test_int8_by_hand():
    # The first array's scale is 254/127 = 2, the second's 1; 3 and 5 are halves of multiples, which go to the even.
    data, meant = coded("int8", [254.0, 3.0, 5.0, -1.2, -127.0, 0.4, 0.0], (4, 2, 1))
    assert (
        data
        == np.float32(2).tobytes() + b"\x7f\x02\x02\xff" + np.float32(1).tobytes() + b"\x81\0" + b"\0" * 5
    )
    assert meant == [254.0, 4.0, 4.0, -2.0, -127.0, 0.0, 0.0]


def test_topk_by_hand():
    # Two of eight: −4, and of the two 3 the first. Their indices in three bits each would be a byte, as many as a bit
    # for each of the eight, which is taken: bits 2 and 5.
    data, meant = coded("topk:0.25", [1.0, 0.0, -4.0, 2.0, 0.5, 3.0, 3.0, 1.0], (3, 5))
    assert data == b"\x24" + np.array([-4.0, 3.0], "<f4").tobytes()
    assert meant == [0.0, 0.0, -4.0, 0.0, 0.0, 3.0, 0.0, 0.0]
    # One of 64: six bits are shorter than 64; 62 is 111110. In float64 it is exact.
    values = [0.0] * 64
    values[62] = 0.1
    data, meant = coded("topk:0.001", values, (64,), F8)
    assert data == bytes([0b111110]) + np.float64(0.1).tobytes()
    assert meant == values


def test_qsgd_by_hand():
    # ‖(3, −4)‖ = 5 and s = 3: 3 · 3/5 = 1.8 goes down to 1 at 0.8, 3 · 4/5 = 2.4 up to 3 at 0.3. Two bits of level
    # and one of sign each: 1 = 01|0 and 3, −: 11|1, from the lowest bit on: 100 111, that is 1 + 8 + 16 + 32.
    data, meant = coded("qsgd:2", [3.0, -4.0, 0.0], (2, 1), F4, 0.8, 0.3, 0.0)
    assert data == np.float32(5).tobytes() + bytes([0b111001]) + bytes(4) + bytes(1)
    assert meant == pytest.approx([5 / 3, -5.0, 0.0], rel=1e-15)
    assert coded("qsgd:2", [3.0, -4.0], (2,), F4, 0.79, 0.41)[1] == pytest.approx([10 / 3, -10 / 3])


def test_each_bucket_of_an_array_has_its_own_norm():
    values = [1.0] + [0.0] * (BUCKET - 1) + [-100.0, 0.0]
    data, meant = coded("qsgd:1", values, (len(values),), F4, *[0.5] * len(values))
    assert data[:8] == np.array([1.0, 100.0], "<f4").tobytes()
    assert meant == values


@pytest.mark.parametrize("name", NAMES)
def test_nothing_at_all_and_zeros_have_a_code(name):
    assert coded(name, [], ())[1] == []
    assert coded(name, [], (0, 0))[1] == []
    assert coded(name, [0.0] * 3, (0, 3), F4, 0.5, 0.5, 0.5)[1] == [0.0] * 3


@pytest.mark.parametrize(
    "name",
    [
        "",
        "Int8",
        "int4",
        "fp16:1",
        "topk",
        "topk:",
        "topk:0",
        "topk:1.1",
        "topk:nan",
        "qsgd",
        "qsgd:0",
        "qsgd:17",
        "qsgd:4.0",
        "qsgd:-4",
        "qsgd:٤",
        "topk:0,1",
    ],
)
def test_another_name_is_refused_with_what_is_allowed(name):
    with pytest.raises(
        ValueError, match=r"allowed are none, fp16, int8, topk:F with F in \(0, 1\], or qsgd"
    ) as caught:
        code_of(name)
    assert str(caught.value).startswith(f"compression = {name!r}: ")


# Sizes -----------------------------------------------------------------------------------------------------------

vectors = st.lists(st.floats(-1e6, 1e6, width=32), min_size=0, max_size=40)


@given(st.sampled_from(NAMES), vectors, st.integers(0, 40), st.sampled_from([F4, F8]), st.integers(0, 9))
def test_its_size_follows_from_the_layout_alone(name, values, cut, dtype, seed):
    code, first = code_of(name), min(cut, len(values))
    sizes = Sizes((first, len(values) - first), dtype)
    assert code is not None
    data = code.encode(np.array(values), sizes, np.random.Generator(np.random.PCG64(seed)))
    assert len(data) == code.num_bytes(sizes)
    assert len(code.decode(memoryview(data), sizes)) == len(values)


def test_the_sizes_of_a_model_by_hand():
    # D = 9,600 + 10: a top hundredth is 97 of it, of 14 bits and 4 bytes each; 19 buckets and one.
    sizes = Sizes((9600, 10), F4)
    expected = {
        "fp16": 2 * 9610,
        "int8": 9610 + 2 * 4,
        "topk:0.01": math.ceil(97 * 14 / 8) + 97 * 4,
        "topk:0.1": math.ceil(9610 / 8) + 961 * 4,
        "topk:1": math.ceil(9610 / 8) + 9610 * 4,
        "qsgd:4": 4 * (19 + 1) + math.ceil(9600 * 5 / 8) + math.ceil(10 * 5 / 8),
    }
    found = {name: code.num_bytes(sizes) for name in expected if (code := code_of(name)) is not None}
    assert found == expected


@pytest.mark.parametrize(
    ("share", "total", "count"), [(0.07, 100, 7), (0.01, 9610, 97), (1e-9, 5, 1), (1.0, 5, 5)]
)
def test_a_share_is_rounded_up(share, total, count):
    code: Any = code_of(f"topk:{share}")
    assert code.count(total) == count


@given(
    st.integers(1, 17).flatmap(
        lambda width: st.tuples(st.just(width), st.lists(st.integers(0, 2**width - 1)))
    )
)
def test_bits_come_back(case):
    width, numbers = case
    data = pack_bits(np.array(numbers, dtype=np.int64), width)
    assert len(data) == math.ceil(len(numbers) * width / 8)
    assert int.from_bytes(data, "little") == sum(n << (i * width) for i, n in enumerate(numbers))
    assert unpack_bits(memoryview(data), len(numbers), width).tolist() == numbers


def test_bits_come_back_across_blocks():
    numbers = np.arange(200_000) % 8191
    assert (unpack_bits(memoryview(pack_bits(numbers, 13)), len(numbers), 13) == numbers).all()


@given(st.lists(st.integers(0, 3), min_size=1), st.integers(1, 12))
def test_the_largest_are_those_that_a_stable_sort_has_first(values, count):
    order = sorted(range(len(values)), key=lambda place: -values[place])[:count]
    assert largest(np.array(values, dtype=float), count).tolist() == sorted(order)


# What they mean --------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(-50, 50), min_size=1, max_size=5), st.integers(1, 5))
@example([3, -4], 2)
def test_qsgd_is_right_in_the_mean_over_all_that_can_be_drawn(values, bits):
    # Each value goes up with probability a − ⌊a⌋ and down else: 2ⁿ outcomes, with the bound of the paper's lemma 3.1.
    vector, s = np.array(values, dtype=float), 2**bits - 1
    norm = float(np.linalg.norm(vector))
    up = np.zeros(len(vector)) if not norm else s * np.abs(vector) / norm % 1
    mean, spread = np.zeros(len(vector)), 0.0
    for outcome in itertools.product([True, False], repeat=len(vector)):
        chance = float(np.prod([p if yes else 1 - p for p, yes in zip(up, outcome, strict=True)]))
        drawn = [0.0 if yes else 1 - 2**-53 for yes in outcome]
        meant = np.array(coded(f"qsgd:{bits}", vector.tolist(), (len(vector),), F4, *drawn)[1])
        mean += chance * meant
        spread += chance * float(((meant - vector) ** 2).sum())
    n = len(vector)
    assert mean == pytest.approx(vector, abs=1e-5 * norm)
    assert spread <= min(n / s**2, n**0.5 / s) * norm**2 * (1 + 1e-5)


@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=30), st.integers(1, 16), st.integers(0, 9))
def test_a_level_is_one_of_the_two_next_to_a_value(values, bits, seed):
    code, vector = Qsgd(bits), np.array(values)
    sizes = Sizes((len(values),), F4)
    data = code.encode(vector, sizes, np.random.Generator(np.random.PCG64(seed)))
    meant = code.decode(memoryview(data), sizes)
    norm = float(np.linalg.norm(vector))
    assert (np.abs(meant - vector) <= norm / code.levels * (1 + 1e-6) + 1e-38).all()
    assert (meant * vector >= 0).all()


@given(vectors.filter(len))
def test_how_far_the_biased_ones_are_off_at_most(values):
    vector = np.array(values)
    top = np.abs(vector).max()
    half = np.array(coded("fp16", values, (len(values),))[1])
    inside = np.abs(vector) <= 65504
    assert (np.abs(half - vector)[inside] <= np.maximum(2**-11 * np.abs(vector), 2**-25)[inside]).all()
    eight = np.array(coded("int8", values, (len(values),))[1])
    assert (np.abs(eight - vector) <= top / 127 * (0.5 + 1e-4) + 1e-36).all()
    share = np.array(coded("topk:0.3", values, (len(values),))[1])
    kept = math.ceil(0.3 * len(values) - 1e-6)
    # ‖v − C(v)‖² ≤ (1 − k/D) ‖v‖², which error feedback rests on (Stich et al. 2018, definition 2.1)
    assert ((share - vector) ** 2).sum() <= (1 - kept / len(values)) * (vector**2).sum() * (1 + 1e-6)


# Bytes that lie --------------------------------------------------------------------------------------------------


@given(st.sampled_from(NAMES), st.lists(st.integers(0, 12), max_size=3), st.data())
def test_no_bytes_of_the_right_number_do_more_than_be_refused(name, arrays, data):
    code, sizes = code_of(name), Sizes(tuple(arrays), F4)
    assert code is not None
    size = code.num_bytes(sizes)
    with suppress(ArraysMismatchError):
        assert len(code.decode(memoryview(data.draw(st.binary(min_size=size, max_size=size))), sizes)) == sum(
            arrays
        )


@pytest.mark.parametrize(
    "where", [b"\x84\x01", b"\x00\x00", b"\xff\xff"], ids=["falling", "equal", "outside"]
)
def test_places_that_are_none_are_refused(where):
    # Two of 60 values in six bits each: 4 and 6, 0 twice, and 63 twice.
    code, sizes = code_of("topk:0.03"), Sizes((60,), F4)
    assert code is not None
    assert code.num_bytes(sizes) == 2 + 8
    good = pack_bits(np.array([6, 4]), 6) if where[0] == 0x84 else where
    with pytest.raises(ArraysMismatchError, match="has no 2 places of 60 in their order"):
        code.decode(memoryview(good + bytes(8)), sizes)


@pytest.mark.parametrize("scale", [np.nan, np.inf, -1.0])
@pytest.mark.parametrize("name", ["int8", "qsgd:3"])
def test_scales_that_are_none_are_refused(name, scale):
    code, sizes = code_of(name), Sizes((2,), F4)
    assert code is not None
    data = np.float32(scale).tobytes() + bytes(code.num_bytes(sizes) - 4)
    with pytest.raises(ArraysMismatchError, match=r"a scale that isn't a finite number of 0 or more"):
        code.decode(memoryview(data), sizes)
