"""The local step by hand: on one number, and on a logistic regression with its gradient in float64 numpy."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fedapp.models import build_model
from fedapp.training.autograd import batch_loss, train
from fedapp.training.batches import Batches
from fedapp.training.losses import CROSS_ENTROPY
from fedapp.training.rule import Anchors, LocalRule, Parameters, Tensors, path, step
from fedapp.training.trainee import Trainee
from tests.training.cases import RULES, plan, rows_of

CLASSES, FEATURES, EXAMPLES = 3, 5, 30
LR = 0.2


@pytest.fixture
def problem():
    """A logistic regression with data, the model sent and a neighbour average."""
    rng = np.random.default_rng(7)

    def parameters() -> Parameters:
        return {
            "1.weight": torch.tensor(rng.normal(size=(CLASSES, FEATURES)), dtype=torch.float32),
            "1.bias": torch.tensor(rng.normal(size=CLASSES), dtype=torch.float32),
        }

    return {
        "loss": batch_loss(
            Trainee(build_model("logistic", kind="vector", input_shape=(FEATURES,), num_classes=CLASSES)),
            CROSS_ENTROPY,
            {},
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


AMOUNTS = {
    "epochs": {"batch": 8, "epochs": 3},  # the last batch of each has 30 − 3·8 = 6
    "steps": {"batch": 8, "steps": 10},
    "full batch": {"epochs": 6},
}


@pytest.mark.parametrize("amount", AMOUNTS)
@pytest.mark.parametrize("rule", RULES)
def test_training_equals_a_float64_implementation(problem, rule, amount):
    batches = plan(EXAMPLES, **AMOUNTS[amount])
    trained, loss = run(problem, batches, RULES[rule], neighbours=problem["neighbours"])
    weight, bias, expected_loss = numpy_train(problem, batches, RULES[rule])
    np.testing.assert_allclose(trained["1.weight"].numpy(), weight, rtol=0, atol=1e-5)
    np.testing.assert_allclose(trained["1.bias"].numpy(), bias, rtol=0, atol=1e-5)
    assert float(loss) == pytest.approx(expected_loss, abs=1e-5)


@pytest.mark.parametrize(("momentum", "l2"), [(0.0, 0.0), (0.9, 0.0), (0.0, 0.1), (0.9, 0.01)])
def test_training_equals_torch_sgd(problem, momentum, l2):
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


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_alpha_0_and_beta_1_are_plain_training_bit_for_bit(problem, momentum):
    batches = plan(EXAMPLES, batch=8, epochs=3)
    plain, plain_loss = run(problem, batches, LocalRule(momentum=momentum))
    limit = LocalRule(alpha=0.0, beta=1.0, momentum=momentum, l2=0.0, clip_norm=0.0)
    trained, loss = run(problem, batches, limit, neighbours=problem["neighbours"])
    assert all(torch.equal(trained[name], plain[name]) for name in plain)
    assert torch.equal(loss, plain_loss)


@pytest.mark.parametrize("beta", [0.0, 0.5, 0.999])
def test_beta_under_1_needs_neighbours(problem, beta):
    with pytest.raises(ValueError, match=f"beta = {beta}: needs the neighbour average u"):
        run(problem, plan(EXAMPLES, epochs=1), LocalRule(beta=beta))


def test_a_strong_pull_keeps_the_model_near_the_one_sent(problem):
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


def test_one_step_by_hand():
    # loss ½ (w − 3)² at w = 1: g = −2; γ = 0.1: w = 1 + 0.2 = 1.2; loss before the step ½ · 4 = 2
    def loss(parameters: Parameters, x: torch.Tensor, y: torch.Tensor, mask: Any) -> torch.Tensor:
        return 0.5 * (parameters["w"] - 3).square().sum()

    start, x, y = {"w": torch.tensor([1.0])}, torch.zeros(2, 1), torch.zeros(2, dtype=torch.long)

    def after(steps: int, rule: LocalRule, u: float = 0.0, h: float | None = None) -> tuple[float, float]:
        anchors = {
            "neighbours": {"w": torch.tensor([u])},
            "constant": None if h is None else {"w": torch.tensor([h])},
        }
        w, value = train(loss, start, x, y, plan(2, steps=steps).ragged(), 0.1, rule, **anchors)
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
    # h = ½: g + h = −1.5: w = 1.15; then g = −1.85, and −1.35: w = 1.285; the loss is f's, ½ (4 + 1.85²) / 2
    assert after(2, LocalRule(), h=0.5) == pytest.approx((1.285, 1.855625))
    # momentum ½: v = −1.5, then ½ · −1.5 − 1.85 + ½ = −2.1: w = 1.15 + 0.21
    assert after(2, LocalRule(momentum=0.5), h=0.5)[0] == pytest.approx(1.36)
    # h isn't clipped: G = ½ makes g = −½, and −½ + h = 0
    assert after(1, LocalRule(clip_norm=0.5), h=0.5)[0] == pytest.approx(1.0)


def test_a_zero_gradient_survives_clipping(problem):
    def flat(parameters: Parameters, x: torch.Tensor, y: torch.Tensor, mask: Any) -> torch.Tensor:
        return 0 * sum(value.sum() for value in parameters.values())

    batches = plan(EXAMPLES, epochs=1).ragged()
    rule = LocalRule(clip_norm=1.0)
    trained, _ = train(flat, problem["start"], problem["x"], problem["y"], batches, 0.1, rule)
    assert all(torch.equal(trained[name], value) for name, value in problem["start"].items())


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("alpha", [0.0, 0.3])
def test_the_path_is_how_far_steps_go_along_a_gradient_of_one(momentum, alpha):
    rule, w = LocalRule(alpha=alpha, momentum=momentum), Tensors({"w": torch.zeros(1, dtype=torch.float64)})
    one, sent = Tensors({"w": torch.ones(1, dtype=torch.float64)}), Tensors({"w": torch.zeros(1)})
    velocity = Tensors({"w": torch.zeros(1, dtype=torch.float64)}) if momentum else None
    for steps in range(1, 6):
        velocity, _ = step(rule, w, Anchors(sent), lambda _: (one, torch.tensor(0.0)), LR, velocity)
        assert path(rule, LR, steps) == pytest.approx(-w.named["w"].item(), rel=1e-12)


def test_the_path_in_closed_form():
    # K γ; with momentum as Wang et al. 2020 have it; with a pull (1 − (1 − γα)^K)/α.
    assert path(LocalRule(), 0.1, 7) == pytest.approx(0.7, rel=1e-12)
    expected = 0.1 * (7 - 0.9 * (1 - 0.9**7) / 0.1) / 0.1
    assert path(LocalRule(momentum=0.9), 0.1, 7) == pytest.approx(expected, rel=1e-12)
    assert path(LocalRule(alpha=0.5), 0.1, 7) == pytest.approx((1 - 0.95**7) / 0.5, rel=1e-12)
