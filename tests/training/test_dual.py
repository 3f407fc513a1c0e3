"""First layers in dual form: one step by hand, the Gram matrix, and which tasks it is for."""

import gc
import math
from dataclasses import replace

import pytest
import torch

from fedapp.models import build_model
from fedapp.training import dual
from fedapp.training.batches import plan_batches, task_rng
from fedapp.training.dual import has_dual, train_dual
from fedapp.training.rule import LocalRule
from fedapp.training.task import LocalTask
from fedapp.training.trainer import Costs, is_dual_faster
from tests.training.cases import CLASSES, RULES, assert_equals_reference, make_tasks, plan


def task_of(
    n: int,
    d: int,
    rule: LocalRule = RULES["plain"],
    *,
    lr: float = 0.05,
    batch: int = 4,
    epochs: int = 2,
) -> LocalTask:
    """A client whose rows begin at 2."""
    (task,) = make_tasks(
        "logistic", rule, [plan(n, batch=batch, epochs=epochs, key=(0, 0, 1))], [lr], shape=(d,)
    )
    return task


def test_many_passes_over_images_equal_autograd():
    task = task_of(40, 3072, LocalRule(l2=1e-2, beta=0.5), lr=1e-3, batch=16, epochs=20)
    assert is_dual_faster(replace(task, batches=replace(task.batches, sizes=task.batches.sizes * 10)))
    w, loss = train_dual(task)
    assert_equals_reference(task, w, float(loss))


def test_many_passes_of_a_perceptron_equal_autograd():
    rule = LocalRule(l2=1e-2, beta=0.5, clip_norm=0.5)
    (task,) = make_tasks("mlp", rule, [plan(30, batch=16, epochs=10)], [0.01], shape=(3072,), constant=True)
    w, loss = train_dual(task)
    assert_equals_reference(task, w, float(loss))


def test_one_step_by_hand():
    # From zero both classes have p = ½; one example (1, 2) of class 0: δ = (−½, ½). γ = 0.1: A = (0.05, −0.05), so W
    # has rows ±0.05 (1, 2), and b = ±0.05. λ and α find nothing to shrink, and the loss is ln 2.
    model = build_model("logistic", kind="vector", input_shape=(2,), num_classes=2)
    zeros = {"1.weight": torch.zeros(2, 2), "1.bias": torch.zeros(2)}
    batches = plan_batches(1, batch_size=0, epochs=1, steps=0, rng=task_rng(0, 0, 1))
    x, y = torch.tensor([[1.0, 2.0]]), torch.tensor([0])
    w, loss = train_dual(LocalTask(model, zeros, x, y, 0, batches, 0.1, LocalRule(alpha=1.0, l2=1.0)))
    torch.testing.assert_close(w["1.weight"], torch.tensor([[0.05, 0.1], [-0.05, -0.1]]))
    torch.testing.assert_close(w["1.bias"], torch.tensor([0.05, -0.05]))
    assert float(loss) == pytest.approx(math.log(2))


# The Gram matrix -----------------------------------------------------------------------------------------------


def test_the_gram_matrix_is_made_once_and_goes_with_the_data():
    task = task_of(5, 20)
    rows = slice(2, 7)
    train_dual(task)
    kept = dual._grams.of(task.x, rows)
    train_dual(task)
    assert dual._grams.of(task.x, rows) is kept
    torch.testing.assert_close(kept, 1 + task.x[rows] @ task.x[rows].T)
    others = dual._grams.of(task.x, slice(2, 6))
    torch.testing.assert_close(others, kept[:4, :4])
    key = id(task.x)
    del task
    gc.collect()
    assert key not in dual._grams._kept


# Which tasks ---------------------------------------------------------------------------------------------------


def test_dense_networks_have_a_dual_form():
    task = task_of(5, 20, RULES["all"])
    assert has_dual(task)
    for name, has in (("mlp", True), ("cnn", False)):
        other = build_model(name, kind="image", input_shape=(1, 8, 8), num_classes=CLASSES)
        assert has_dual(replace(task, model=other)) == has


# With three classes a pass costs 1.475 ns for each feature of an example, and 2.4 ns for each feature in a step; in
# dual form 0.825 for each product of two examples, 50 µs + 6 ns · n a step, and 1.29 for each feature of an example,
# once.
@pytest.mark.parametrize(
    ("n", "d", "epochs", "faster"),
    [
        # Ten passes of two steps over 400 images of CIFAR-10: 1.3 + 1.6 + 1.0 = 3.9 ms, against 18.1 + 0.1.
        (400, 3072, 10, True),
        # One pass: 0.1 + 1.6 + 0.1 = 1.8 ms, against 1.8.
        (400, 3072, 1, False),
        # As many examples as features: 77.9 + 12.2 + 8.2 = 98.2 ms, half as much again is more than 139.2 + 0.9.
        (3072, 3072, 10, False),
        # More examples than features: the Gram matrix would be larger than the data.
        (65, 64, 1000, False),
        # Small steps cost more than what is in them: 20 steps are 1 ms, 400 examples of 64 features 0.04 ms.
        (40, 64, 10, False),
    ],
)
def test_the_dual_form_is_for_many_passes_over_few_examples_of_many_features(n, d, epochs, faster):
    assert is_dual_faster(task_of(n, d, batch=256 if n > 100 else 20, epochs=epochs)) is faster


def test_what_a_perceptron_costs():
    # 128 outputs, ten passes of two steps over 480 images of CIFAR-10: 4.6 ns · 4,800 · 3,072, and 0.8 ns · 128 ·
    # 3,072 · 20 steps; in dual form 3.95 ns · 4,800 · 480, 5.04 ns · 480 · 3,072, 20 · (100 µs + 2 ns · 128 · 480).
    costs = Costs(n=480, d=3072, k=128, layers=2, seen=4800, steps=20)
    assert costs.primal == pytest.approx(67.83e6 + 6.29e6, rel=1e-3)
    assert costs.dual == pytest.approx(9.10e6 + 7.43e6 + 4.46e6, rel=1e-3)
