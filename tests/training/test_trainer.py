"""Training many tasks at once: every way, any number of threads and any chunks give each task its own result."""

import threading
from dataclasses import replace
from functools import lru_cache
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from fedapp.models import build_model
from fedapp.names import WAYS
from fedapp.training import chunks
from fedapp.training import trainer as training
from fedapp.training.batches import Batches, plan_batches, task_rng
from fedapp.training.optimizer import optimizer_of
from fedapp.training.rule import LocalRule
from fedapp.training.task import LocalTask
from fedapp.training.trainer import Trained, Trainer, can, train_one, way_of
from studies.benchmarks.training import all_of
from tests.selection import covering
from tests.training.cases import reference

SIZES = (20, 3, 13, 8, 30, 17)  # in batches of 8: 3, 1, 2, 1, 4 and 3 steps an epoch
PLAIN, ALL = LocalRule(), LocalRule(alpha=0.5, beta=0.5, momentum=0.5, l2=0.01, clip_norm=1.0)


@pytest.fixture(autouse=True)
def one_thread():
    """As in a run with client-threads = 1; a single chunk is trained in the caller's thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def trainer():
    """Make trainers that end with the test."""
    made = []

    def make(*arguments: str | None, workers: int = 2) -> Trainer:
        made.append(Trainer(*arguments, workers=workers))
        return made[-1]

    yield make
    for one in made:
        one.close()


@lru_cache
def data_of(name: str) -> tuple[Tensor, Tensor]:
    """Digits, points or text for a model."""
    rng = np.random.default_rng(3)
    count = sum(SIZES)
    if name == "wide":
        return torch.tensor(rng.normal(size=(count, 3, 32, 32)), dtype=torch.float32), torch.arange(
            count
        ) % 10
    if name == "perceptron":
        return torch.tensor(rng.normal(size=(count, 2)), dtype=torch.float32), torch.arange(count) % 2
    if name == "lstm":
        return torch.tensor(rng.integers(0, 7, (count, 80))), torch.tensor(rng.integers(0, 7, count))
    digits = load_digits()
    x = torch.tensor(digits.images[:count] / 16, dtype=torch.float32).unsqueeze(1)
    return x, torch.tensor(digits.target[:count])


@lru_cache
def model_of(name: str, seed: int = 0) -> nn.Module:
    kinds = {
        "perceptron": ("vector", (2,), 2),
        "lstm": ("text", (80,), 7),
        "wide": ("image", (3, 32, 32), 10),
    }
    kind, shape, classes = kinds.get(name, ("image", (1, 8, 8), 10))
    architecture = "logistic" if name == "wide" else name
    return build_model(architecture, kind=kind, input_shape=shape, num_classes=classes, seed=seed)


def tasks_of(
    name: str,
    rule: LocalRule = PLAIN,
    sizes: tuple[int, ...] = SIZES,
    epochs: int = 2,
    key: int = 0,
    batch: int = 8,
) -> list[LocalTask]:
    """Ragged clients of a model, each with a learning rate and, if needed, a neighbour average of its own."""
    model, (x, y) = model_of(name), data_of(name)
    start = {part: value.detach() for part, value in model.named_parameters()}
    offsets = np.cumsum([0, *sizes])
    return [
        LocalTask(
            model,
            start,
            x,
            y,
            int(offsets[client]),
            plan_batches(n, batch_size=batch, epochs=epochs, steps=0, rng=task_rng(key, client, 1)),
            0.02 * (client + 1),
            rule,
            {part: value.detach() for part, value in model_of(name, 1 + client).named_parameters()}
            if rule.beta != 1
            else None,
        )
        for client, n in enumerate(sizes)
    ]


def by_formulas(task: LocalTask) -> Trained:
    w, loss = reference(task)
    return {name: value.float().numpy() for name, value in w.items()}, loss


def assert_close(trained: Trained, expected: Trained) -> None:
    assert list(trained[0]) == list(expected[0])
    for name, value in expected[0].items():
        difference = np.linalg.norm(trained[0][name] - value)
        assert difference <= 1e-5 * max(1.0, float(np.linalg.norm(value))), name
    assert trained[1] == pytest.approx(expected[1], rel=1e-5, abs=1e-5)


def assert_same(one: list[Trained], other: list[Trained]) -> None:
    """Bit for bit."""
    for (w, loss), (v, other_loss) in zip(one, other, strict=True):
        assert list(w) == list(v)
        assert all(w[name].tobytes() == v[name].tobytes() for name in w)
        assert loss == other_loss


# The way -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "on_cpu", "on_gpu"),
    [
        ("logistic", "stacked", "stacked"),
        ("mlp", "stacked", "stacked"),
        ("cnn", "single", "vmapped"),
        ("perceptron", "single", "vmapped"),
        ("lstm", "single", "single"),
        ("wide", "dual", "stacked"),
    ],
)
def test_the_way_follows_from_task_and_device(name, on_cpu, on_gpu):
    (task,) = tasks_of(name, sizes=(80,), epochs=10, batch=80)
    assert way_of(task) == on_cpu
    assert can("vmapped", task) == (name != "lstm")  # tried once for a model, here on the CPU
    assert way_of(replace(task, x=SimpleNamespace(device=torch.device("cuda")))) == on_gpu


@pytest.mark.parametrize(
    ("way", "number", "expected"),
    [
        (None, 8, [("vmapped", 4), ("vmapped", 4)]),
        (None, 7, [("vmapped", 4), ("single", 1), ("single", 1), ("single", 1)]),
        ("vmapped", 7, [("vmapped", 4), ("vmapped", 3)]),
    ],
)
def test_a_gpu_trains_few_clients_one_by_one(way, number, expected, trainer, monkeypatch):
    tasks = tasks_of("cnn", sizes=(8,) * number, epochs=1)
    assert can("vmapped", tasks[0])
    # A chunk's memory holds four clients: four times the parameters, and 16 times two values for each of 8·64 inputs.
    each = 4 * sum(value.nbytes for value in tasks[0].start.values()) + 16 * 8 * 4 * 64
    memory = SimpleNamespace(total_memory=4 * each / chunks.PART_OF_GPU)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: memory)
    x = SimpleNamespace(device=torch.device("cuda"), shape=tasks[0].x.shape)
    found = trainer(way)._chunks([replace(task, x=x) for task in tasks])
    assert [(way, len(positions)) for way, positions in found] == expected


def test_a_cpu_trains_adapters_of_a_frozen_net_at_once_in_short_steps_alone():
    frozen = nn.Linear(64, 384).requires_grad_(False)
    model = nn.Sequential(nn.Flatten(), frozen, nn.Tanh(), nn.Linear(384, 10)).eval()
    batches = plan_batches(80, batch_size=8, epochs=1, steps=0, rng=task_rng(0, 0, 1))
    start = {name: value.detach() for name, value in model.named_parameters() if value.requires_grad}
    task = LocalTask(model, start, torch.randn(80, 64), torch.arange(80) % 10, 0, batches, 0.1, PLAIN)
    assert way_of(task) == "vmapped"
    assert way_of(replace(task, precision="bf16")) == "single"
    longer = Batches(np.tile(batches.indices, 20), 20 * batches.sizes, 80)
    assert way_of(replace(task, batches=longer)) == "single"
    whole = {name: value.detach() for name, value in model.named_parameters()}
    assert way_of(replace(task, start=whole)) == "single"
    assert way_of(replace(task, fixed={name: whole[name] for name in whole if name not in start})) == "single"


def test_what_has_no_dual_form_is_stacked():
    (task,) = tasks_of("wide", ALL, sizes=(80,), epochs=10, batch=80)
    assert way_of(task) == "dual"
    assert way_of(replace(task, optimizer=optimizer_of("adam", ""))) == "stacked"


@pytest.mark.parametrize(
    ("way", "name", "rule"),
    covering([None, *WAYS], ["logistic", "mlp", "cnn", "perceptron"], [PLAIN, ALL], rest=False),
)
def test_every_way_equals_the_formulas_in_the_order_of_the_tasks(way, name, rule, trainer):
    tasks = tasks_of(name, rule)
    trained = trainer(way).train(tasks)
    assert len(trained) == len(tasks)
    for one, task in zip(trained, tasks, strict=True):
        assert_close(one, by_formulas(task))


def test_an_lstm_is_trained_singly(trainer):
    tasks = tasks_of("lstm", sizes=(4, 2), epochs=1)
    trained = trainer().train(tasks)
    assert_same(trained, trainer("single").train(tasks))
    for one, task in zip(trained, tasks, strict=True):
        assert_close(one, by_formulas(task))


@pytest.mark.parametrize("name", ["logistic", "cnn", "perceptron"])
def test_one_task_alone_is_the_same_and_its_own(name, trainer):
    (task,) = tasks_of(name, sizes=(20,))
    alone = train_one(task)
    assert_same([alone], trainer().train([task]))
    start = {part: value.clone() for part, value in task.start.items()}
    for value in alone[0].values():
        value += 1
    assert all(torch.equal(task.start[part], value) for part, value in start.items())


# Threads -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "way", "chunk_bytes"),
    [
        ("logistic", None, 30_000),
        ("mlp", None, 100_000),
        ("cnn", None, 0),
        ("cnn", "vmapped", 10_000_000),
        ("wide", "dual", 0),
    ],
)
def test_the_number_of_threads_changes_no_bit(name, way, chunk_bytes, trainer, monkeypatch):
    monkeypatch.setattr("fedapp.training.chunks.CPU_CHUNK", chunk_bytes)
    tasks = [task for key in range(3) for task in tasks_of(name, epochs=1, key=key)]
    alone = trainer(way, workers=1)
    assert len(list(alone._chunks(tasks))) > 2
    expected = alone.train(tasks)
    for workers in (2, 5):
        several = trainer(way, workers=workers)
        for _ in range(2):
            assert_same(several.train(tasks), expected)


def test_by_default_there_is_a_thread_for_each_core():
    trainer = Trainer()
    assert trainer.workers == training._cores() >= 1
    trainer.close()


def test_threads_end_with_the_trainer():
    before = set(threading.enumerate())
    trainer = Trainer("single", workers=3)
    trainer.train(tasks_of("logistic"))
    started = set(threading.enumerate()) - before
    assert 1 <= len(started) <= 3
    assert all(thread.name.startswith("fedapp-training") for thread in started)
    trainer.close()
    assert not any(thread.is_alive() for thread in started)


def test_no_tasks(trainer):
    assert trainer().train([]) == []


@pytest.mark.parametrize(
    ("name", "way"), [("cnn", None), ("cnn", "vmapped"), ("mlp", None), ("mlp", "single"), ("wide", "dual")]
)
def test_what_a_task_raises_is_its_result_and_no_other_misses_it(name, way, trainer):
    first, second = tasks_of(name, sizes=(4, 3), epochs=1)
    # All have the same rows, the second half of which is of classes that there aren't.
    x, y = torch.cat([first.x, first.x]), torch.cat([first.y, first.y + 100])
    good, other = (replace(task, x=x, y=y) for task in (first, second))
    beyond = replace(other, offset=len(first.x))
    (expected,) = trainer(way).train([first])
    found = trainer(way).train([good, beyond, other])
    assert isinstance(found[1], IndexError | RuntimeError)
    assert_close(found[0], expected)
    assert not isinstance(found[2], Exception)
    (alone,) = trainer(way).train([beyond])
    assert isinstance(alone, type(found[1]))
    with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
        train_one(beyond)
    with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
        all_of(trainer(way), [good, beyond])


@pytest.mark.parametrize("kind", [MemoryError, torch.OutOfMemoryError, torch.AcceleratorError])
def test_want_of_memory_or_a_gpu_that_stops_is_no_tasks_error(kind, trainer, monkeypatch):
    def wants(tasks: object) -> None:
        raise kind("no room")

    monkeypatch.setitem(training._TOGETHER, "stacked", wants)
    with pytest.raises(kind, match="no room"):
        trainer().train(tasks_of("mlp", sizes=(4, 4)))
    with pytest.raises(kind, match="no room"):
        list(training._each_or_why(wants, [0, 1]))


# Chunks --------------------------------------------------------------------------------------------------------


def test_models_rules_datasets_and_constants_in_one_call(trainer):
    moved = [replace(task, x=task.x + 0.1) for task in tasks_of("mlp", sizes=(13, 8))]
    controlled = [
        replace(task, constant={part: value + 0.01 for part, value in task.start.items()})
        for task in tasks_of("mlp", ALL)
    ]
    groups = [
        tasks_of("mlp"),
        controlled,
        tasks_of("mlp", ALL),
        tasks_of("logistic"),
        tasks_of("cnn", epochs=1),
        moved,
        tasks_of("perceptron"),
    ]
    tasks = [task for group in groups for task in group]
    order = np.random.default_rng(0).permutation(len(tasks))
    mixed = [tasks[i] for i in order]
    chunks = [positions for _, positions in trainer()._chunks(mixed)]
    assert sorted(position for chunk in chunks for position in chunk) == list(range(len(mixed)))
    for chunk in chunks:
        kinds = {
            (id(mixed[i].model), mixed[i].rule, id(mixed[i].x), mixed[i].constant is None) for i in chunk
        }
        assert len(kinds) == 1
    for one, task in zip(trainer().train(mixed), mixed, strict=True):
        assert_close(one, by_formulas(task))


@pytest.mark.parametrize(("name", "way"), [("logistic", "stacked"), ("mlp", "stacked"), ("cnn", "vmapped")])
@pytest.mark.parametrize("rule", [PLAIN, ALL], ids=["plain", "all"])
def test_smaller_chunks_change_nothing_beyond_rounding(name, way, rule, trainer, monkeypatch):
    tasks = tasks_of(name, rule, epochs=1)
    found = []
    for chunk_bytes in (1 << 40, 300_000, 1):
        monkeypatch.setattr("fedapp.training.chunks.CPU_CHUNK", chunk_bytes)
        found.append((len(list(trainer(way)._chunks(tasks))), trainer(way).train(tasks)))
    (few, large), (_, middle), (many, small) = found
    assert few < many == len(tasks)  # a byte is too little for any: then each is alone
    for one, two, three in zip(large, middle, small, strict=True):
        assert_close(two, one)
        assert_close(three, one)


def test_a_stack_holds_as_many_as_its_memory(trainer, monkeypatch):
    # A logistic model has 650 parameters, a batch 8·64 inputs: 4·(650 + 512) = 4,648 bytes a client
    monkeypatch.setattr("fedapp.training.chunks.CPU_CHUNK", 3 * 4648)
    chunks = [positions for _, positions in trainer()._chunks(tasks_of("logistic", sizes=(8,) * 7))]
    assert [len(chunk) for chunk in chunks] == [2, 2, 3]


def test_padding_is_bounded(trainer, monkeypatch):
    monkeypatch.setattr("fedapp.training.chunks.CPU_CHUNK", 1 << 40)
    sizes = tuple(np.random.default_rng(0).integers(1, 20, 10).tolist())
    tasks = tasks_of("logistic", sizes=sizes)
    chunks = [positions for _, positions in trainer("vmapped")._chunks(tasks)]
    assert 1 < len(chunks) < len(tasks)
    for chunk in chunks:
        batches: list[Batches] = [tasks[i].batches for i in chunk]
        steps, width = max(len(b) for b in batches), max(b.indices.shape[1] for b in batches)
        if len(chunk) > 1:
            assert steps * width * len(chunk) <= 1.5 * sum(int(b.sizes.sum()) for b in batches)


def test_a_thread_of_training_takes_no_other_to_help(trainer):
    made = trainer(workers=1)
    made._threads.submit(int).result()  # it is there
    torch.set_num_threads(3)  # as a run with client-threads = 3 does
    assert made._threads.submit(torch.get_num_threads).result() == 1
