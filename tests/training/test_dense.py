"""Stacked training of dense models: one step by hand, the fused step beside the one it stands in for, gathering."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedapp.models import build_model
from fedapp.training import dense
from fedapp.training.batches import plan_batches
from fedapp.training.dense import FusedSteps, has_fused, train_dense
from fedapp.training.rule import LocalRule, Stack, step
from fedapp.training.task import LocalTask, TaskStack
from tests.training.cases import RULES, assert_equals_reference, by_way, make_tasks, plan, three_clients

FUSED = [rule for rule in RULES if has_fused(RULES[rule])]


def test_momentum_and_clipping_need_the_gradient_as_a_whole():
    assert set(RULES) - set(FUSED) == {
        rule for rule in RULES if RULES[rule].momentum or RULES[rule].clip_norm
    }


@pytest.mark.parametrize("rule", FUSED)
@pytest.mark.parametrize("model", ["logistic", "mlp", "three layers"])
def test_where_there_is_a_fused_step_it_is_taken(model, rule, monkeypatch):
    taken = []
    fused = FusedSteps.step
    monkeypatch.setattr(FusedSteps, "step", lambda *arguments: taken.append(1) or fused(*arguments))
    monkeypatch.setattr(dense, "step", lambda *_: pytest.fail("the step that it overrides"))
    tasks = three_clients(model, RULES[rule])
    by_way("stacked", tasks)
    assert len(taken) == max(len(task.batches) for task in tasks)


@given(
    model=st.sampled_from(["logistic", "mlp", "three layers"]),
    rule=st.builds(
        LocalRule,
        alpha=st.sampled_from([0.0, 0.3, 2.0]),
        beta=st.sampled_from([1.0, 0.5, 0.0]),
        l2=st.sampled_from([0.0, 0.1]),
    ),
    sizes=st.lists(st.integers(1, 12), min_size=1, max_size=4),
    batch=st.integers(0, 6),
    constant=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_the_fused_step_is_the_step_it_overrides(model, rule, sizes, batch, constant, seed):
    plans = [plan(n, batch=batch, epochs=2, key=(seed, k, 1)) for k, n in enumerate(sizes)]
    rates = [0.02 * (k + 1) for k in range(len(sizes))]
    tasks = make_tasks(model, rule, plans, rates, constant=constant, seed=seed)
    assert has_fused(rule)
    compared = []

    class Both(FusedSteps):
        def __init__(self, rule: Any, w: Any, anchors: Any, rate: Any) -> None:
            self.before = anchors.each(copied)
            super().__init__(rule, w, anchors, rate)

        def step(self, gradient: Any) -> Any:
            general, count = copied(self.w), len(self.rate)
            around = self.before.each(lambda anchor: anchor.first(count))
            _, expected_loss = step(rule, general, around, gradient, self.rate)
            loss = super().step(gradient)
            for name, value in general.named.items():
                torch.testing.assert_close(self.w.named[name], value, rtol=1e-5, atol=1e-6)
            assert torch.equal(loss, expected_loss)
            compared.append(count)
            return loss

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dense, "FusedSteps", Both)
        by_way("stacked", tasks)
    assert len(compared) == max(len(task.batches) for task in tasks)


def copied(stack: Stack) -> Stack:
    return Stack({name: value.clone() for name, value in stack.named.items()})


def test_the_same_rows_of_other_data_are_gathered_anew():
    # Full batches gather once for all steps, into memory that the thread keeps from one call to the next.
    first = three_clients("mlp", LocalRule(), epochs=2)
    other = [replace(task, x=task.x + 1) for task in first]
    again = by_way("stacked", first)
    for tasks in (other, first):
        for task, (w, loss) in zip(tasks, by_way("stacked", tasks), strict=True):
            assert_equals_reference(task, w, loss)
    for (w, _), (v, _) in zip(again, by_way("stacked", first), strict=True):
        assert all(torch.equal(w[name], v[name]) for name in w)


def test_a_client_with_broken_data_spoils_no_other():
    tasks = three_clients("mlp", LocalRule(l2=0.1))
    tasks[0].x[tasks[0].rows] = math.inf
    broken, *others = by_way("stacked", tasks)
    assert math.isnan(broken[1])
    for task, (w, loss) in zip(tasks[1:], others, strict=True):
        assert_equals_reference(task, w, loss)


def task_by_hand(x: list[list[float]], y: list[int], rule: LocalRule, lr: float, **more: Any) -> LocalTask:
    model = build_model("logistic", kind="vector", input_shape=(2,), num_classes=2)
    zeros = {"1.weight": torch.zeros(2, 2), "1.bias": torch.zeros(2)}
    batches = plan_batches(len(y), batch_size=0, epochs=1, steps=0, rng=np.random.default_rng(0))
    return LocalTask(model, zeros, torch.tensor(x), torch.tensor(y), 0, batches, lr, rule, **more)


def test_one_step_of_logistic_regression_by_hand():
    # From zero both classes have p = ½. One example (1, 2) of class 0: δ = p − onehot = (−½, ½), the gradient is δ xᵀ
    # with rows −½ (1, 2) and ½ (1, 2); γ = 0.1 turns it into ±(0.05, 0.1), and δ itself into ±0.05.
    w, loss = train_dense(TaskStack.of([task_by_hand([[1.0, 2.0]], [0], LocalRule(), 0.1)]))
    torch.testing.assert_close(w["1.weight"], torch.tensor([[[0.05, 0.1], [-0.05, -0.1]]]))
    torch.testing.assert_close(w["1.bias"], torch.tensor([[0.05, -0.05]]))
    assert loss.tolist() == pytest.approx([math.log(2)])
    # A second example (3, 0) of class 1: mean gradient of row 0 is ½ [−½ (1, 2) + ½ (3, 0)] = (½, −½); of b: 0.
    w, loss = train_dense(TaskStack.of([task_by_hand([[1.0, 2.0], [3.0, 0.0]], [0, 1], LocalRule(), 0.2)]))
    torch.testing.assert_close(w["1.weight"], torch.tensor([[[-0.1, 0.1], [0.1, -0.1]]]))
    torch.testing.assert_close(w["1.bias"], torch.zeros(1, 2))
    # β = 0, u = 0 but for b = (ln 3, 0): p = (¾, ¼), δ = (−¼, ¼), loss −ln ¾; λ = 2 adds 2 ln 3 to b's first part.
    u = {"1.weight": torch.zeros(2, 2), "1.bias": torch.tensor([math.log(3), 0.0])}
    rule = LocalRule(beta=0.0, l2=2.0)
    w, loss = train_dense(TaskStack.of([task_by_hand([[1.0, 2.0]], [0], rule, 0.1, neighbours=u)]))
    torch.testing.assert_close(w["1.weight"], torch.tensor([[[0.025, 0.05], [-0.025, -0.05]]]))
    torch.testing.assert_close(w["1.bias"], torch.tensor([[0.025 - 0.2 * math.log(3), -0.025]]))
    assert loss.tolist() == pytest.approx([-math.log(0.75)])
