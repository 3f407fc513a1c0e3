"""Linear models in their dual form, against autograd in float64."""

import gc
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedapp.models import build_model
from fedapp.training import dual
from fedapp.training.batches import plan_batches, task_rng
from fedapp.training.dual import has_dual, is_dual_faster, train_dual
from fedapp.training.rule import LocalRule
from fedapp.training.task import LocalTask
from fedapp.training.vectors import Parameters
from tests.training.autograd import by_autograd

CLASSES = 3
PLAIN = LocalRule()


def task_of(
    n: int,
    d: int,
    rule: LocalRule = PLAIN,
    *,
    lr: float = 0.05,
    batch: int = 4,
    epochs: int = 2,
    steps: int = 0,
    seed: int = 0,
) -> LocalTask:
    """A client whose rows begin at 2, between rows of NaN: touching one of them shows."""
    generator = torch.Generator().manual_seed(seed)
    model = build_model("logistic", kind="vector", input_shape=(d,), num_classes=CLASSES)

    def parameters() -> Parameters:
        return {
            name: torch.randn(value.shape, generator=generator) / math.sqrt(d)
            for name, value in model.named_parameters()
        }

    x = torch.full((n + 4, d), math.nan)
    x[2:-2] = torch.randn(n, d, generator=generator)
    y = torch.randint(CLASSES, (n + 4,), generator=generator)
    batches = plan_batches(n, batch_size=batch, epochs=epochs, steps=steps, rng=task_rng(seed, 0, 1))
    return LocalTask(
        model, parameters(), x, y, 2, batches, lr, rule, parameters() if rule.beta != 1 else None
    )


def assert_equals_autograd(task: LocalTask) -> None:
    w, loss = train_dual(task)
    expected, expected_loss = by_autograd(task, torch.float64)
    rounded, _ = by_autograd(task, torch.float32)
    assert list(w) == list(expected)
    for name, value in expected.items():
        assert w[name].dtype == torch.float32
        # Where training grows rounding, autograd's own has grown as well.
        allowed = 1e-5 * max(1.0, float(value.norm())) + 5 * (rounded[name].double() - value).norm()
        assert (w[name].double() - value).norm() <= allowed, name
    assert float(loss) == pytest.approx(expected_loss, rel=1e-5, abs=1e-5)


@settings(deadline=None, max_examples=60)
@given(
    n=st.integers(1, 12),
    d=st.integers(1, 20),
    rule=st.builds(
        LocalRule,
        alpha=st.sampled_from([0.0, 0.3, 2.0]),
        beta=st.sampled_from([1.0, 0.5, 0.0]),
        momentum=st.sampled_from([0.0, 0.9]),
        l2=st.sampled_from([0.0, 0.1]),
    ),
    lr=st.sampled_from([0.005, 0.05, 0.2]),
    batch=st.integers(0, 6),
    amount=st.sampled_from([{"epochs": 1}, {"epochs": 3}, {"epochs": 0, "steps": 4}]),
    seed=st.integers(0, 2**32 - 1),
)
def test_the_dual_form_equals_autograd(
    n: int, d: int, rule: LocalRule, lr: float, batch: int, amount: dict[str, int], seed: int
) -> None:
    assert_equals_autograd(task_of(n, d, rule, lr=lr, batch=batch, seed=seed, **amount))


RULES = {
    "alpha": LocalRule(alpha=0.7),
    "beta": LocalRule(beta=0.4),
    "momentum": LocalRule(momentum=0.9),
    "l2": LocalRule(l2=0.3),
    "all": LocalRule(alpha=0.7, beta=0.4, momentum=0.5, l2=0.3),
}


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_changes_the_result_and_nothing_else(rule: str) -> None:
    task, plain = task_of(10, 30, RULES[rule]), task_of(10, 30)
    kept = [*task.start.values(), *(task.neighbours or {}).values(), task.x[2:-2], task.y]
    before = [value.clone() for value in kept]
    w, _ = train_dual(task)
    assert_equals_autograd(task)
    assert (w["1.weight"] - train_dual(plain)[0]["1.weight"]).norm() > 1e-3
    assert all(torch.equal(one, other) for one, other in zip(kept, before, strict=True))


def test_many_passes_over_images_equal_autograd() -> None:
    task = task_of(40, 3072, LocalRule(l2=1e-2, beta=0.5), lr=1e-3, batch=16, epochs=20)
    assert is_dual_faster(replace(task, batches=replace(task.batches, sizes=task.batches.sizes * 10)))
    assert_equals_autograd(task)


def test_without_neighbours_in_the_rule_those_sent_dont_matter() -> None:
    task = task_of(10, 30, LocalRule(beta=0.4))
    alone, _ = train_dual(replace(task, rule=LocalRule(), neighbours=None))
    beside, _ = train_dual(replace(task, rule=LocalRule()))
    assert all(torch.equal(alone[name], beside[name]) for name in alone)


def test_one_step_by_hand() -> None:
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


def test_the_gram_matrix_is_made_once_and_goes_with_the_data() -> None:
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


def test_only_linear_models_without_clipping_have_a_dual_form() -> None:
    task = task_of(5, 20, RULES["all"])
    assert has_dual(task)
    assert not has_dual(replace(task, rule=LocalRule(clip_norm=1.0)))
    for name in ("mlp", "cnn"):
        other = build_model(name, kind="image", input_shape=(1, 8, 8), num_classes=CLASSES)
        assert not has_dual(replace(task, model=other))


@pytest.mark.parametrize(
    ("n", "d", "epochs", "faster"),
    [
        # Ten passes of two steps over 400 images of CIFAR-10: 4,000 · 400 + 1.5 · 400 · 3,072 + 20 · 50,000 ns are
        # 4.4 ms; twice that is less than 1.6 · 4,000 · 3,072 ns = 19.7 ms.
        (400, 3072, 10, True),
        # One pass: 400 · 400 + 1.8 M + 0.1 M ns = 2.1 ms, against 2.0 ms.
        (400, 3072, 1, False),
        # As many examples as features: 30,720 · 3,072 + 14.2 M + 6 M ns = 115 ms, against 151 ms.
        (3072, 3072, 10, False),
        # More examples than features: the Gram matrix would be larger than the data.
        (65, 64, 1000, False),
        # Small steps cost more than what is in them: 20 steps are 1 ms, 400 examples of 64 features 0.04 ms.
        (40, 64, 10, False),
    ],
)
def test_the_dual_form_is_for_many_passes_over_few_examples_of_many_features(
    n: int, d: int, epochs: int, faster: bool
) -> None:
    assert is_dual_faster(task_of(n, d, batch=256 if n > 100 else 20, epochs=epochs)) is faster
