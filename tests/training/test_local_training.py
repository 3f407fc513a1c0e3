"""Local training against an implementation of its own in float64, against torch's SGD, and under vmap."""

import math
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from fedapp.models import build_model
from fedapp.training.autograd import cross_entropy, functional_gradient, train
from fedapp.training.batches import Batches, plan_batches, task_rng
from fedapp.training.rule import LocalRule
from fedapp.training.schedule import scheduled_lr
from fedapp.training.vectors import Parameters

SETTINGS = settings(deadline=None, max_examples=60)
sizes, seeds = st.integers(1, 80), st.integers(0, 2**32)


def plan(
    n: int, *, batch: int = 0, epochs: int = 0, steps: int = 0, key: tuple[int, int, int] = (0, 0, 0)
) -> Batches:
    return plan_batches(n, batch_size=batch, epochs=epochs, steps=steps, rng=task_rng(*key))


def rows_of(batches: Batches) -> list[list[int]]:
    """The rows each step sees, from `ragged` as training gets them."""
    return [torch.arange(10_000)[rows].tolist() for rows, _ in batches.ragged()]


# Batches ---------------------------------------------------------------------------------------------------


@given(n=sizes, batch=st.integers(1, 100), epochs=st.integers(1, 4), seed=seeds)
@SETTINGS
def test_every_epoch_sees_every_example_once(n: int, batch: int, epochs: int, seed: int) -> None:
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
@SETTINGS
def test_a_step_draws_different_rows(n: int, batch: int, count: int, seed: int) -> None:
    steps = rows_of(plan(n, batch=batch, steps=count, key=(seed, 0, 0)))
    assert len(steps) == count
    for rows in steps:
        assert len(rows) == len(set(rows)) == min(batch, n)
        assert set(rows) <= set(range(n))


@given(n=sizes, count=st.integers(1, 5))
@SETTINGS
def test_batch_0_is_all_examples_in_order(n: int, count: int) -> None:
    for batches in (plan(n, epochs=count), plan(n, steps=count)):
        assert batches.whole
        assert len(batches) == count
        assert [torch.arange(n)[rows].tolist() for rows, _ in batches.ragged()] == [list(range(n))] * count


def test_epochs_are_shuffled_anew() -> None:
    first, second = rows_of(plan(50, batch=50, epochs=2))
    assert first != second
    assert first != sorted(first)


def test_steps_draw_every_row_equally_often() -> None:
    drawn = np.concatenate(rows_of(plan(5, batch=2, steps=5000)))
    # each row in 2/5 of 5,000 steps = 2,000 times, deviation √(5000 · 0.4 · 0.6) ≈ 35
    assert np.bincount(drawn).tolist() == pytest.approx([2000] * 5, abs=4 * 35)


def batch_lists(key: tuple[int, int, int], **amount: int) -> list[list[int]]:
    return rows_of(plan(40, batch=7, key=key, **amount))


@pytest.mark.parametrize("amount", [{"epochs": 2}, {"steps": 5}])
def test_a_tasks_batches_follow_from_seed_client_and_task(amount: dict[str, int]) -> None:
    base = batch_lists((3, 4, 5), **amount)
    assert base == batch_lists((3, 4, 5), **amount)
    for other in [(4, 4, 5), (3, 5, 5), (3, 4, 6), (3, 5, 4), (4, 3, 5)]:
        assert batch_lists(other, **amount) != base


def test_a_task_takes_nothing_from_global_randomness() -> None:
    before, torch_before = np.random.get_state()[1].tolist(), torch.get_rng_state()
    plan(40, batch=7, epochs=2)
    assert np.random.get_state()[1].tolist() == before
    assert torch.equal(torch.get_rng_state(), torch_before)


@given(n=sizes, batch=st.integers(0, 30), epochs=st.integers(1, 3), more=st.integers(0, 3), seed=seeds)
@SETTINGS
def test_padding_keeps_the_rows_and_masks_the_rest(
    n: int, batch: int, epochs: int, more: int, seed: int
) -> None:
    batches = plan(n, batch=batch, epochs=epochs, key=(seed, 0, 0))
    steps, width = len(batches) + more, batches.indices.shape[1] + more
    indices, mask = batches.padded(steps, width)
    assert indices.shape == mask.shape == (steps, width)
    assert 0 <= indices.min() <= indices.max() < n  # padding is a row that exists
    assert set(mask.ravel().tolist()) <= {0.0, 1.0}
    real = [indices[step][mask[step] == 1].tolist() for step in range(steps)]
    everything = [torch.arange(n)[rows].tolist() for rows, _ in batches.ragged()]
    assert real == everything + [[]] * more


# The step, against float64 numpy -------------------------------------------------------------------------------


CLASSES, FEATURES, EXAMPLES = 3, 5, 30
LR = 0.2


@pytest.fixture
def problem() -> dict[str, Any]:
    """A logistic regression with data, the model sent and a neighbour average."""
    rng = np.random.default_rng(7)

    def parameters() -> Parameters:
        return {
            "1.weight": torch.tensor(rng.normal(size=(CLASSES, FEATURES)), dtype=torch.float32),
            "1.bias": torch.tensor(rng.normal(size=CLASSES), dtype=torch.float32),
        }

    return {
        "loss": cross_entropy(
            build_model("logistic", kind="vector", input_shape=(FEATURES,), num_classes=CLASSES)
        ),
        "x": torch.tensor(rng.normal(size=(EXAMPLES, FEATURES)), dtype=torch.float32),
        "y": torch.tensor(rng.integers(0, CLASSES, EXAMPLES)),
        "start": parameters(),
        "neighbours": parameters(),
    }


def run(
    problem: dict[str, Any], batches: Batches, rule: LocalRule, **more: Any
) -> tuple[Parameters, torch.Tensor]:
    lr = more.pop("lr", LR)
    return train(
        problem["loss"], problem["start"], problem["x"], problem["y"], batches.ragged(), lr, rule, **more
    )


def numpy_train(
    problem: dict[str, Any], batches: Batches, rule: LocalRule, lr: float = LR
) -> tuple[Any, Any, float]:
    """Softmax regression, gradient by hand: ∂/∂W = (softmax(XWᵀ + b) − Y)ᵀ X / B, everything in float64."""
    x, y = problem["x"].double().numpy(), np.eye(CLASSES)[problem["y"].numpy()]
    w0, u = (
        np.column_stack([problem[part][name].double().numpy() for name in ("1.weight", "1.bias")])
        for part in ("start", "neighbours")
    )
    w, velocity, losses = w0.copy(), np.zeros_like(w0), []
    for rows in rows_of(batches) if not batches.whole else [list(range(EXAMPLES))] * len(batches):
        point = rule.beta * w + (1 - rule.beta) * u
        xb, yb = np.column_stack([x[rows], np.ones(len(rows))]), y[rows]
        exponentials = np.exp(xb @ point.T)
        probabilities = exponentials / exponentials.sum(axis=1, keepdims=True)
        losses.append(-np.log((probabilities * yb).sum(axis=1)).mean())
        g = (probabilities - yb).T @ xb / len(rows) + rule.l2 * point
        if rule.clip_norm:
            g *= min(1.0, rule.clip_norm / np.linalg.norm(g))
        g = g + rule.alpha * (w - w0)
        velocity = rule.momentum * velocity + g
        w = w - lr * velocity
    return w[:, :-1], w[:, -1], float(np.mean(losses))


RULES = {
    "plain": LocalRule(),
    "l2": LocalRule(l2=0.3),
    "clip": LocalRule(clip_norm=0.2),
    "clip that never cuts": LocalRule(clip_norm=100.0),
    "clip and l2": LocalRule(clip_norm=0.2, l2=0.5),
    "momentum": LocalRule(momentum=0.9),
    "alpha": LocalRule(alpha=0.7),
    "alpha and clip": LocalRule(alpha=2.0, clip_norm=0.1),
    "alpha and momentum": LocalRule(alpha=0.7, momentum=0.5),
    "beta": LocalRule(beta=0.4),
    "beta and l2": LocalRule(beta=0.4, l2=0.3),
    "beta 0": LocalRule(beta=0.0),
    "all": LocalRule(alpha=0.7, beta=0.4, momentum=0.5, l2=0.3, clip_norm=0.3),
}
AMOUNTS = {
    "epochs": {"batch": 8, "epochs": 3},  # the last batch of each has 30 − 3·8 = 6
    "steps": {"batch": 8, "steps": 10},
    "full batch": {"epochs": 6},
}


@pytest.mark.parametrize("amount", AMOUNTS)
@pytest.mark.parametrize("rule", RULES)
def test_training_equals_a_float64_implementation(problem: dict[str, Any], rule: str, amount: str) -> None:
    batches = plan(EXAMPLES, **AMOUNTS[amount])
    trained, loss = run(problem, batches, RULES[rule], neighbours=problem["neighbours"])
    weight, bias, expected_loss = numpy_train(problem, batches, RULES[rule])
    np.testing.assert_allclose(trained["1.weight"].numpy(), weight, rtol=0, atol=1e-5)
    np.testing.assert_allclose(trained["1.bias"].numpy(), bias, rtol=0, atol=1e-5)
    assert float(loss) == pytest.approx(expected_loss, abs=1e-5)


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule not in ("plain", "clip that never cuts")])
def test_every_rule_changes_the_result(problem: dict[str, Any], rule: str) -> None:
    batches = plan(EXAMPLES, batch=8, epochs=3)
    plain, _ = run(problem, batches, LocalRule())
    trained, _ = run(problem, batches, RULES[rule], neighbours=problem["neighbours"])
    assert (trained["1.weight"] - plain["1.weight"]).norm() > 0.01


@pytest.mark.parametrize(("momentum", "l2"), [(0.0, 0.0), (0.9, 0.0), (0.0, 0.1), (0.9, 0.01)])
def test_training_equals_torch_sgd(problem: dict[str, Any], momentum: float, l2: float) -> None:
    batches = plan(EXAMPLES, batch=8, epochs=5)
    trained, _ = run(problem, batches, LocalRule(momentum=momentum, l2=l2), lr=0.05)
    model = build_model("logistic", kind="vector", input_shape=(FEATURES,), num_classes=CLASSES)
    model.load_state_dict(problem["start"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=momentum, weight_decay=l2)
    for rows in rows_of(batches):
        optimizer.zero_grad()
        F.cross_entropy(model(problem["x"][rows]), problem["y"][rows]).backward()
        optimizer.step()
    for name, value in model.state_dict().items():
        assert (trained[name] - value).norm() <= 1e-6 * value.norm()


def test_the_model_that_was_sent_is_left_as_it_is(problem: dict[str, Any]) -> None:
    before = {name: value.clone() for name, value in problem["start"].items()}
    trained, _ = run(
        problem, plan(EXAMPLES, batch=8, epochs=1), RULES["all"], neighbours=problem["neighbours"]
    )
    for name, value in problem["start"].items():
        assert torch.equal(value, before[name])
        assert not value.requires_grad
        assert not trained[name].requires_grad
        assert not torch.equal(trained[name], value)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_alpha_0_and_beta_1_are_plain_training_bit_for_bit(problem: dict[str, Any], momentum: float) -> None:
    batches = plan(EXAMPLES, batch=8, epochs=3)
    plain, plain_loss = run(problem, batches, LocalRule(momentum=momentum))
    limit = LocalRule(alpha=0.0, beta=1.0, momentum=momentum, l2=0.0, clip_norm=0.0)
    trained, loss = run(problem, batches, limit, neighbours=problem["neighbours"])
    assert all(torch.equal(trained[name], plain[name]) for name in plain)
    assert torch.equal(loss, plain_loss)


@pytest.mark.parametrize("beta", [0.0, 0.5, 0.999])
def test_beta_under_1_needs_neighbours(problem: dict[str, Any], beta: float) -> None:
    with pytest.raises(ValueError, match=f"beta = {beta}: needs the neighbour average u"):
        run(problem, plan(EXAMPLES, epochs=1), LocalRule(beta=beta))


def test_a_strong_pull_keeps_the_model_near_the_one_sent(problem: dict[str, Any]) -> None:
    # γ α = 1: w ← w − γ g − (w − w̄) = w̄ − γ g, one step from w̄ however many were taken
    batches = plan(EXAMPLES, batch=8, steps=50)
    trained, _ = run(problem, batches, LocalRule(alpha=1000.0), lr=1e-3)
    free, _ = run(problem, batches, LocalRule(), lr=1e-3)
    _, gradients = numpy_gradient(problem, rows_of(batches)[-1])
    for name, start in problem["start"].items():
        moved = (trained[name] - start).numpy()
        np.testing.assert_allclose(moved, -1e-3 * gradients[name], rtol=0, atol=2e-5)
        assert np.linalg.norm(moved) < 0.1 * float((free[name] - start).norm())


def numpy_gradient(problem: dict[str, Any], rows: list[int]) -> tuple[float, dict[str, np.ndarray]]:
    """Loss and gradient at the model that was sent."""
    x, y = problem["x"].double().numpy()[rows], np.eye(CLASSES)[problem["y"].numpy()[rows]]
    z = x @ problem["start"]["1.weight"].double().numpy().T + problem["start"]["1.bias"].double().numpy()
    probabilities = np.exp(z) / np.exp(z).sum(axis=1, keepdims=True)
    error = (probabilities - y) / len(rows)
    return float(-np.log((probabilities * y).sum(1)).mean()), {
        "1.weight": error.T @ x,
        "1.bias": error.sum(0),
    }


def test_one_step_by_hand() -> None:
    # loss ½ (w − 3)² at w = 1: g = −2; γ = 0.1: w = 1 + 0.2 = 1.2; loss before the step ½ · 4 = 2
    def loss(parameters: Parameters, x: torch.Tensor, y: torch.Tensor, mask: Any) -> torch.Tensor:
        return 0.5 * (parameters["w"] - 3).square().sum()

    start, x, y = {"w": torch.tensor([1.0])}, torch.zeros(2, 1), torch.zeros(2, dtype=torch.long)

    def after(steps: int, rule: LocalRule, u: float = 0.0) -> tuple[float, float]:
        neighbours = {"w": torch.tensor([u])}
        w, value = train(loss, start, x, y, plan(2, steps=steps).ragged(), 0.1, rule, neighbours=neighbours)
        return w["w"].item(), value.item()

    assert after(1, LocalRule()) == pytest.approx((1.2, 2.0))
    # second step: g = 1.2 − 3 = −1.8: w = 1.38; mean loss (2 + ½ · 3.24) / 2 = 1.81
    assert after(2, LocalRule()) == pytest.approx((1.38, 1.81))
    # momentum ½: v = −2, then ½ · −2 − 1.8 = −2.8: w = 1.2 + 0.28
    assert after(2, LocalRule(momentum=0.5))[0] == pytest.approx(1.48)
    # α = 2: the second gradient gains 2 · (1.2 − 1) = 0.4: w = 1.2 + 0.14
    assert after(2, LocalRule(alpha=2.0))[0] == pytest.approx(1.34)
    # λ = 1: g = −2 + 1 = −1: w = 1.1
    assert after(1, LocalRule(l2=1.0))[0] == pytest.approx(1.1)
    # G = ½: g = −½: w = 1.05
    assert after(1, LocalRule(clip_norm=0.5))[0] == pytest.approx(1.05)
    # β = ½, u = 2: w̃ = 1.5, g = −1.5, step from w: 1.15; the loss is that at w̃: ½ · 2.25
    assert after(1, LocalRule(beta=0.5), u=2.0) == pytest.approx((1.15, 1.125))
    # and λ = 1 is taken at w̃ too: g = −1.5 + 1.5 = 0
    assert after(1, LocalRule(beta=0.5, l2=1.0), u=2.0)[0] == pytest.approx(1.0)


def test_a_zero_gradient_survives_clipping(problem: dict[str, Any]) -> None:
    def flat(parameters: Parameters, x: torch.Tensor, y: torch.Tensor, mask: Any) -> torch.Tensor:
        return 0 * sum(value.sum() for value in parameters.values())

    batches = plan(EXAMPLES, epochs=1).ragged()
    rule = LocalRule(clip_norm=1.0)
    trained, _ = train(flat, problem["start"], problem["x"], problem["y"], batches, 0.1, rule)
    assert all(torch.equal(trained[name], value) for name, value in problem["start"].items())


# A batch of clients --------------------------------------------------------------------------------------------


def client_data(n: int, shape: tuple[int, ...], seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(n, *shape, generator=generator), torch.randint(10, (n,), generator=generator)


VMAP_RULES = {
    "plain": LocalRule(),
    "momentum": LocalRule(momentum=0.9),
    "alpha": LocalRule(alpha=0.5),
    "l2": LocalRule(l2=0.1),
    "clip": LocalRule(clip_norm=0.5),
    "all": LocalRule(alpha=0.5, momentum=0.9, l2=0.01, clip_norm=1.0),
    "all and beta": LocalRule(alpha=0.5, beta=0.5, momentum=0.9, l2=0.01, clip_norm=1.0),
}
VMAP_CASES = [
    *(("logistic", rule, amount) for rule in VMAP_RULES for amount in ({"epochs": 3}, {"steps": 4})),
    *(("mlp", rule, {"epochs": 2}) for rule in VMAP_RULES),
    *(("cnn", rule, {"epochs": 1}) for rule in ("plain", "all", "all and beta")),
]


@pytest.mark.parametrize(("name", "rule", "amount"), VMAP_CASES)
def test_ragged_clients_under_vmap_equal_the_loop(name: str, rule: str, amount: dict[str, int]) -> None:
    local_rule = VMAP_RULES[rule]
    model = build_model(name, kind="image", input_shape=(1, 8, 8), num_classes=10, seed=1)
    loss = cross_entropy(model)
    start = {key: value.detach() for key, value in model.named_parameters()}
    others = [
        {
            key: value.detach()
            for key, value in build_model(
                name, kind="image", input_shape=(1, 8, 8), num_classes=10, seed=2 + i
            ).named_parameters()
        }
        for i in range(3)
    ]
    # 3, 13 and 20 examples in batches of 6: 1, 3 and 4 steps an epoch
    data = [client_data(n, (1, 8, 8), seed) for seed, n in enumerate((3, 13, 20))]
    plans = [plan(len(y), batch=6, key=(0, i, 1), **amount) for i, (_, y) in enumerate(data)]
    rates = torch.tensor([0.1, 0.05, 0.02])

    loop = [
        train(loss, start, x, y, plans[i].ragged(), float(rates[i]), local_rule, neighbours=others[i])
        for i, (x, y) in enumerate(data)
    ]

    steps, width = max(len(batches) for batches in plans), 6
    padded = [batches.padded(steps, width) for batches in plans]
    indices = torch.from_numpy(np.stack([pair[0] for pair in padded]))
    masks = torch.from_numpy(np.stack([pair[1] for pair in padded]))
    x = torch.stack([F.pad(x, (0, 0, 0, 0, 0, 0, 0, 20 - len(x)), value=9.0) for x, _ in data])
    y = torch.stack([F.pad(y, (0, 20 - len(y)), value=9) for _, y in data])
    neighbours = {key: torch.stack([other[key] for other in others]) for key in start}

    def one(
        x: torch.Tensor,
        y: torch.Tensor,
        indices: torch.Tensor,
        masks: torch.Tensor,
        lr: torch.Tensor,
        u: Parameters,
        own: Parameters,
    ) -> tuple[Parameters, torch.Tensor]:
        batches = zip(indices, masks, strict=True)
        return train(loss, own, x, y, batches, lr, local_rule, neighbours=u, gradient=functional_gradient)

    starts = {key: torch.stack([value] * 3) for key, value in start.items()}
    trained, losses = torch.func.vmap(one)(x, y, indices, masks, rates, neighbours, starts)
    for i, (expected, expected_loss) in enumerate(loop):
        for key, value in expected.items():
            torch.testing.assert_close(trained[key][i], value, rtol=0, atol=1e-5)
            assert not torch.equal(value, start[key])
        assert float(losses[i]) == pytest.approx(float(expected_loss), abs=1e-5)


def test_a_masked_batch_equals_the_shorter_one(problem: dict[str, Any]) -> None:
    rows = torch.tensor([4, 7, 2])
    padded_rows, mask = torch.tensor([4, 7, 2, 0, 0]), torch.tensor([1.0, 1, 1, 0, 0])
    arguments = problem["loss"], problem["start"], problem["x"], problem["y"]
    short, short_loss = train(*arguments, [(rows, None)], LR, LocalRule())
    masked, masked_loss = train(*arguments, [(padded_rows, mask)], LR, LocalRule())
    assert all(torch.allclose(short[name], masked[name], rtol=0, atol=1e-6) for name in short)
    assert float(masked_loss) == pytest.approx(float(short_loss), rel=1e-6)


def test_steps_of_padding_alone_move_nothing(problem: dict[str, Any]) -> None:
    rows = torch.tensor([4, 7, 2])
    nothing = (torch.zeros(3, dtype=torch.long), torch.zeros(3))
    arguments = problem["loss"], problem["start"], problem["x"], problem["y"]
    rule = LocalRule(alpha=0.7, momentum=0.9, l2=0.3, clip_norm=1.0)
    once, once_loss = train(*arguments, [(rows, torch.ones(3))], LR, rule)
    padded, padded_loss = train(*arguments, [(rows, torch.ones(3)), nothing, nothing], LR, rule)
    assert all(torch.equal(once[name], padded[name]) for name in once)
    assert torch.equal(once_loss, padded_loss)


# Learning rate -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schedule", "by_round"),
    [
        ("constant", {1: 0.8, 2: 0.8, 4: 0.8}),
        ("inverse", {1: 0.8, 2: 0.4, 4: 0.2}),
        ("inverse-sqrt", {1: 0.8, 4: 0.4, 16: 0.2}),
        # T = 4: ½ γ (1 + cos(0)), (1 + cos(π/4)), (1 + cos(π/2)), (1 + cos(3π/4)); round 5 would be 0
        ("cosine", {1: 0.8, 2: 0.4 * (1 + math.sqrt(0.5)), 3: 0.4, 4: 0.4 * (1 - math.sqrt(0.5)), 5: 0.0}),
        ("exponential:0.5", {1: 0.8, 2: 0.4, 3: 0.2, 4: 0.1}),
        ("exponential:1", {1: 0.8, 9: 0.8}),
        ("exponential:.25", {1: 0.8, 2: 0.2}),
    ],
)
def test_learning_rate_by_round(schedule: str, by_round: dict[int, float]) -> None:
    for server_round, expected in by_round.items():
        assert scheduled_lr(0.8, schedule, server_round, 4) == pytest.approx(expected, abs=1e-15)
