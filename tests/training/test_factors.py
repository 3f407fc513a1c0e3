"""Gradients as products: whatever a module does with its dense layers, they are PyTorch's gradients."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedapp.training.autograd import batch_loss, factored_gradient, plain_gradient
from fedapp.training.losses import CROSS_ENTROPY
from fedapp.training.state import names_of
from fedapp.training.trainee import Trainee
from fedapp.training.vectors import Factored

WIDTH = 256  # of layers that are large enough


class Chain(nn.Module):
    """Two large layers and a small one; ``change`` says what else the forward pass does."""

    def __init__(self, change: Callable[["Chain", Tensor], Tensor] = lambda _, x: x, *, bias: bool = True):
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH, bias=bias), nn.Linear(WIDTH, WIDTH)
        self.output = nn.Linear(WIDTH, 3)
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.output(self.two(torch.relu(self.one(self.change(self, x)))).flatten(2).mean(1))
        return outputs


def tied() -> Chain:
    model = Chain()
    model.two.weight = model.one.weight
    return model


def frozen() -> Chain:
    model = Chain()
    model.two.requires_grad_(False)
    return model


def hooked() -> Chain:
    model = Chain()
    model.one.register_forward_hook(lambda _, __, outputs: 2 * outputs)
    return model


def with_slope(model: Chain, x: Tensor) -> Tensor:
    """The gradient by the inputs, of which the loss's gradient is then taken."""
    x = x.detach().requires_grad_()
    (slope,) = torch.autograd.grad(torch.tanh(model.one(x)).sum(), x, create_graph=True)
    return x.detach() + slope


def adapted(model: Chain, x: Tensor) -> Tensor:
    """A step on the weights within the forward pass."""
    (g,) = torch.autograd.grad(model.one(x).square().mean(), model.one.weight, create_graph=True)
    return F.linear(x, model.one.weight - g)


MODELS = {
    "plain": Chain,
    "no bias": partial(Chain, bias=False),
    "twice": partial(Chain, lambda model, x: model.one(x)),
    "read beside": partial(Chain, lambda model, x: x * model.one.weight.square().mean()),
    "a gradient within": partial(Chain, with_slope),
    "a step within": partial(Chain, adapted),
    "checkpointed": partial(
        Chain, lambda model, x: torch.utils.checkpoint.checkpoint(model.two, x, use_reentrant=False)
    ),
    "tied": tied,
    "frozen": frozen,
    "hooked": hooked,
}


@pytest.mark.parametrize("model", MODELS)
def test_the_gradient_is_pytorchs(model: str) -> None:
    torch.manual_seed(0)
    module = MODELS[model]()
    names = names_of(module)
    state = names.own({name: value.detach() for name, value in module.state_dict().items()})
    fixed = {name: state.pop(name) for name in names.fixed}
    x, y = torch.randn(5, 2, WIDTH), torch.tensor([0, 2, 1, 1, 0])
    trainee = Trainee(module)
    loss = batch_loss(trainee, CROSS_ENTROPY, fixed)
    expected, value = plain_gradient(loss, state, x, y, None)
    found, same = factored_gradient(trainee.factors, loss, state, x, y, None)
    assert isinstance(found, Factored)
    assert set(found.products) == {"one.weight", "two.weight"} & state.keys()
    assert torch.equal(value, same)
    worked_out = found.worked_out().named
    assert worked_out.keys() == state.keys()
    for name, g in expected.named.items():
        torch.testing.assert_close(worked_out[name], g, rtol=1e-4, atol=1e-6 * float(g.abs().max()))
        assert not worked_out[name].requires_grad


def test_a_gradient_leaves_nothing_for_the_next() -> None:
    module = Chain()
    state = {name: value.detach() for name, value in module.state_dict().items()}
    x, y = torch.randn(5, 2, WIDTH), torch.tensor([0, 2, 1, 1, 0])
    trainee = Trainee(module)
    loss = batch_loss(trainee, CROSS_ENTROPY, {})

    def fails(parameters: object, x: Tensor, y: Tensor, mask: Tensor | None) -> Tensor:
        raise IndexError(loss(parameters, x, y, mask))  # type: ignore[arg-type]

    first, _ = factored_gradient(trainee.factors, loss, state, x, y, None)
    with pytest.raises(IndexError):
        factored_gradient(trainee.factors, fails, state, x, y, None)
    again, _ = factored_gradient(trainee.factors, loss, state, x, y, None)
    for name, value in first.worked_out().named.items():  # type: ignore[attr-defined]
        assert torch.equal(value, again.worked_out().named[name])  # type: ignore[attr-defined]


def test_the_gradient_of_what_nothing_depends_on_is_zero() -> None:
    module = Chain(lambda model, x: x)
    state = {name: value.detach() for name, value in module.state_dict().items()}
    trainee = Trainee(module)

    def first_alone(parameters: dict[str, Tensor], x: Tensor, y: Tensor, mask: Tensor | None) -> Tensor:
        return torch.func.functional_call(trainee.module.one, {"weight": parameters["one.weight"]}, x).sum()  # type: ignore[no-any-return]

    found, _ = factored_gradient(
        trainee.factors, first_alone, state, torch.randn(5, 2, WIDTH), torch.zeros(5), None
    )
    gradient = found.worked_out().named  # type: ignore[attr-defined]
    assert gradient.keys() == state.keys()
    assert {name for name, value in gradient.items() if value.any()} == {"one.weight"}
