"""Which models are made of dense layers."""

import pytest
from torch import nn

from fedapp.models import build_model
from fedapp.training.layers import dense_layers
from tests.training.cases import model_of

MODELS = {name: model_of(name, (6,)) for name in ("logistic", "mlp", "three layers")}


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
