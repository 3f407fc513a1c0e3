"""Evaluation, by hand on three rows and over more rows than one pass takes."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedapp.models import build_model
from fedapp.training.evaluation import ACCURACY, CHUNK, FEW, Score, evaluate


def test_three_rows_by_hand():
    # softmax of (ln 3, 0) is (3/4, 1/4): losses −ln 3/4 and −ln 1/4; of (0, ln 7) for label 1: −ln 7/8
    logits = torch.tensor([[math.log(3), 0.0], [math.log(3), 0.0], [0.0, math.log(7)]])
    score = evaluate(nn.Identity(), {}, logits, torch.tensor([0, 1, 1]))
    assert score.losses.tolist() == pytest.approx([math.log(4 / 3), math.log(4), math.log(8 / 7)], rel=1e-6)
    assert score.rows["accuracy"].tolist() == [True, False, True]
    # mean ln(4/3 · 4 · 8/7) / 3
    assert score.loss == pytest.approx(math.log(128 / 21) / 3, rel=1e-6)
    assert score.values() == {"accuracy": pytest.approx(2 / 3)}
    assert score.losses.dtype == np.float64


@pytest.mark.parametrize("rows", [CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 77])
def test_any_number_of_rows_equals_one_pass(rows):
    generator = torch.Generator().manual_seed(0)
    x, y = torch.rand(rows, 6, generator=generator), torch.randint(4, (rows,), generator=generator)
    model = build_model("logistic", kind="vector", input_shape=(6,), num_classes=4, seed=3)
    parameters = {name: 2 * value.detach() for name, value in model.named_parameters()}
    score = evaluate(model, parameters, x, y)
    logits = F.linear(x, parameters["1.weight"], parameters["1.bias"])
    assert len(score.losses) == len(score.rows["accuracy"]) == rows
    np.testing.assert_allclose(score.losses, F.cross_entropy(logits, y, reduction="none").numpy(), rtol=1e-5)
    assert score.values()["accuracy"] == int((logits.argmax(1) == y).sum()) / rows


class Flat(nn.Module):
    """A convolution whose outputs are taken by ``view``: it wants images in one piece."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.last = nn.Conv2d(2, 3, 3), nn.Linear(3 * 6 * 6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.convolution(x)).view(len(x), -1))


class Normed(nn.Module):
    """A model with running statistics, which evaluation leaves as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(3 * 6 * 6, 4)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layers(x)
        return found


@pytest.mark.parametrize("kind", [Flat, Normed])
@pytest.mark.parametrize("rows", [1, FEW, 2 * FEW + 5])
def test_images_are_scored_as_in_one_pass(kind, rows):
    torch.manual_seed(1)
    model = kind().eval()
    x, y = torch.randn(rows, 2, 8, 8), torch.randint(4, (rows,))
    state = {name: value.clone() for name, value in model.state_dict().items()}
    score = evaluate(model, state, x, y)
    with torch.no_grad():
        expected = F.cross_entropy(model(x), y, reduction="none").numpy()
    np.testing.assert_allclose(score.losses, expected, rtol=1e-4, atol=1e-6)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def test_the_parameters_given_count_not_the_models_own():
    model = build_model("logistic", kind="vector", input_shape=(2,), num_classes=2, seed=3)
    zeros = {name: torch.zeros_like(value) for name, value in model.named_parameters()}
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert evaluate(model, zeros, torch.ones(3, 2), torch.tensor([0, 1, 0])).loss == pytest.approx(
        math.log(2)
    )
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_those_without_rows_have_no_score():
    hits = {"accuracy": np.array([True, False, True, True, True, False])}
    score = Score(np.arange(6.0), hits, None, None, ACCURACY)
    # clients with rows 0-1, none, 2-4, 5
    by_client = score.by_client(np.array([0, 2, 2, 5, 6]))
    np.testing.assert_array_equal(by_client["accuracy"], [0.5, np.nan, 1.0, 0.0])
    np.testing.assert_array_equal(by_client["loss"], [0.5, np.nan, 3.0, 5.0])
    # weighted by their rows they make up the accuracy of all: (2·½ + 3·1 + 1·0) / 6
    assert score.values()["accuracy"] == pytest.approx(4 / 6)
