"""Optimizers of local steps: PyTorch's own are the reference, and all ways of training agree."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from fedapp.own import OwnPartError
from fedapp.training.optimizer import LocalAdam, optimizer_of
from fedapp.training.rule import LocalRule, Tensors
from tests.training.cases import by_way, three_clients

OPTIMIZERS = {
    "adam": ("", torch.optim.Adam, {}),
    "adamw": ("weight_decay=0.1", torch.optim.AdamW, {"weight_decay": 0.1}),
    "adam ": (
        "betas=[0.5,0.9] eps=1e-3 weight_decay=0.2",
        torch.optim.Adam,
        {"betas": (0.5, 0.9), "eps": 1e-3, "weight_decay": 0.2},
    ),
    "rmsprop": ("alpha=0.9", torch.optim.RMSprop, {"alpha": 0.9}),
    "adagrad": ("", torch.optim.Adagrad, {}),
    "torch.optim:NAdam": ("", torch.optim.NAdam, {}),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_local_training_is_pytorchs_own_loop(name):
    options, kind, keywords = OPTIMIZERS[name]
    task = three_clients("mlp", LocalRule(l2=0.3))[0]
    task = replace(task, optimizer=optimizer_of(name.strip(), options), lr=0.05)
    ((trained, _),) = by_way("single", [task])
    model = nn.Sequential(
        *(
            type(layer)(layer.in_features, layer.out_features)
            if isinstance(layer, nn.Linear)
            else type(layer)()
            for layer in task.model
        )
    )
    model.load_state_dict(task.start)
    arguments: dict[str, Any] = {"lr": 0.05, **keywords}
    optimizer = kind(model.parameters(), **arguments)
    x, y = task.x[task.rows], task.y[task.rows]
    for rows, _ in task.batches.ragged():
        optimizer.zero_grad()
        squares = sum(value.square().sum() for value in model.parameters())
        (nn.functional.cross_entropy(model(x[rows]), y[rows]) + 0.15 * squares).backward()
        optimizer.step()
    for parameter, value in model.named_parameters():
        torch.testing.assert_close(trained[parameter], value.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["adam", "adamw"])
@pytest.mark.parametrize("rule", [LocalRule(), LocalRule(alpha=0.7, beta=0.4, l2=0.3, clip_norm=0.3)])
def test_every_way_agrees(name, rule):
    tasks = [replace(task, optimizer=optimizer_of(name)) for task in three_clients("mlp", rule)]
    single = by_way("single", tasks)
    for way in ("stacked", "vmapped"):
        for (w, _), (v, _) in zip(by_way(way, tasks), single, strict=True):  # type: ignore[arg-type]
            for parameter, value in v.items():
                torch.testing.assert_close(w[parameter], value, rtol=1e-3, atol=1e-4)


def test_the_first_step_of_adam_is_the_step_size():
    # m̂ = g and v̂ = g²: w − γ g / (|g| + ε), whatever the gradient's size
    w = Tensors({"w": torch.tensor([1.0, 1.0, 1.0])})
    LocalAdam()(w, Tensors({"w": torch.tensor([100.0, -0.01, 0.0])}), 0.1)
    assert w.named["w"].tolist() == pytest.approx([0.9, 1.1, 1.0], abs=1e-6)


class HandsOn(torch.optim.SGD):
    """Takes any options, for another class."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)


def test_a_class_that_takes_any_option_is_given_it():
    name = f"{__name__}:HandsOn"
    assert optimizer_of(name, "nesterov=true momentum=0.5").options == (("nesterov", True), ("momentum", 0.5))
    with pytest.raises(OwnPartError, match=r"can't take a step with them \(.*'nestorov'"):
        optimizer_of(name, "nestorov=true")
    with pytest.raises(OwnPartError, match="has no 'lr'; allowed are all others"):
        optimizer_of(name, "lr=0.5")


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        (
            "adma",
            "",
            "optimizer = 'adma': must be one of sgd, adam, adamw, the name of a class of torch.optim",
        ),
        ("optimizer", "", "optimizer = 'optimizer': must be one of"),
        ("math:pi", "", "optimizer = 'math:pi': must be one of"),
        ("sgd", "nesterov=true", "optimizer-options = 'nesterov=true': sgd has none"),
        (
            "adam",
            "momentum=0.9",
            "optimizer-options = 'momentum=0.9': adam has no 'momentum'; allowed are betas",
        ),
        ("rmsprop", "lr=0.9", "optimizer-options = 'lr=0.9': rmsprop has no 'lr'; allowed are alpha"),
        ("adam", "eps", "optimizer-options = 'eps': must be KEY=VALUE"),
        ("adam", "eps=1 eps=2", "optimizer-options = 'eps=1 eps=2': must be KEY=VALUE …, each key once"),
        (
            "adam",
            "betas=[2,0.9]",
            "optimizer = 'adam', optimizer-options = 'betas=[2,0.9]': can't take a step",
        ),
        (
            "adamw",
            "weight_decay=-1",
            "optimizer = 'adamw', optimizer-options = 'weight_decay=-1': can't take",
        ),
        ("lbfgs", "", "optimizer = 'lbfgs', optimizer-options = '': can't take a step with them"),
    ],
)
def test_what_cant_be_is_refused(name, options, said):
    with pytest.raises(OwnPartError) as error:
        optimizer_of(name, options)
    assert str(error.value).startswith(said)


class Choosy(torch.optim.Optimizer):
    """Passes over what takes no gradient, and doesn't say ``no_grad``."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.requires_grad:
                    p.add_(p.grad, alpha=-group["lr"])


class Assigns(Choosy):
    """Has weights decay in place, and puts new tensors in the place of the parameters'."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.data.mul_(1 - group["lr"])
                p.data = p.data - group["lr"] * p.grad


class Idle(Choosy):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        pass


def test_an_optimizer_sees_parameters_that_take_a_gradient():
    move = optimizer_of(f"{__name__}:Choosy").begin()
    assert move is not None
    w = Tensors({"w": torch.ones(3)})
    for _ in range(2):
        move(w, Tensors({"w": torch.ones(3)}), 0.25)
    assert torch.equal(w.named["w"], torch.full((3,), 0.5))
    assert not w.named["w"].requires_grad


def test_an_optimizer_may_assign_parameters_their_values():
    move = optimizer_of(f"{__name__}:Assigns").begin()
    assert move is not None
    w = Tensors({"w": torch.ones(3)})
    for expected in (0.25, -0.125):  # w / 2 − 1/4
        move(w, Tensors({"w": torch.full((3,), 0.5)}), 0.5)
        assert torch.equal(w.named["w"], torch.full((3,), expected))


def test_an_optimizer_that_moves_nothing_is_refused():
    with pytest.raises(
        OwnPartError, match=r"Idle', .*: can't take a step with them \(they leave a model as it is"
    ):
        optimizer_of(f"{__name__}:Idle")
