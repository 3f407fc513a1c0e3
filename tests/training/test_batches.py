"""Which examples each step sees: every epoch each once, steps at random, all from seed, client and task."""

import math
from itertools import chain

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedapp.training.batches import FEW, batches_of_many, permutation, plan_many, task_rng
from tests.training.cases import plan, rows_of

sizes, seeds = st.integers(1, 80), st.integers(0, 2**32)


@given(n=sizes, batch=st.integers(1, 100), epochs=st.integers(1, 4), seed=seeds)
def test_every_epoch_sees_every_example_once(n, batch, epochs, seed):
    steps = rows_of(plan(n, batch=batch, epochs=epochs, key=(seed, 0, 0)))
    width = min(batch, n)
    per_epoch = math.ceil(n / width)
    assert len(steps) == epochs * per_epoch
    for epoch in range(epochs):
        own = steps[epoch * per_epoch : (epoch + 1) * per_epoch]
        assert sorted(chain.from_iterable(own)) == list(range(n))
        assert [len(rows) for rows in own[:-1]] == [width] * (per_epoch - 1)
        assert len(own[-1]) == n - width * (per_epoch - 1)


@given(n=sizes, batch=st.integers(1, 100), count=st.integers(1, 20), seed=seeds)
def test_a_step_draws_different_rows(n, batch, count, seed):
    steps = rows_of(plan(n, batch=batch, steps=count, key=(seed, 0, 0)))
    assert len(steps) == count
    for rows in steps:
        assert len(rows) == len(set(rows)) == min(batch, n)
        assert set(rows) <= set(range(n))


@given(n=sizes, count=st.integers(1, 5))
def test_batch_0_is_all_examples_in_order(n, count):
    for batches in (plan(n, epochs=count), plan(n, steps=count)):
        assert batches.whole
        assert len(batches) == count
        assert [torch.arange(n)[rows].tolist() for rows, _ in batches.ragged()] == [list(range(n))] * count


def test_epochs_are_shuffled_anew():
    first, second = rows_of(plan(50, batch=50, epochs=2))
    assert first != second
    assert first != sorted(first)


def test_steps_draw_every_row_equally_often():
    drawn = np.concatenate(rows_of(plan(5, batch=2, steps=5000)))
    # each row in 2/5 of 5,000 steps = 2,000 times, deviation √(5000 · 0.4 · 0.6) ≈ 35
    assert np.bincount(drawn).tolist() == pytest.approx([2000] * 5, abs=4 * 35)


def batch_lists(key: tuple[int, int, int], **amount: int) -> list[list[int]]:
    return rows_of(plan(40, batch=7, key=key, **amount))


@pytest.mark.parametrize("amount", [{"epochs": 2}, {"steps": 5}])
def test_a_tasks_batches_follow_from_seed_client_and_task(amount):
    base = batch_lists((3, 4, 5), **amount)
    assert base == batch_lists((3, 4, 5), **amount)
    for other in [(4, 4, 5), (3, 5, 5), (3, 4, 6), (3, 5, 4), (4, 3, 5)]:
        assert batch_lists(other, **amount) != base


def test_a_task_takes_nothing_from_global_randomness():
    before, torch_before = np.random.get_state()[1].tolist(), torch.get_rng_state()
    plan(40, batch=7, epochs=2)
    assert np.random.get_state()[1].tolist() == before
    assert torch.equal(torch.get_rng_state(), torch_before)


@given(n=sizes, batch=st.integers(0, 30), epochs=st.integers(1, 3), more=st.integers(0, 3), seed=seeds)
def test_padding_keeps_the_rows_and_masks_the_rest(n, batch, epochs, more, seed):
    batches = plan(n, batch=batch, epochs=epochs, key=(seed, 0, 0))
    steps, width = len(batches) + more, batches.indices.shape[1] + more
    indices, mask = batches.padded(steps, width)
    assert indices.shape == mask.shape == (steps, width)
    assert 0 <= indices.min() <= indices.max() < n  # padding is a row that exists
    assert set(mask.ravel().tolist()) <= {0.0, 1.0}
    real = [indices[step][mask[step] == 1].tolist() for step in range(steps)]
    everything = [torch.arange(n)[rows].tolist() for rows, _ in batches.ragged()]
    assert real == everything + [[]] * more


# Of many ---------------------------------------------------------------------------------------------------------


@given(n=st.integers(1, 2 * FEW) | sizes, seed=seeds)
def test_a_permutation_is_numpys_and_takes_as_many_draws(n, seed):
    own, numpys = task_rng(seed, 0, 0), task_rng(seed, 0, 0)
    assert list(permutation(n, own)) == numpys.permutation(n).tolist()
    assert own.bit_generator.state == numpys.bit_generator.state


@given(
    tasks=st.lists(st.tuples(sizes, st.integers(1, 4)), min_size=1, max_size=12),
    batch=st.integers(0, 30),
    in_epochs=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_batches_of_many_are_those_of_each(tasks, batch, in_epochs, seed):
    numbers, work = (np.array(column) for column in zip(*tasks, strict=True))
    amounts = (work, 0 * work) if in_epochs else (0 * work, work)
    many = plan_many(
        numbers,
        batch_size=batch,
        epochs=amounts[0],
        steps=amounts[1],
        rngs=batches_of_many(seed, range(len(tasks)), 3),
    )
    name = "epochs" if in_epochs else "steps"
    each = [plan(n, batch=batch, key=(seed, k, 3), **{name: e}) for k, (n, e) in enumerate(tasks)]
    for place, one in enumerate(each):
        found = many.of(place)
        assert np.array_equal(found.indices, one.indices)
        assert np.array_equal(found.sizes, one.sizes)
        assert (found.num_examples, found.whole) == (one.num_examples, one.whole)
    order = sorted(range(len(each)), key=lambda place: (-len(each[place]), -each[place].indices.shape[1]))
    indices, sizes_of = many.stacked(order)
    for k, place in enumerate(order):
        one = each[place]
        steps, width = one.indices.shape
        assert np.array_equal(indices[:steps, k, :width], one.indices)
        assert not indices[steps:, k].any()
        assert not indices[:, k, width:].any()
        assert sizes_of[:, k].tolist() == one.sizes.tolist() + [0] * (len(indices) - steps)
