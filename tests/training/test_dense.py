"""Stacked training of dense models against autograd in float64, one client after the other."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fedapp.models import build_model
from fedapp.training.batches import plan_batches, task_rng
from fedapp.training.dense import train_dense
from fedapp.training.layers import dense_layers
from fedapp.training.rule import LocalRule
from fedapp.training.task import LocalTask
from fedapp.training.vectors import Parameters
from tests.training.autograd import by_autograd

FEATURES, CLASSES = 6, 3
MODELS = {
    "logistic": build_model("logistic", kind="vector", input_shape=(FEATURES,), num_classes=CLASSES),
    "mlp": build_model("mlp", kind="vector", input_shape=(FEATURES,), num_classes=CLASSES),
    "three layers": nn.Sequential(
        nn.Flatten(), nn.Linear(FEATURES, 7), nn.ReLU(), nn.Linear(7, 5), nn.ReLU(), nn.Linear(5, CLASSES)
    ),
}


@dataclass(frozen=True)
class Case:
    """Clients of one model and rule on shared data, sorted as `train_dense` wants them."""

    tasks: list[LocalTask]
    seed: int


def parameters(model: nn.Module, generator: torch.Generator) -> Parameters:
    return {
        name: torch.randn(value.shape, generator=generator) / math.sqrt(value.shape[-1])
        for name, value in model.named_parameters()
    }


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Draw 1 to 5 ragged clients; rows between theirs are NaN, so that touching one of them shows."""
    model = MODELS[draw(st.sampled_from(sorted(MODELS)))]
    rule = LocalRule(
        alpha=draw(st.sampled_from([0.0, 0.3, 2.0])),
        beta=draw(st.sampled_from([1.0, 1.0, 0.5, 0.0])),
        momentum=draw(st.sampled_from([0.0, 0.0, 0.9])),
        l2=draw(st.sampled_from([0.0, 0.1])),
        clip_norm=draw(st.sampled_from([0.0, 0.0, 0.3])),
    )
    sizes = draw(st.lists(st.integers(1, 12), min_size=1, max_size=5))
    batch = draw(st.integers(0, 6))
    by_epochs, one_start = draw(st.booleans()), draw(st.booleans())
    seed = draw(st.integers(0, 2**32 - 1))
    generator = torch.Generator().manual_seed(seed)
    pieces, labels, offsets = [], [], []
    for n in sizes:
        offsets.append(sum(len(piece) for piece in pieces))
        pieces += [torch.randn(n, 1, 2, 3, generator=generator), torch.full((2, 1, 2, 3), math.nan)]
        labels += [torch.randint(CLASSES, (n,), generator=generator), torch.zeros(2, dtype=torch.long)]
    x, y = torch.cat(pieces), torch.cat(labels)
    common = parameters(model, generator)
    tasks = []
    for client, (n, offset) in enumerate(zip(sizes, offsets, strict=True)):
        amount = draw(st.integers(1, 3))
        epochs, steps = (amount, 0) if by_epochs else (0, amount)
        rng = task_rng(seed, client, 1)
        batches = plan_batches(n, batch_size=batch, epochs=epochs, steps=steps, rng=rng)
        tasks.append(
            LocalTask(
                model,
                common if one_start else parameters(model, generator),
                x,
                y,
                offset,
                batches,
                draw(st.sampled_from([0.005, 0.02, 0.05])),
                rule,
                parameters(model, generator) if rule.beta != 1 else None,
            )
        )
    return Case(sorted(tasks, key=lambda task: -len(task.batches)), seed)


def assert_equals_autograd(tasks: list[LocalTask]) -> None:
    w, losses = train_dense(tasks)
    assert losses.shape == (len(tasks),)
    for k, task in enumerate(tasks):
        expected, loss = by_autograd(task, torch.float64)
        rounded, rounded_loss = by_autograd(task, torch.float32)
        assert list(w) == list(expected)
        for name, value in expected.items():
            assert w[name].dtype == torch.float32
            difference = (w[name][k].double() - value).norm()
            # Where a step grows rounding (a ReLU's kink, a diverging client), autograd's own has grown as well.
            allowed = 1e-5 * max(1.0, float(value.norm())) + 5 * (rounded[name].double() - value).norm()
            assert difference <= allowed, (name, k)
        allowed = 1e-5 * (1 + loss) + 5 * abs(rounded_loss - loss)
        assert float(losses[k]) == pytest.approx(loss, abs=allowed)


@settings(deadline=None, max_examples=40)
@given(cases())
def test_a_stack_of_clients_equals_autograd_one_after_the_other(case: Case) -> None:
    assert_equals_autograd(case.tasks)


RULES = {
    "plain": LocalRule(),
    "alpha": LocalRule(alpha=0.7),
    "beta": LocalRule(beta=0.4),
    "momentum": LocalRule(momentum=0.9),
    "l2": LocalRule(l2=0.3),
    "clip": LocalRule(clip_norm=0.2),
    "alpha and l2": LocalRule(alpha=0.7, l2=0.3),
    "beta and l2": LocalRule(beta=0.4, l2=0.3),
    "beta, alpha and l2": LocalRule(beta=0.4, alpha=0.7, l2=0.3),
    "all": LocalRule(alpha=0.7, beta=0.4, momentum=0.5, l2=0.3, clip_norm=0.3),
}


def stack(rule: LocalRule, model: str = "mlp", **amount: int) -> list[LocalTask]:
    """Three ragged clients with 3, 13 and 20 examples in batches of 6."""
    generator = torch.Generator().manual_seed(5)
    x, y = torch.randn(36, FEATURES, generator=generator), torch.randint(CLASSES, (36,), generator=generator)
    amount = {"batch_size": 6, "epochs": 2, "steps": 0, **amount}
    tasks = [
        LocalTask(
            MODELS[model],
            parameters(MODELS[model], generator),
            x,
            y,
            offset,
            plan_batches(n, rng=task_rng(0, offset, 1), **amount),
            lr,
            rule,
            parameters(MODELS[model], generator),
        )
        for offset, n, lr in ((16, 20, 0.05), (3, 13, 0.1), (0, 3, 0.2))
    ]
    return sorted(tasks, key=lambda task: -len(task.batches))


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("rule", RULES)
def test_every_rule_equals_autograd_and_changes_the_result(rule: str, model: str) -> None:
    tasks = stack(RULES[rule], model)
    assert_equals_autograd(tasks)
    if rule != "plain":
        plain, _ = train_dense(stack(RULES["plain"], model))
        w, _ = train_dense(tasks)
        assert (w["1.weight"] - plain["1.weight"]).norm() > 1e-3


@pytest.mark.parametrize("amount", [{"epochs": 2}, {"epochs": 0, "steps": 4}, {"batch_size": 0}])
def test_every_amount_of_work_equals_autograd(amount: dict[str, int]) -> None:
    assert_equals_autograd(stack(RULES["alpha and l2"], **amount))


@pytest.mark.parametrize("rule", RULES)
def test_models_sent_neighbours_and_data_stay_as_they_are(rule: str) -> None:
    tasks = stack(RULES[rule])

    def inputs(task: LocalTask) -> list[torch.Tensor]:
        return [*task.start.values(), *(task.neighbours or {}).values(), task.x, task.y]

    before = [[value.clone() for value in inputs(task)] for task in tasks]
    w, _ = train_dense(tasks)
    for k, (task, values) in enumerate(zip(tasks, before, strict=True)):
        assert all(torch.equal(one, other) for one, other in zip(inputs(task), values, strict=True))
        assert all(not torch.equal(w[name][k], value) for name, value in task.start.items())


def test_the_same_rows_of_other_data_are_gathered_anew() -> None:
    # Full batches gather once for all steps, into memory that the thread keeps from one call to the next.
    first = stack(LocalRule(), batch_size=0)
    other = [
        LocalTask(t.model, t.start, t.x + 1, t.y, t.offset, t.batches, t.lr, t.rule, t.neighbours)
        for t in first
    ]
    again, _ = train_dense(first)
    assert_equals_autograd(other)
    assert_equals_autograd(first)
    repeated, _ = train_dense(first)
    assert all(torch.equal(again[name], repeated[name]) for name in again)


def task_by_hand(x: list[list[float]], y: list[int], rule: LocalRule, lr: float, **more: Any) -> LocalTask:
    model = build_model("logistic", kind="vector", input_shape=(2,), num_classes=2)
    zeros = {"1.weight": torch.zeros(2, 2), "1.bias": torch.zeros(2)}
    batches = plan_batches(len(y), batch_size=0, epochs=1, steps=0, rng=np.random.default_rng(0))
    return LocalTask(model, zeros, torch.tensor(x), torch.tensor(y), 0, batches, lr, rule, **more)


def test_one_step_of_logistic_regression_by_hand() -> None:
    # From zero both classes have p = ½. One example (1, 2) of class 0: δ = p − onehot = (−½, ½), the gradient is δ xᵀ
    # with rows −½ (1, 2) and ½ (1, 2); γ = 0.1 turns it into ±(0.05, 0.1), and δ itself into ±0.05.
    w, loss = train_dense([task_by_hand([[1.0, 2.0]], [0], LocalRule(), 0.1)])
    torch.testing.assert_close(w["1.weight"], torch.tensor([[[0.05, 0.1], [-0.05, -0.1]]]))
    torch.testing.assert_close(w["1.bias"], torch.tensor([[0.05, -0.05]]))
    assert loss.tolist() == pytest.approx([math.log(2)])
    # A second example (3, 0) of class 1: mean gradient of row 0 is ½ [−½ (1, 2) + ½ (3, 0)] = (½, −½); of b: 0.
    w, loss = train_dense([task_by_hand([[1.0, 2.0], [3.0, 0.0]], [0, 1], LocalRule(), 0.2)])
    torch.testing.assert_close(w["1.weight"], torch.tensor([[[-0.1, 0.1], [0.1, -0.1]]]))
    torch.testing.assert_close(w["1.bias"], torch.zeros(1, 2))
    # β = 0, u = 0 but for b = (ln 3, 0): p = (¾, ¼), δ = (−¼, ¼), loss −ln ¾; λ = 2 adds 2 ln 3 to b's first part.
    u = {"1.weight": torch.zeros(2, 2), "1.bias": torch.tensor([math.log(3), 0.0])}
    rule = LocalRule(beta=0.0, l2=2.0)
    w, loss = train_dense([task_by_hand([[1.0, 2.0]], [0], rule, 0.1, neighbours=u)])
    torch.testing.assert_close(w["1.weight"], torch.tensor([[[0.025, 0.05], [-0.025, -0.05]]]))
    torch.testing.assert_close(w["1.bias"], torch.tensor([[0.025 - 0.2 * math.log(3), -0.025]]))
    assert loss.tolist() == pytest.approx([-math.log(0.75)])


# Which models are dense ----------------------------------------------------------------------------------------


def test_the_layers_of_dense_models() -> None:
    assert dense_layers(MODELS["logistic"]) == [("1.weight", "1.bias")]
    assert dense_layers(MODELS["mlp"]) == [("1.weight", "1.bias"), ("3.weight", "3.bias")]
    assert dense_layers(MODELS["three layers"]) == [(f"{i}.weight", f"{i}.bias") for i in (1, 3, 5)]
    for model in MODELS.values():
        assert [name for pair in dense_layers(model) for name in pair] == list(dict(model.named_parameters()))


@pytest.mark.parametrize(
    "model",
    [
        nn.Linear(2, 2),
        nn.Sequential(),
        nn.Sequential(nn.Flatten()),
        nn.Sequential(nn.Linear(2, 2)),
        nn.Sequential(nn.Linear(2, 2), nn.Flatten()),
        nn.Sequential(nn.Flatten(), nn.Linear(2, 2, bias=False)),
        nn.Sequential(nn.Flatten(), nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2, bias=False)),
        nn.Sequential(nn.Flatten(), nn.Linear(2, 2), nn.ReLU()),
        nn.Sequential(nn.Flatten(), nn.ReLU(), nn.Linear(2, 2)),
        nn.Sequential(nn.Flatten(), nn.Linear(2, 2), nn.Linear(2, 2)),
        nn.Sequential(nn.Flatten(), nn.Linear(2, 2), nn.Linear(2, 2), nn.ReLU()),
        nn.Sequential(nn.Flatten(), nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2)),
        nn.Sequential(nn.Flatten(), nn.Linear(2, 2), nn.ReLU(), nn.Dropout(), nn.Linear(2, 2)),
        nn.Sequential(nn.Flatten(), nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2), nn.Softmax(1)),
        build_model("cnn", kind="image", input_shape=(1, 8, 8), num_classes=10),
        build_model("perceptron", kind="vector", input_shape=(2,), num_classes=2),
        build_model("lstm", kind="text", input_shape=(80,), num_classes=5),
    ],
    ids=lambda model: str([type(layer).__name__ for layer in model.children()]),
)
def test_models_that_are_not_dense(model: nn.Module) -> None:
    assert dense_layers(model) == []
