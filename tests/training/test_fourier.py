"""Convolutions by their transforms: PyTorch's, up to rounding, for every size and border, and nothing else."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from fedapp.models import build_model
from fedapp.training import fourier
from fedapp.training.autograd import train_single
from fedapp.training.fourier import convolution, has_fourier, is_faster
from fedapp.training.rule import LocalRule
from fedapp.training.trainee import Trainee
from tests.training.cases import RULES, assert_equals_reference, make_tasks, plan


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Every convolution that can be is done by its transform; tell of each."""
    done: list[Any] = []
    apply: Callable[..., Tensor] = fourier._Convolution.apply

    def noted(*arguments: Any) -> Tensor:
        done.append(arguments)
        return apply(*arguments)

    monkeypatch.setattr(fourier, "WORTH", 0.0)
    monkeypatch.setattr(fourier._Convolution, "apply", noted)
    return done


sizes = st.tuples(st.integers(1, 9), st.integers(1, 9))


@given(
    size=sizes,
    kernel=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    border=st.floats(0, 0.999),
    counts=st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3)),
    by_channel=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_outputs_and_gradients_are_those_of_the_direct_way(
    size: tuple[int, int],
    kernel: tuple[int, int],
    border: float,
    counts: tuple[int, int, int],
    by_channel: bool,
    seed: int,
) -> None:
    padding = (int(border * kernel[0]), int(border * kernel[1]))
    if min(n + 2 * p - k for n, k, p in zip(size, kernel, padding, strict=True)) < 0:
        return  # PyTorch has no such convolution
    generator = torch.Generator().manual_seed(seed)
    batch, channels, outputs = counts
    x, weight = (
        torch.randn(*shape, generator=generator)
        for shape in ((batch, channels, *size), (outputs, channels, *kernel))
    )
    if by_channel:
        x, weight = (each.contiguous(memory_format=torch.channels_last) for each in (x, weight))
    given = [x, weight, torch.randn(outputs, generator=generator)]
    leaves = [each.detach().requires_grad_() for each in given]
    exact = [each.double().requires_grad_() for each in given]
    found: Tensor = fourier._Convolution.apply(*leaves, padding)
    expected = F.conv2d(*exact, padding=padding)
    error = torch.randn(found.shape, generator=generator)
    pairs = [(found, expected)]
    pairs += zip(
        torch.autograd.grad(found, leaves, error),
        torch.autograd.grad(expected, exact, error.double()),
        strict=True,
    )
    for one, other in pairs:
        assert one.shape == other.shape
        # Relative to the terms, which may cancel.
        scale = max(float(other.detach().norm()), math.sqrt(other.numel()))
        assert float((one.double() - other).detach().norm()) <= 3e-6 * scale


@pytest.mark.parametrize("rule", ["plain", "all but clip", "all"])
def test_a_model_is_trained_as_by_the_formulas(rule: str, always: list[Any]) -> None:
    plans = [plan(n, batch=6, epochs=2, key=(0, n, 1)) for n in (3, 13)]
    for task in make_tasks("cnn", RULES[rule], plans, (0.05, 0.1), shape=(1, 8, 8)):
        always.clear()
        assert_equals_reference(task, *_trained(task))
        assert len(always) == 2 * len(task.batches)  # two convolutions


def _trained(task: Any) -> tuple[dict[str, Tensor], float]:
    w, loss = train_single(task)
    return w, float(loss)


def test_a_gradient_of_a_gradient_is_pytorchs(always: list[Any]) -> None:
    layer = nn.Conv2d(2, 3, 3, padding=1)
    x = torch.randn(2, 2, 6, 6)
    found = []
    for of in (lambda x: convolution(layer, x), layer):
        inputs = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(of(inputs).square().sum(), inputs, create_graph=True)
        found.append(torch.autograd.grad(slope.square().sum(), layer.weight)[0])
    assert len(always) == 1
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(2, 2, 3, stride=2),
        nn.Conv2d(2, 2, 3, dilation=2),
        nn.Conv2d(2, 2, 3, groups=2),
        nn.Conv2d(2, 2, 3, padding="same"),
        nn.Conv2d(2, 2, 3, padding=1, padding_mode="reflect"),
        nn.Conv2d(2, 2, 3, padding=3),
        nn.Conv2d(2, 2, 3, bias=False),
        nn.Conv1d(2, 2, 3),
        nn.ConvTranspose2d(2, 2, 3),
        nn.LazyConv2d(2, 3),
    ],
)
def test_other_layers_are_not_touched(layer: nn.Module) -> None:
    assert not has_fourier(layer)


def test_what_is_not_faster_or_not_safe_goes_the_direct_way(always: list[Any]) -> None:
    layer = nn.Conv2d(2, 3, 3, padding=1)
    x = torch.randn(4, 2, 6, 6)
    assert convolution(layer, x) is not None
    assert convolution(layer, x[0]) is None  # one image, without an axis of images
    assert convolution(layer.double(), x.double()) is None
    layer.float()
    with torch.no_grad():
        assert layer.bias is not None
        layer.bias[1] = 0.0
    assert convolution(layer, x) is None
    assert len(always) == 1


def test_a_bias_of_zero_keeps_black_pixels_from_moving_it(always: list[Any]) -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(128, 3))
    with torch.no_grad():
        model[0].bias.zero_()
    trainee = Trainee(model)
    with trainee.alone():
        outputs = trainee.module[:2](torch.zeros(4, 1, 8, 8))
    (g,) = torch.autograd.grad(outputs.sum(), trainee.module[0].bias)
    assert torch.equal(g, torch.zeros(2))
    assert not always


def test_only_a_client_that_is_trained_alone_goes_this_way(always: list[Any]) -> None:
    trainee = Trainee(nn.Sequential(nn.Conv2d(2, 3, 3)))
    x = torch.randn(4, 2, 6, 6)
    expected = trainee.module(x)
    assert not always
    with trainee.alone():
        torch.testing.assert_close(trainee.module(x), expected, rtol=1e-4, atol=1e-5)
    assert len(always) == 1


def test_which_way_the_built_in_model_goes() -> None:
    convolutions = [
        layer
        for layer in build_model("cnn", kind="image", input_shape=(1, 28, 28), num_classes=62)
        if has_fourier(layer)
    ]
    shapes = [tuple(layer.weight.shape) for layer in convolutions]
    assert shapes == [(32, 1, 5, 5), (64, 32, 5, 5)]
    first, second = (
        [is_faster((batch, weight[1], size, size), weight, (2, 2)) for batch in (1, 10, 64, 256)]
        for weight, size in zip(shapes, (28, 14), strict=True)
    )
    assert first == [False] * 4
    assert second == [False, False, True, True]
    assert not is_faster((64, 64, 16, 16), (64, 64, 3, 3), (1, 1))


def test_the_same_bits_every_time(always: list[Any]) -> None:
    (task,) = make_tasks("cnn", LocalRule(), [plan(20, batch=6, epochs=1)], (0.1,), shape=(1, 8, 8))
    (one, loss), (other, again) = _trained(task), _trained(task)
    assert loss == again
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert always
