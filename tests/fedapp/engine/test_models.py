"""Sums of models, on the host and as on a GPU, against a loop over clients."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedapp.engine import models
from fedapp.engine.models import Models, ModelsOnGPU, ModelsOnHost, models_of

# Arrays of 6 and 2 values, one number, and nothing, in a model of 10; the value 7 isn't trained. Buffers come last.
STARTS, SIZE = {"empty": 0, "weight": 0, "scale": 6, "bias": 8}, 10
SHAPES: dict[str, tuple[int, ...]] = {"weight": (2, 3), "scale": (), "bias": (2,), "empty": (0, 3)}
KINDS = (ModelsOnHost, ModelsOnGPU)


def stacks_of(seed: int, sizes: tuple[int, ...]) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        {name: torch.randn(size, *shape, generator=generator) for name, shape in SHAPES.items()}
        for size in sizes
    ]


def by_hand(stacks: list[dict[str, torch.Tensor]], base: np.ndarray) -> list[np.ndarray]:
    found = []
    for stack in stacks:
        for row in range(len(stack["bias"])):
            model = base.copy()
            model[:6] = stack["weight"][row].flatten().numpy()
            model[6] = float(stack["scale"][row])
            model[8:] = stack["bias"][row].numpy()
            found.append(model)
    return found


@given(st.integers(0, 2**31), st.lists(st.integers(1, 5), min_size=1, max_size=3), st.data())
def test_sums_are_those_of_a_loop(seed, sizes, data):
    stacks = stacks_of(seed, tuple(sizes))
    base = np.random.default_rng(seed).normal(size=SIZE)
    expected = by_hand(stacks, base)
    rows = data.draw(st.permutations(range(len(expected))))[: data.draw(st.integers(1, len(expected)))]
    weights = data.draw(
        st.lists(st.floats(-2, 2, allow_subnormal=False), min_size=len(rows), max_size=len(rows))
    )
    total = np.zeros(SIZE)
    for row, weight in zip(rows, weights, strict=True):
        total += weight * (expected[row] - base)
    found = [kind(stacks, STARTS).weighted_sum(rows, weights, base) for kind in KINDS]
    np.testing.assert_array_equal(found[0], total)
    np.testing.assert_allclose(found[1], total, rtol=1e-12, atol=1e-12)
    for kind in KINDS:
        made: Models = kind(stacks, STARTS)
        for row, model in enumerate(expected):
            np.testing.assert_array_equal(made.model(row, base), model)


@pytest.mark.parametrize("kind", KINDS)
def test_a_few_values_at_a_time_sum_to_the_same(kind, monkeypatch):
    stacks, base = stacks_of(1, (3, 4)), np.arange(10.0)
    rows, weights = list(range(7)), [0.1 * number for number in range(7)]
    whole = kind(stacks, STARTS).weighted_sum(rows, weights, base)  # type: ignore[call-arg]
    monkeypatch.setattr(models, "AT_ONCE", 14)
    monkeypatch.setattr(models, "AT_ONCE_ON_GPU", 14)
    few = kind(stacks, STARTS).weighted_sum(rows, weights, base)  # type: ignore[call-arg]
    np.testing.assert_allclose(few, whole, rtol=1e-14)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("value", "harmless"), [(1.0, True), (1e14, True), (1e16, False), (np.nan, False), (np.inf, False)]
)
def test_what_may_not_count_is_seen(kind, value, harmless):
    stacks = stacks_of(2, (2,))
    stacks[0]["weight"][1, 0, 0] = value
    assert kind(stacks, STARTS).harmless == harmless  # type: ignore[call-arg]


def test_what_was_trained_on_the_host_is_summed_there():
    assert isinstance(models_of(stacks_of(0, (2,)), STARTS), ModelsOnHost)
    on_meta = [{name: value.to("meta") for name, value in stack.items()} for stack in stacks_of(0, (2,))]
    assert isinstance(models_of(on_meta, STARTS), ModelsOnGPU)
