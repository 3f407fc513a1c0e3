"""SCAFFOLD with momentum: the correction in the gradient, as here, or after the step of momentum, as in NIID-Bench.

The reading of niid-bench.toml says that a correction moves a client by the same vector in both orders.
"""

import numpy as np
import pytest
import torch

from fedapp.training.rule import Anchors, LocalRule, Tensors, path, step

GAMMA, RHO = 0.01, 0.9


def descend(w: torch.Tensor, h: torch.Tensor, gradient, steps: int) -> torch.Tensor:
    """Train as the library does: the correction h is a part of every gradient."""
    rule, model, velocity = LocalRule(momentum=RHO), Tensors({"w": w.clone()}), None
    for _ in range(steps):
        velocity, _ = step(
            rule,
            model,
            Anchors(constant=Tensors({"w": h})),
            lambda point: (Tensors({"w": gradient(point.named["w"])}), torch.zeros(())),
            GAMMA,
            velocity,
        )
    return model.named["w"]


def descend_then_correct(w: torch.Tensor, h: torch.Tensor, gradient, steps: int) -> torch.Tensor:
    """Train as the baseline does: a step of PyTorch's SGD with momentum, then w ← w − γ h."""
    parameter = torch.nn.Parameter(w.clone())
    optimizer = torch.optim.SGD([parameter], lr=GAMMA, momentum=RHO)
    for _ in range(steps):
        parameter.grad = gradient(parameter.data)
        optimizer.step()
        parameter.data.add_(h, alpha=-GAMMA)
    return parameter.data


def rounds(train, length, curvatures, centres, steps: int, number: int) -> np.ndarray:
    """Return the global model after each round of SCAFFOLD over quadratic clients that weigh alike."""
    model, variates = torch.zeros_like(centres[0]), torch.zeros_like(centres)
    models = []
    for _ in range(number):
        common = variates.mean(0)
        local = [
            train(model, common - variates[i], lambda w, i=i: curvatures[i] * (w - centres[i]), steps)
            for i in range(len(centres))
        ]
        variates = torch.stack([variates[i] - common + (model - w) / length for i, w in enumerate(local)])
        model = torch.stack(local).mean(0)
        models.append(model.numpy())
    return np.stack(models)


@pytest.mark.parametrize("steps", [1, 7, 300])
def test_where_gradients_are_constant_a_correction_moves_a_client_alike(steps):
    h, nothing = torch.tensor([1.0, -2.0], dtype=torch.float64), lambda w: torch.zeros_like(w)
    ours = descend(torch.zeros(2, dtype=torch.float64), h, nothing, steps)
    gone = path(LocalRule(momentum=RHO), GAMMA, steps)
    theirs = descend_then_correct(
        torch.zeros(2, dtype=torch.float64), h * gone / (steps * GAMMA), nothing, steps
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=0)
    torch.testing.assert_close(ours, -gone * h, rtol=1e-12, atol=0)


def test_over_rounds_the_two_orders_are_nearly_one_method():
    # Ten clients with other curvatures and centres; K = 938 is an epoch of 6,000 rows in batches of 64, ten times.
    random = np.random.Generator(np.random.PCG64(5))
    curvatures = torch.from_numpy(random.uniform(0.005, 0.05, (10, 6)))
    centres = torch.from_numpy(random.normal(size=(10, 6)))
    steps, number = 938, 10
    ours = rounds(descend, path(LocalRule(momentum=RHO), GAMMA, steps), curvatures, centres, steps, number)
    theirs = rounds(descend_then_correct, steps * GAMMA, curvatures, centres, steps, number)
    plain = rounds(lambda w, h, *rest: descend(w, 0 * h, *rest), 1.0, curvatures, centres, steps, number)
    apart = np.linalg.norm(ours - theirs, axis=1) / np.linalg.norm(ours, axis=1)
    assert apart[0] < 1e-12  # without corrections yet
    assert 0 < apart.max() < 0.01
    assert np.linalg.norm(ours - plain, axis=1)[-1] > 10 * np.linalg.norm(ours - theirs, axis=1)[-1]
