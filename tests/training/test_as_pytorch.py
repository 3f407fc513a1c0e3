"""Models as users write them are trained as PyTorch's own SGD trains them."""

import copy
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedapp.training.batches import Batches, plan_batches, task_rng
from fedapp.training.rule import LocalRule
from fedapp.training.state import names_of
from fedapp.training.task import LocalTask
from fedapp.training.trainer import train_one

CLASSES = 3


def task_of(
    model: nn.Module,
    shape: tuple[int, ...] = (6,),
    *,
    n: int = 11,
    epochs: int = 2,
    batches: Batches | None = None,
) -> LocalTask:
    model.eval()
    names, state = names_of(model), {name: v.detach().clone() for name, v in model.state_dict().items()}
    rng = torch.Generator().manual_seed(3)
    plan = batches or plan_batches(n, batch_size=4, epochs=epochs, steps=0, rng=task_rng(0, 0, 1))
    return LocalTask(
        model, {name: state[name] for name in names.trained}, torch.randn(n, *shape, generator=rng),
        torch.arange(n) % CLASSES, 0, plan, 0.1, LocalRule(), fixed={name: state[name] for name in names.fixed},
    )  # fmt: skip


def by_pytorch(task: LocalTask) -> dict[str, np.ndarray]:
    own = copy.deepcopy(task.model).train()
    optimizer = torch.optim.SGD([p for p in own.parameters() if p.requires_grad], lr=task.lr)
    for rows, _ in task.batches.ragged():
        optimizer.zero_grad()
        task.loss.mean(own(task.x[rows]), task.y[rows]).backward()
        optimizer.step()
    return {name: value.detach().numpy() for name, value in own.state_dict().items()}


def assert_as_pytorch(task: LocalTask) -> None:
    trained, _ = train_one(task)
    for name, expected in by_pytorch(task).items():
        if name in trained:  # tied weights are there once
            np.testing.assert_allclose(trained[name], expected, rtol=1e-4, atol=1e-5, err_msg=name)


class Scaled(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = super().forward(x / 3)
        return outputs


def ends_in_a_relu_that_is_there_twice() -> nn.Module:
    act = nn.ReLU()
    return nn.Sequential(nn.Flatten(), nn.Linear(6, 8), act, nn.Linear(8, CLASSES), act)


def tied_dense() -> nn.Module:
    layers = [nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, CLASSES)]
    layers[2].weight = layers[0].weight
    return nn.Sequential(nn.Flatten(), *layers)


def with_a_forward_of_a_layers_own() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 300), nn.Linear(300, 300), nn.Linear(300, CLASSES))
    model[1].forward = lambda x: x + 1.0  # type: ignore[method-assign]
    model[1].requires_grad_(False)
    return model


@pytest.mark.parametrize(
    "make",
    [
        lambda: Scaled(nn.Flatten(), nn.Linear(6, CLASSES)),
        ends_in_a_relu_that_is_there_twice,
        tied_dense,
        with_a_forward_of_a_layers_own,
    ],
    ids=["own forward", "one relu twice", "tied", "a layer's own forward"],
)
def test_what_only_looks_dense(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    assert_as_pytorch(task_of(make()))


class FrozenNorm(nn.Module):
    """Fine-tunes with batch normalisation as it is, as one does with few examples."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.output = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, CLASSES)

    def train(self, mode: bool = True) -> "FrozenNorm":
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.output(torch.relu(self.norm(self.first(x))))
        return outputs


def test_batch_normalisation_that_is_switched_off_stays_so() -> None:
    torch.manual_seed(0)
    task = task_of(FrozenNorm())
    assert_as_pytorch(task)
    assert int(train_one(task)[0]["norm.num_batches_tracked"]) == 0


def test_batch_normalisation_goes_on_after_a_single_row() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, CLASSES))
    task = task_of(model, n=9, epochs=2)  # the third batch of each epoch has one row
    assert sorted(task.batches.sizes.tolist()) == [1, 1, 4, 4, 4, 4]
    assert int(train_one(task)[0]["1.num_batches_tracked"]) == 4
