"""Noise of clients in a secure sum: its variance, whoever goes, its range, and what no value tells."""

import math

import numpy as np
import pytest

from strategies import streams
from strategies.secure.discrete_gaussian import ROUNDING
from strategies.secure.graph import least_of, terms_for
from strategies.secure.masking import MODULUS, WRAPS, Quantizer, Ring, SecureSumError
from tests.strategies.secure.sums import Sum

NUMBER, SIZE, NORM, Z = 9, 20_000, 0.5, 0.7


def quantizer_of(number: int = NUMBER, z: float = Z, size: int = SIZE) -> Quantizer:
    return Quantizer.with_noise(NORM, z, number, least_of(number, terms_for(number).threshold), size)


def encoded(updates: np.ndarray, quantizer: Quantizer) -> list[Ring]:
    tools = ("round", "noise")
    rngs = [[streams.generator(5, tool, i) for tool in tools] for i in range(len(updates))]
    return [quantizer.encode(d, 1.0, one, noise=other) for d, (one, other) in zip(updates, rngs, strict=True)]


def updates_of(length: float, number: int = NUMBER, size: int = SIZE) -> np.ndarray:
    drawn = np.random.default_rng(number).normal(size=(number, size))
    return drawn * (length / np.linalg.norm(drawn, axis=1))[:, None]


def summed(updates: np.ndarray, quantizer: Quantizer, gone: dict[int, int]) -> tuple[np.ndarray, list[int]]:
    """Return the sum, and the clients in it."""
    each = Sum.of(len(updates), gone)
    total = each.total(encoded(updates, quantizer))
    return quantizer.decode(total, len(each.server.summed)).update, sorted(each.server.summed)


@pytest.mark.parametrize("gone", [{}, {1: 0, 4: 1, 7: 2}, {1: 3, 4: 3, 7: 3}])
def test_the_sum_has_the_noise_of_those_in_it_and_no_less_than_asked(gone: dict[int, int]) -> None:
    updates, quantizer = updates_of(0.9 * NORM), quantizer_of()
    found, stayed = summed(updates, quantizer, gone)
    noise = found - updates[stayed].sum(0)
    step = 2 * NORM / quantizer.levels
    error = 4 / (2 * SIZE) ** 0.5  # four standard errors
    assert noise.std() == pytest.approx(quantizer.deviation * step * len(stayed) ** 0.5, rel=error)
    assert abs(noise.mean()) < 4 * noise.std() / SIZE**0.5
    assert noise.std() == pytest.approx(Z * NORM * (len(stayed) / 6) ** 0.5, rel=error)  # 6 of 9 have z S


@pytest.mark.parametrize("number", [3, 4, 10, 100, 1000])
@pytest.mark.parametrize("z", [1e-3, 0.5, 1.0, 30.0])
def test_the_fewest_have_the_noise_that_was_asked_for_and_all_fit_the_range(number: int, z: float) -> None:
    least, size = least_of(number, terms_for(number).threshold), 10**6
    quantizer = quantizer_of(number, z, size)
    sensitivity = quantizer.levels // 2
    assert quantizer.levels % 2 == 0
    # In whole numbers: a Gaussian of variance least σ² − r², and its noise multiplier.
    assert least * quantizer.deviation**2 - ROUNDING**2 >= (z * sensitivity) ** 2
    assert (
        math.sqrt(least * quantizer.deviation**2 - ROUNDING**2) <= z * sensitivity + 2 * least**0.5 + ROUNDING
    )
    tail = math.sqrt(2 * math.log(2 * size / WRAPS)) * quantizer.deviation * number**0.5
    assert number * sensitivity + tail < MODULUS / 2
    assert number * sensitivity + tail > 0.99 * MODULUS / 2  # and no finer levels do


def test_an_update_isnt_longer_than_the_sensitivity_in_whole_numbers() -> None:
    quantizer = quantizer_of(1000, 1.0)
    plain = Quantizer(NORM, quantizer.levels, NORM)
    for update in (*updates_of(3.0, 3), np.full(SIZE, -1.0), np.eye(1, SIZE)[0]):
        values = plain.encode(update, 1.0, streams.generator(1, "round"))[3:].astype(np.int64)
        assert sum(int(v) ** 2 for v in values - quantizer.levels // 2) <= (quantizer.levels // 2) ** 2
    zero = plain.encode(np.zeros(SIZE), 1.0, streams.generator(1, "round"))[3:]
    assert (zero == quantizer.levels // 2).all()


def test_without_noise_the_sum_is_the_plain_ones_limit() -> None:
    updates = updates_of(0.9 * NORM, size=50)
    for z in (1e-2, 1e-4, 1e-6):
        found, _ = summed(updates, quantizer_of(z=z, size=50), {})
        assert np.abs(found - updates.sum(0)).max() < 6 * z * NORM
    assert quantizer_of(z=0.0, size=50).levels == pytest.approx(
        Quantizer.for_sum(1.0, NUMBER).levels, rel=1e-5
    )


def test_no_value_tells_who_was_shortened() -> None:
    quantizer = quantizer_of()
    each = Sum.of(NUMBER)
    total = each.total(encoded(updates_of(40 * NORM), quantizer))
    decoded = quantizer.decode(total, NUMBER)
    assert (decoded.longer, decoded.outside) == (0, 0)
    assert decoded.weight == NUMBER * quantizer.levels


def test_a_sum_of_fewer_than_bring_the_noise_isnt_opened() -> None:
    each = Sum.of(NUMBER, dict.fromkeys(range(4), 2), least=least_of(NUMBER, terms_for(NUMBER).threshold))
    with pytest.raises(SecureSumError, match="5 masked updates came, and a sum is of 6 or more"):
        each.total([np.zeros(4, np.uint32)] * NUMBER)


@pytest.mark.parametrize(
    ("number", "threshold", "least"), [(3, 2, 3), (9, 5, 6), (10, 9, 10), (1000, 84, 667)]
)
def test_a_third_may_go_but_for_the_threshold(number: int, threshold: int, least: int) -> None:
    assert least_of(number, threshold) == least
