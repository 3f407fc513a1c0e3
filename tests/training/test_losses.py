"""Losses: by hand, and their closed derivatives against automatic differentiation, in every way of training."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedapp.own import OwnPartError
from fedapp.training.losses import LOSSES, Loss, columns, loss_of
from fedapp.training.rule import LocalRule
from fedapp.training.task import LocalTask
from tests.training.cases import RULES, by_way, three_clients

NUMBERS = [name for name, loss in LOSSES.items() if loss.targets == "numbers"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        # outputs (1, −1), (0.5, 3); targets (0, 0), (1, 1): differences (1, −1), (−0.5, 2)
        ("mse", [(1 + 1) / 2, (0.25 + 4) / 2]),
        ("mae", [1.0, (0.5 + 2) / 2]),
        ("huber", [(0.5 + 0.5) / 2, (0.125 + 1.5) / 2]),
        # −log(1 − σ(1)) = log(1 + e), −log(1 − σ(−1)) = log(1 + 1/e); −log σ(x) = log(1 + e⁻ˣ)
        (
            "bce",
            [
                (math.log(1 + math.e) + math.log(1 + 1 / math.e)) / 2,
                (math.log(1 + math.exp(-0.5)) + math.log(1 + math.exp(-3))) / 2,
            ],
        ),
    ],
)
def test_by_hand(name, expected):
    outputs, targets = torch.tensor([[1.0, -1.0], [0.5, 3.0]]), torch.tensor([[0.0, 0.0], [1.0, 1.0]])
    assert LOSSES[name].rows(outputs, targets).tolist() == pytest.approx(expected, rel=1e-6)
    assert float(LOSSES[name].mean(outputs, targets)) == pytest.approx(sum(expected) / 2, rel=1e-6)


@given(
    seed=st.integers(0, 10_000), clients=st.integers(0, 3), rows=st.integers(1, 6), outputs=st.integers(2, 4)
)
@pytest.mark.parametrize("name", LOSSES)
def test_closed_derivatives_are_the_automatic_ones(name, seed, clients, rows, outputs):
    loss, rng = LOSSES[name], np.random.default_rng(seed)
    lead = (clients,) if clients else ()
    found = torch.tensor(rng.normal(size=(*lead, rows, outputs)), dtype=torch.float64, requires_grad=True)
    if loss.targets == "classes":
        targets = torch.tensor(rng.integers(0, outputs, (*lead, rows)))
    else:
        targets = torch.tensor(rng.random((*lead, rows, outputs)))
    each = loss.rows(found.reshape(-1, outputs), targets.reshape(-1, *targets.shape[len(lead) + 1 :]))
    (expected,) = torch.autograd.grad(each.sum(), found)
    assert loss.errors is not None
    losses, error = loss.errors(found.detach().mT.clone(), columns(targets))
    torch.testing.assert_close(losses.flatten(), each.detach())
    torch.testing.assert_close(error.mT, expected)


def with_numbers(tasks: Sequence[LocalTask], loss: Loss) -> list[LocalTask]:
    """The same tasks with targets in [0, 1], three to a row."""
    targets = torch.stack([torch.sin(k * torch.arange(len(tasks[0].y))).abs() for k in (1, 2, 3)], dim=1)
    return [replace(task, y=targets, loss=loss) for task in tasks]


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("rule", ["plain", "all but clip"])
def test_every_way_trains_numbers_alike(name, rule):
    tasks = with_numbers(three_clients("logistic", RULES[rule]), LOSSES[name])
    expected = by_way("single", tasks)
    for way in ("stacked", "dual", "vmapped"):
        for (w, loss), (v, other) in zip(by_way(way, tasks), expected, strict=True):  # type: ignore[arg-type]
            assert float(loss) == pytest.approx(float(other), rel=1e-5)
            for parameter, value in v.items():
                torch.testing.assert_close(w[parameter], value, rtol=1e-4, atol=1e-5)


def test_linear_regression_by_full_gradients_finds_the_least_squares():
    (task, *_) = with_numbers(three_clients("logistic", LocalRule()), LOSSES["mse"])
    x = task.x[task.rows].flatten(1).double().numpy()
    y = task.y[task.rows].double().numpy()
    design = np.column_stack([x, np.ones(len(x))])
    exact, *_ = np.linalg.lstsq(design, y, rcond=None)
    batches = replace(
        task.batches,
        indices=np.broadcast_to(np.arange(len(x)), (20_000, len(x))),
        sizes=np.full(20_000, len(x)),
        whole=True,
    )
    ((w, _),) = by_way("dual", [replace(task, batches=batches, lr=0.3)])
    best = ((design @ exact - y) ** 2).mean()
    reached = ((x @ w["1.weight"].double().numpy().T + w["1.bias"].double().numpy() - y) ** 2).mean()
    assert reached == pytest.approx(best, rel=1e-3, abs=1e-6)


def test_ones_own_is_a_function_or_a_module():
    focal = loss_of("custom.losses:focal")
    # p = 3/4 and 1/4 of the right class: (1/4)² ln 4/3 and (3/4)² ln 4
    outputs = torch.tensor([[math.log(3), 0.0], [0.0, math.log(3)]])
    expected = [math.log(4 / 3) / 16, 9 * math.log(4) / 16]
    assert focal.rows(outputs, torch.tensor([0, 0])).tolist() == pytest.approx(expected, rel=1e-5)
    assert focal.errors is None
    assert loss_of("torch.nn:L1Loss").name == "torch.nn:L1Loss"
    assert loss_of("custom.losses:focal") is focal


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("ce", "loss = 'ce': must be one of cross-entropy, mse, mae, huber, bce, or module:name of your own"),
        (
            "custom.losses:none",
            "loss = 'custom.losses:none': can't be imported (there is no 'none' in custom.losses)",
        ),
        ("math:pi", "loss = 'math:pi': must be a function (outputs, targets) → (B,), is 3.14"),
    ],
)
def test_what_is_no_loss_is_refused(name, said):
    with pytest.raises(OwnPartError) as error:
        loss_of(name)
    assert str(error.value).startswith(said)
