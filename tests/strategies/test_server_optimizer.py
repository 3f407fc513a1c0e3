"""Server optimizers, two steps by hand; the loop's use of them is in test_asynchronous.py."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strategies.server_optimizer import OPTIMIZERS, make_optimizer

MODEL, FIRST, SECOND = np.array([1.0, -2.0]), np.array([0.5, -1.0]), np.array([1.0, 0.0])


def two_steps(name: str, lr: float) -> list[list[float]]:
    optimizer = make_optimizer(name, lr)
    one = optimizer.step(MODEL, FIRST)
    return [one.tolist(), optimizer.step(one, SECOND).tolist()]


def test_sgd_by_hand() -> None:
    # 1 + .5·.5 = 1.25, −2 − .5·1 = −2.5; then 1.25 + .5·1 = 1.75, −2.5 + 0.
    assert two_steps("sgd", 0.5) == [[1.25, -2.5], [1.75, -2.5]]


def test_momentum_by_hand() -> None:
    # v = (.5, −1), θ = (1, −2) + .5 v = (1.25, −2.5);
    # v = .9 (.5, −1) + (1, 0) = (1.45, −.9), θ = (1.25 + .725, −2.5 − .45).
    one, two = two_steps("momentum", 0.5)
    assert one == [1.25, -2.5]
    assert two == pytest.approx([1.975, -2.95], rel=1e-14)


def test_adam_by_hand() -> None:
    # m = .1 (.5, −1) = (.05, −.1); v = .99·1e-6 + .01 (.25, 1) = (.00250099, .01000099);
    # θ = (1, −2) + .1 (.05 / (√.00250099 + .001), −.1 / (√.01000099 + .001)).
    # Then m = .9 (.05, −.1) + .1 (1, 0) = (.145, −.09); v = .99 (.00250099, .01000099) + .01 (1, 0)
    # = (.0124759801, .0099009801).
    first = [
        1 + 0.005 / (math.sqrt(0.00250099) + 0.001),  # 1.0980202
        -2 - 0.01 / (math.sqrt(0.01000099) + 0.001),  # −2.0990052
    ]
    second = [
        first[0] + 0.0145 / (math.sqrt(0.0124759801) + 0.001),
        first[1] - 0.009 / (math.sqrt(0.0099009801) + 0.001),
    ]
    assert first == pytest.approx([1.09802, -2.09901], abs=1e-5)
    one, two = two_steps("adam", 0.1)
    assert one == pytest.approx(first, rel=1e-14)
    assert two == pytest.approx(second, rel=1e-14)


@settings(deadline=None)
@given(st.lists(st.lists(st.floats(-1e6, 1e6), min_size=3, max_size=3).map(np.array), min_size=2, max_size=6))
def test_sgd_with_rate_one_adds_the_updates_bit_for_bit(vectors: list[np.ndarray]) -> None:
    optimizer, model, expected = make_optimizer("sgd", 1.0), vectors[0], vectors[0]
    for update in vectors[1:]:
        model, expected = optimizer.step(model, update), expected + update
    assert model.tobytes() == expected.tobytes()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_no_argument_is_written_to(name: str) -> None:
    optimizer, model, update = make_optimizer(name, 0.3), MODEL.copy(), FIRST.copy()
    for _ in range(3):
        optimizer.step(model, update)
    assert model.tolist() == MODEL.tolist()
    assert update.tolist() == FIRST.tolist()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_two_optimizers_share_no_state(name: str) -> None:
    make_optimizer(name, 0.3).step(MODEL, 100 * FIRST)
    assert two_steps(name, 0.3) == two_steps(name, 0.3)


def test_an_unknown_optimizer_is_refused_with_what_is_allowed() -> None:
    with pytest.raises(ValueError, match=r"^server-optimizer = 'lamb': allowed are sgd, momentum, adam$"):
        make_optimizer("lamb", 1.0)
