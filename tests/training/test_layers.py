"""Which models are made of dense layers."""

import pytest
import torch
from torch import nn

from fedapp.models import build_model
from fedapp.training.layers import dense_layers
from tests.training.cases import model_of

MODELS = {name: model_of(name, (6,)) for name in ("logistic", "mlp", "three layers")}


def test_the_layers_of_dense_models():
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
def test_models_that_are_not_dense(model):
    assert dense_layers(model) == []


# What only looks as if it were dense ------------------------------------------------------------------------------


class Scaled(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = super().forward(x / 255)
        return outputs


def chain() -> nn.Sequential:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 3)
    )


def with_its_own_forward() -> nn.Module:
    return Scaled(nn.Flatten(), nn.Linear(6, 3))


def ends_in_a_relu_that_is_there_twice() -> nn.Module:
    act = nn.ReLU()
    return nn.Sequential(nn.Flatten(), nn.Linear(6, 8), act, nn.Linear(8, 3), act)


def has_one_linear_twice() -> nn.Module:
    layer = nn.Linear(6, 6)
    return nn.Sequential(nn.Flatten(), layer, nn.ReLU(), layer, nn.ReLU(), nn.Linear(6, 3))


def tied() -> nn.Module:
    model = chain()
    model[3].weight = model[1].weight
    return model


def normalised() -> nn.Module:
    model = chain()
    nn.utils.spectral_norm(model[1])  # type: ignore[arg-type]
    return model


def hooked() -> nn.Module:
    model = chain()
    model[1].register_forward_hook(lambda _, __, outputs: outputs / 2)
    return model


def with_a_forward_put_in_its_place() -> nn.Module:
    model = chain()
    layer = model[3]
    layer.forward = lambda x: nn.Linear.forward(layer, x) / 2  # type: ignore[arg-type]
    return model


@pytest.mark.parametrize(
    "make",
    [
        with_its_own_forward,
        ends_in_a_relu_that_is_there_twice,
        has_one_linear_twice,
        tied,
        normalised,
        hooked,
        with_a_forward_put_in_its_place,
    ],
)
def test_what_only_looks_dense_is_not_trained_as_such(make):
    assert dense_layers(make()) == []


def test_one_relu_for_all_layers_is_dense():
    act = nn.ReLU()
    model = nn.Sequential(nn.Flatten(), nn.Linear(6, 8), act, nn.Linear(8, 8), act, nn.Linear(8, 3))
    assert dense_layers(model) == [(f"{place}.weight", f"{place}.bias") for place in (1, 3, 5)]
