"""Which arrays of a model travel, and how two sides tell whether they have the others alike."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedapp.training.autograd import train_single
from fedapp.training.batches import Batches
from fedapp.training.losses import CROSS_ENTROPY
from fedapp.training.rule import LocalRule
from fedapp.training.state import completed, names_of
from fedapp.training.task import LocalTask
from fedapp.training.travelling import (
    OtherArraysError,
    digest_of,
    frozen_bytes,
    travelling,
    with_frozen,
)


class Net(nn.Module):
    """A frozen and a trained layer, and what a subclass adds."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(3, 4).requires_grad_(False)
        self.head = nn.Linear(4, 2)
        self.add()

    def add(self) -> None: ...

    def change(self) -> None: ...

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.change()
        found: Tensor = self.head(self.body(x))
        return found


class Masked(Net):
    def add(self) -> None:
        self.register_buffer("mask", torch.full((4, 4), -torch.inf).triu(1))
        self.register_buffer("unknown", torch.tensor([torch.nan, 1.0]))


class Counting(Net):
    count: Tensor

    def add(self) -> None:
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def change(self) -> None:
        self.count += 1


class Assigning(Counting):
    def change(self) -> None:
        self.count = self.count + 1


class Teaching(Net):
    """A teacher that is a moving average of frozen parameters' copy, as self-supervised learning has it."""

    def add(self) -> None:
        self.teacher = nn.Linear(4, 2).requires_grad_(False)

    def change(self) -> None:
        with torch.no_grad():
            for own, other in zip(self.teacher.parameters(), self.head.parameters(), strict=True):
                own.data.mul_(0.9).add_(other.detach(), alpha=0.1)


class Normalising(Net):
    def add(self) -> None:
        self.norm = nn.BatchNorm1d(3)

    def change(self) -> None:
        self.norm(torch.ones(2, 3))


class Evaluating(Normalising):
    """Its statistics stay, and travel none the less, as their names are PyTorch's."""

    def train(self, mode: bool = True) -> "Evaluating":
        super().train(mode)
        self.norm.eval()
        return self


class Late(Net):
    """Its buffer changes from the third step on."""

    kept: Tensor
    steps: Tensor

    def add(self) -> None:
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer(self.name, torch.zeros(()))

    name = "kept"

    def change(self) -> None:
        self.steps += 1
        if self.steps > 2:
            getattr(self, self.name).add_(1)


class LateByName(Late):
    name = "running_kept"


HEAD = {"head.weight", "head.bias"}
STATISTICS = {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}


def rows() -> tuple[Tensor, Tensor]:
    x = torch.from_numpy(np.random.default_rng(0).normal(size=(6, 3)).astype(np.float32))
    return x, torch.arange(6) % 2


def found(model: nn.Module) -> tuple[str, ...]:
    return travelling(model, CROSS_ENTROPY, *rows())


@pytest.mark.parametrize(
    ("make", "beside"),
    [
        (Net, set()),
        (Masked, set()),
        (Counting, {"count"}),
        (Assigning, {"count"}),
        (Teaching, {"teacher.weight", "teacher.bias"}),
        (Normalising, {*STATISTICS, "norm.weight", "norm.bias"}),
        (Evaluating, {*STATISTICS, "norm.weight", "norm.bias"}),
        (Late, {"steps"}),
        (LateByName, {"steps", "running_kept"}),
    ],
)
def test_what_is_trained_and_what_changes_travels(make, beside):
    model = make()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    names = found(model)
    assert set(names) == HEAD | beside
    assert names == tuple(name for name in model.state_dict() if name in names)  # in this order
    assert all(value.equal(before[name]) or "unknown" in name for name, value in model.state_dict().items())
    assert torch.get_rng_state().equal(state)


def task_of(model: nn.Module, names: tuple[str, ...], steps: int) -> LocalTask:
    state, x = {name: value.clone() for name, value in model.state_dict().items()}, rows()
    trained = names_of(model).trained
    return LocalTask(
        model,
        {name: state[name] for name in trained},
        *x,
        0,
        Batches(np.tile(np.arange(6), (steps, 1)), np.full(steps, 6), 6),
        0.1,
        LocalRule(),
        fixed={name: state[name] for name in names if name not in trained},
    )


@pytest.mark.parametrize("make", [Net, Masked, Counting, Teaching, Normalising])
def test_a_task_returns_what_travels_and_gets_it_as_from_the_whole_state(make):
    model = make()
    names = found(model)
    own, whole = (train_single(task_of(model, each, 3))[0] for each in (names, tuple(model.state_dict())))
    assert own.keys() == set(names)
    assert all(own[name].equal(whole[name]) for name in names)


def test_what_changes_later_than_it_was_tried_is_an_error_that_names_it():
    model = Late()
    names = found(model)
    train_single(task_of(model, names, 2))
    for _ in range(2):  # and again: the copy that trains isn't kept
        with pytest.raises(
            RuntimeError, match=r"^kept has changed in local training, but not in the two steps"
        ):
            train_single(task_of(model, names, 3))
    train_single(task_of(model, names, 2))


# How two sides know ------------------------------------------------------------------------------------------------


def test_the_digest_is_of_names_types_shapes_and_bits():
    def digest(change: Callable[[nn.Module], object] = lambda _: None, sent: set[str] = HEAD) -> str:
        torch.manual_seed(0)
        model = Masked()
        change(model)
        return digest_of(model, sent)

    def nudged(model: nn.Module) -> None:
        weight = model.state_dict()["body.weight"]
        weight[0, 0] = torch.nextafter(weight[0, 0], torch.tensor(torch.inf))

    assert digest() == digest()
    others = [
        digest(nudged),
        digest(lambda model: model.body.double()),
        digest(lambda model: setattr(model, "mask", torch.zeros(2, 8))),
        digest(lambda model: model.register_buffer("another", torch.zeros(()))),
        digest(sent={"head.weight"}),
    ]
    assert len({digest(), *others}) == 6
    assert digest(lambda model: model.head.double()) == digest()  # which is sent
    assert digest(sent=set(Masked().state_dict())) == ""


def test_frozen_arrays_of_any_type_replace_a_models_own():
    class Mixed(Masked):
        def add(self) -> None:
            super().add()
            self.register_buffer("halves", torch.randn(3).bfloat16())
            self.register_buffer("flags", torch.rand(5) > 0.5)

    model, other = Mixed(), Mixed()
    made = with_frozen(other, HEAD, frozen_bytes(model, HEAD))
    assert digest_of(made, HEAD) == digest_of(model, HEAD) != digest_of(other, HEAD)
    assert made.head.weight.equal(other.head.weight)
    assert not made.body.weight.requires_grad


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            lambda model: setattr(model, "body", nn.Linear(3, 5)),
            r"body.weight is torch.float32 \(5, 3\) here, and",
        ),
        (
            lambda model: model.body.double(),
            r"torch.float64 \(4, 3\) here, and torch.float32 \(4, 3\) on the server",
        ),
        (
            lambda model: model.register_buffer("more", torch.zeros(1)),
            r"more is torch.float32 \(1,\) here, and none",
        ),
    ],
)
def test_arrays_of_another_model_are_refused(change, reason):
    other = Net()
    change(other)
    with pytest.raises(OtherArraysError, match=reason):
        with_frozen(other, HEAD, frozen_bytes(Net(), HEAD))
    with pytest.raises(OtherArraysError, match="can't be read"):
        with_frozen(other, HEAD, b"these are none")


def test_a_state_is_completed_by_the_models_own_arrays():
    model = Masked()
    sent = {"head.bias": torch.ones(2), "head.weight": torch.ones(2, 4)}
    whole = completed(model, sent)
    assert list(whole) == list(model.state_dict())
    assert whole["head.bias"].equal(sent["head.bias"])
    assert whole["mask"].equal(model.mask)


def test_a_copy_of_the_model_is_trained_anew_after_a_task_that_failed():
    model = Late()
    names = found(model)
    good = train_single(task_of(model, names, 2))[0]
    broken = replace(task_of(model, names, 3), y=torch.full((6,), 9))  # a class that the model doesn't have
    with pytest.raises((IndexError, RuntimeError)):
        train_single(broken)
    again = train_single(task_of(model, names, 2))[0]
    assert all(again[name].equal(good[name]) for name in names)
