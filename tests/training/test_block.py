"""Tasks by column: the stacks of a block are those of its tasks, in the same chunks, to the last bit."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from fedapp.training import chunks
from fedapp.training.batches import batches_of_many, plan_many
from fedapp.training.rule import LocalRule
from fedapp.training.task import LocalTask, TaskBlock, TaskStack
from fedapp.training.trainer import SHORT, Trainer
from tests.training.cases import make_tasks, plan

SIZES = (3, 20, 13, 13, 40, 3, 1, 20, 6)


@pytest.fixture
def trainer():
    made = Trainer(workers=2)
    yield made
    made.close()


def both(
    name: str, rule: LocalRule, batch: int, shape: tuple[int, ...] = (1, 2, 3)
) -> tuple[list[LocalTask], TaskBlock]:
    """Return the same tasks one by one and by column."""
    plans = [plan(n, batch=batch, epochs=1 + k % 2, key=(0, k, 2)) for k, n in enumerate(SIZES)]
    rates = [0.1 / (k + 1) for k in range(len(SIZES))]
    tasks = make_tasks(name, rule, plans, rates, shape=shape, one_start=True)
    epochs = np.array([1 + k % 2 for k in range(len(SIZES))])
    rngs = batches_of_many(0, range(len(SIZES)), 2)
    batches = plan_many(np.array(SIZES), batch_size=batch, epochs=epochs, steps=0 * epochs, rngs=rngs)
    offsets = np.array([task.offset for task in tasks])
    return tasks, TaskBlock(tasks.__getitem__, batches, offsets, np.array(rates))


@pytest.mark.parametrize("way", [None, "single", "vmapped"])
@pytest.mark.parametrize("batch", [0, 6])
@pytest.mark.parametrize(
    ("name", "shape"), [("logistic", (1, 2, 3)), ("mlp", (1, 2, 3)), ("logistic", (1, 9, 9))]
)
def test_a_block_is_trained_in_the_chunks_of_its_tasks(name, shape, batch, way, monkeypatch):
    monkeypatch.setattr(chunks, "CPU_CHUNK", 1000)
    tasks, block = both(name, LocalRule(), batch, shape)
    trainer = Trainer(way, workers=1)
    expected = list(trainer._chunks(tasks))
    assert list(trainer._stacks_of(block)) == expected
    assert len(expected) > 1
    trainer.close()


@pytest.mark.parametrize("rule", [LocalRule(), LocalRule(alpha=0.5, momentum=0.9)], ids=["plain", "pulled"])
@pytest.mark.parametrize("batch", [0, 6])
@pytest.mark.parametrize("name", ["logistic", "mlp", "cnn"])
def test_a_block_has_the_bits_of_its_tasks(name, batch, rule, trainer):
    shape = (1, 12, 12) if name == "cnn" else (1, 2, 3)
    tasks, block = both(name, rule, batch, shape)
    expected = trainer.train(tasks)
    seen = []
    (found,) = trainer.ahead(lambda own: list(trainer.stacks(own)), [block])
    for places, result in found:
        assert not isinstance(result, Exception)
        parameters, losses = result
        for number, place in enumerate(places):
            seen.append(place)
            trained, loss = expected[place]
            assert float(losses[number]) == loss
            for key, value in trained.items():
                assert np.array_equal(parameters[key][number].numpy(), value)
    assert sorted(seen) == list(range(len(tasks)))


@pytest.mark.parametrize("way", [None, "single", "vmapped"])
def test_what_a_task_of_a_block_raises_is_its_result(way):
    tasks, block = both("logistic", LocalRule(), 6)
    y = tasks[0].y.clone()
    y[tasks[3].rows] = 100  # a class that there isn't
    trainer = Trainer(way, workers=1)
    ill = replace(block, one=lambda place: replace(tasks[place], y=y))
    found = {place: result for places, result in trainer.stacks(ill) for place in places}
    assert sorted(found) == list(range(len(tasks)))
    assert [place for place, result in found.items() if isinstance(result, Exception)] == [3]
    assert isinstance(found[3], IndexError | RuntimeError)
    one_by_one = trainer.train([replace(task, y=y) for task in tasks])
    assert isinstance(one_by_one[3], type(found[3]))
    trainer.close()


def test_a_stack_of_a_block_is_that_of_its_tasks():
    tasks, block = both("logistic", LocalRule(alpha=0.5), 6)
    order = sorted(range(len(tasks)), key=lambda place: [-each for each in block.kinds[place][:2]])
    found, expected = block.stacked(order), TaskStack.of([tasks[place] for place in order])
    assert np.array_equal(found.rows, expected.rows)
    assert np.array_equal(found.sizes, expected.sizes)
    assert found.steps.tolist() == [len(tasks[place].batches) for place in order]
    assert torch.equal(found.lr, expected.lr)
    for name, value in expected.start.named.items():
        assert torch.equal(found.start.named[name], value)


def test_short_stacks_are_trained_in_turn_and_long_ones_on_all_threads(trainer):
    (task, *_), _ = both("logistic", LocalRule(), 6)
    most = SHORT // chunks.stack_bytes(task, task.batches.indices.shape[1])
    assert trainer.waits(task, most)
    assert not trainer.waits(task, 2 * most)
    (single, *_), _ = both("cnn", LocalRule(), 6, (1, 12, 12))
    assert not trainer.waits(single, 1)
    done: list[int] = []
    for item in trainer.ahead(lambda item: done.append(item) or item, range(9), in_turn=True):
        assert done == list(range(item + 1))  # none is ahead
