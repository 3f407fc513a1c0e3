"""Divergence and drift of the clients, against numpy by hand."""

import numpy as np
import pytest
import torch
from scipy.special import softmax
from torch import Tensor, nn

from fedapp.models import build_model
from fedapp.training.divergence import DivergenceMeter

OFFSETS = np.array([0, 3000, 3500, 5000])  # more rows than are worked on at once


@pytest.fixture
def meter():
    """Three clients of logistic regression with 4 features and 3 classes."""
    rng = np.random.default_rng(1)
    x, y = rng.standard_normal((5000, 4), dtype=np.float32), rng.integers(0, 3, 5000)
    model = build_model("logistic", kind="vector", input_shape=(4,), num_classes=3)
    return DivergenceMeter(model, torch.from_numpy(x), torch.from_numpy(y), OFFSETS)


def state(seed: int) -> dict[str, torch.Tensor]:
    rng = np.random.default_rng(seed)
    return {
        "1.weight": torch.from_numpy(rng.standard_normal((3, 4), dtype=np.float32)),
        "1.bias": torch.from_numpy(rng.standard_normal(3, dtype=np.float32)),
    }


def gradient(meter: DivergenceMeter, parameters: dict[str, torch.Tensor], client: int) -> np.ndarray:
    """∇f_i in float64, by hand."""
    rows = slice(OFFSETS[client], OFFSETS[client + 1])
    x, y = meter.x[rows].double().numpy(), meter.y[rows].numpy()
    weight, bias = (parameters[name].double().numpy() for name in ("1.weight", "1.bias"))
    residual = (softmax(x @ weight.T + bias, axis=1) - np.eye(3)[y]) / len(y)
    return np.hstack([(residual.T @ x).ravel(), residual.sum(0)])


def test_divergence_and_drift_by_hand(meter):
    client_weights = {0: 0.5, 1: 0.2, 2: 0.3}
    models = {0: state(10), 2: state(12)}
    expected = []
    for client, parameters in models.items():
        meter.take(client, parameters, client_weights)
        total = sum(p * gradient(meter, parameters, other) for other, p in client_weights.items())
        expected.append(np.linalg.norm(gradient(meter, parameters, client) - total))
    flat = [
        np.hstack([value.double().numpy().ravel() for value in model.values()]) for model in models.values()
    ]
    metrics = meter.metrics()
    assert metrics["divergence"] == pytest.approx(max(expected), rel=1e-5)
    # of two models, each is half their difference from the mean
    assert metrics["drift"] == pytest.approx(np.sum((flat[0] - flat[1]) ** 2) / 4, rel=1e-12)


def test_each_aggregation_is_measured_by_itself(meter):
    assert meter.metrics() == {}
    meter.take(0, state(10), {0: 1.0})
    assert meter.metrics() == {"divergence": pytest.approx(0, abs=1e-6), "drift": 0.0}  # f is f_0
    assert meter.metrics() == {}


class Spare(nn.Module):
    """Has a layer that no output depends on, and notes whether cuDNN may be used."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.used, self.spare, self.seen = nn.Linear(4, 3), layer, set[bool]()

    def forward(self, x: Tensor) -> Tensor:
        self.seen.add(torch.backends.cudnn.enabled)
        outputs: Tensor = self.used(x)
        return outputs


@pytest.mark.parametrize(("layer", "cudnn"), [(nn.Linear(2, 2), True), (nn.LSTM(2, 2), False)])
def test_of_what_the_loss_does_not_depend_on_the_gradient_is_zero(layer, cudnn, meter):
    model = Spare(layer)
    with_spare = DivergenceMeter(model, meter.x, meter.y, OFFSETS)
    client_weights, own = {0: 0.5, 1: 0.2, 2: 0.3}, state(10)
    named = {"used.weight": own["1.weight"], "used.bias": own["1.bias"]}
    with_spare.take(0, {**model.state_dict(), **named}, client_weights)
    meter.take(0, own, client_weights)
    assert with_spare.metrics()["divergence"] == pytest.approx(meter.metrics()["divergence"], rel=1e-6)
    assert model.seen == {cudnn}  # an LSTM in evaluation mode has no gradient by cuDNN
    assert torch.backends.cudnn.enabled


def test_drift_keeps_its_digits_far_from_zero(meter):
    meter.x = meter.x.double()
    for shift in (1e6, 1e6 + 1e-3):
        meter.take(0, {name: value.double() + shift for name, value in state(10).items()}, {0: 1.0})
    # 15 parameters, each of the two models 0.0005 from the mean in each
    assert meter.metrics()["drift"] == pytest.approx(15 * 0.0005**2, rel=1e-4)
