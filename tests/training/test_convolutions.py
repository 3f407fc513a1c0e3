"""Convolutions of many clients as products: PyTorch's, client by client, to rounding; here on a CPU, too."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedapp.training import convolutions
from fedapp.training.convolutions import Convolutions, Geometry, convolved
from fedapp.training.task import LocalTask
from tests.training.cases import CLASSES, RULES, assert_equals_reference, by_way, parameters, three_clients

CLIENTS, EXAMPLES = 3, 4

# Channels in and out, images, and the layer's keywords.
LAYERS: dict[str, tuple[int, int, tuple[int, int], dict[str, Any]]] = {
    "one channel": (1, 5, (9, 8), {"kernel_size": 5, "padding": 2}),
    "rows": (16, 3, (9, 8), {"kernel_size": 3, "padding": 1}),
    "rows without padding": (12, 3, (9, 11), {"kernel_size": (4, 3)}),
    "rows that are not copied widely": (11, 3, (8, 8), {"kernel_size": 3, "padding": (0, 2)}),
    "rows with dilation": (16, 2, (9, 11), {"kernel_size": 3, "padding": 2, "dilation": (2, 3)}),
    "rows with more padding than the kernel sees": (16, 2, (5, 5), {"kernel_size": 3, "padding": 4}),
    "more weights than outputs": (16, 24, (2, 2), {"kernel_size": 3, "padding": 1}),
    "stride": (6, 5, (9, 8), {"kernel_size": 3, "stride": 2, "padding": 1}),
    "stride and dilation": (6, 5, (11, 9), {"kernel_size": (3, 2), "stride": (2, 3), "dilation": (3, 2)}),
    "1x1": (6, 5, (4, 5), {"kernel_size": 1}),
    "1x1 with stride": (6, 5, (5, 4), {"kernel_size": 1, "stride": 2}),
    "same": (16, 3, (6, 7), {"kernel_size": (4, 3), "padding": "same"}),
    "valid": (4, 5, (6, 7), {"kernel_size": 3, "padding": "valid", "bias": False}),
}

BY_ROWS = {name for name in LAYERS if name.startswith("rows")} | {"same"}


@pytest.fixture
def on_cpu(monkeypatch):
    monkeypatch.setattr(convolutions, "DEVICES", {"cpu", "cuda"})


def layer_of(name: str) -> tuple[nn.Conv2d, dict[str, Tensor], Tensor]:
    """Return a layer, the parameters of some clients, and their inputs."""
    inputs, outputs, size, keywords = LAYERS[name]
    torch.manual_seed(0)
    layer = nn.Conv2d(inputs, outputs, **keywords)
    state = {name: torch.randn(CLIENTS, *value.shape) for name, value in layer.named_parameters()}
    return layer, state, torch.randn(CLIENTS, EXAMPLES, inputs, *size)


def gradients(module: nn.Module, state: dict[str, Tensor], x: Tensor, *, vmap: bool) -> list[Tensor]:
    """Return outputs of clients, and the gradients with respect to inputs and parameters."""
    leaves = {name: value.clone().requires_grad_() for name, value in {**state, "": x}.items()}

    def of(own: dict[str, Tensor]) -> Tensor:
        x = own[""]
        return torch.func.functional_call(module, {name: value for name, value in own.items() if name}, (x,))

    if vmap:
        y = torch.func.vmap(of)(leaves)
    else:
        y = torch.stack([of({name: value[k] for name, value in leaves.items()}) for k in range(len(x))])
    factors = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view(y.shape).cos()
    return [y.detach(), *torch.autograd.grad((y * factors).sum(), list(leaves.values()))]


def close(found: list[Tensor], expected: list[Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape
        assert (one.double() - other).norm() <= 1e-6 * other.norm()


@pytest.mark.parametrize("by_channel", [False, True])
@pytest.mark.parametrize("unfolded", [1, 1 << 14, 1 << 30])
@pytest.mark.parametrize("name", LAYERS)
def test_outputs_and_gradients_are_pytorchs(name, unfolded, by_channel, on_cpu, monkeypatch):
    monkeypatch.setattr(convolutions, "UNFOLDED", unfolded)
    monkeypatch.setattr(convolutions, "PLACES_PER_CHANNEL", 2)
    layer, state, x = layer_of(name)
    expected = gradients(
        copy.deepcopy(layer).double(),
        {key: value.double() for key, value in state.items()},
        x.double(),
        vmap=False,
    )
    used = Convolutions(layer)
    used.by_channel = by_channel
    called = []
    monkeypatch.setattr(convolutions, "convolved", lambda *given: called.append(1) or convolved(*given))
    found = gradients(layer, state, x, vmap=True)
    assert called
    close(found, expected)
    again = gradients(layer, state, x, vmap=True)
    assert all(torch.equal(one, other) for one, other in zip(found, again, strict=True))


@pytest.mark.parametrize("name", LAYERS)
def test_rows_of_windows_are_unfolded_where_there_are_more_outputs_than_weights(name, monkeypatch):
    monkeypatch.setattr(convolutions, "PLACES_PER_CHANNEL", 2)
    layer, state, x = layer_of(name)
    geometry = Geometry(tuple(layer._reversed_padding_repeated_twice), layer.stride, layer.dilation)
    assert convolutions._by_rows(x, state["weight"], geometry) == (name in BY_ROWS)


def test_a_clients_result_does_not_depend_on_the_block_that_it_is_in(on_cpu, monkeypatch):
    layer, state, x = layer_of("rows")
    Convolutions(layer)
    whole = gradients(layer, state, x, vmap=True)
    monkeypatch.setattr(convolutions, "UNFOLDED", 1)
    close(gradients(layer, state, x, vmap=True), [value.double() for value in whole])


def test_what_is_frozen_is_convolved_as_before(on_cpu, monkeypatch):
    layer, state, x = layer_of("rows")
    expected = gradients(layer, {"bias": state["bias"]}, x, vmap=False)
    Convolutions(layer)
    monkeypatch.setattr(convolutions, "convolved", None)
    close(gradients(layer, {"bias": state["bias"]}, x, vmap=True), expected)


def test_a_frozen_bias_and_inputs_that_all_clients_share(on_cpu):
    layer, state, x = layer_of("rows")
    weight = state["weight"].requires_grad_()
    expected = torch.stack([F.conv2d(x[0], own, layer.bias, padding=1) for own in weight])
    Convolutions(layer)
    found = torch.func.vmap(lambda own: torch.func.functional_call(layer, {"weight": own}, (x[0],)))(weight)
    close([found], [expected.detach()])


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(4, 4, 3, groups=2),
        nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular"),
        nn.Conv1d(4, 4, 3),
        nn.utils.parametrizations.weight_norm(nn.Conv2d(4, 4, 3)),
    ],
)
def test_other_convolutions_stay(layer, on_cpu):
    assert not Convolutions(layer).take_products(torch.device("cpu"))
    assert "_conv_forward" not in vars(layer)


def test_products_are_taken_on_a_gpu_alone():
    used = Convolutions(nn.Conv2d(1, 1, 1))
    assert used.take_products(torch.device("cuda"))
    assert not used.take_products(torch.device("cpu"))


class Viewed(nn.Module):
    """A net that wants activations in one piece, as many are written."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 4, 3, stride=2)
        self.last = nn.Linear(4 * 7 * 7, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(torch.relu(self.first(x)))
        return self.last(torch.relu(x).view(len(x), -1))


def with_model(tasks: list[LocalTask], model: nn.Module) -> list[LocalTask]:
    """Return tasks of another model, with parameters and anchors drawn anew."""
    generator = torch.Generator().manual_seed(1)
    changed = []
    for task in tasks:
        given = {
            name: parameters(model, generator)
            for name in ("start", "neighbours", "constant", "anchor")
            if getattr(task, name) is not None
        }
        changed.append(replace(task, model=model, **given))
    return changed


@pytest.mark.parametrize("rule", ["plain", "all"])
@pytest.mark.parametrize("name", ["cnn", "viewed"])
def test_clients_are_trained_as_by_the_formulas(name, rule, on_cpu):
    tasks = three_clients("cnn", RULES[rule], (3, 16, 16), constant=True, anchor=True)
    if name == "viewed":
        tasks = with_model(tasks, Viewed())
    once, again = by_way("vmapped", tasks), by_way("vmapped", tasks)
    for task, (w, loss), (same, same_loss) in zip(tasks, once, again, strict=True):
        assert loss == same_loss
        assert all(torch.equal(value, same[key]) for key, value in w.items())
        assert_equals_reference(task, w, loss)
