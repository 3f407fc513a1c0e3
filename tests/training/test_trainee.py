"""Modules with a state and random numbers of their own: dropout, batch normalisation, tied and frozen weights."""

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedapp.training.batches import Batches
from fedapp.training.evaluation import evaluate
from fedapp.training.losses import Loss
from fedapp.training.rule import LocalRule
from fedapp.training.state import names_of
from fedapp.training.task import LocalTask
from fedapp.training.trainee import Dropout, Trainee
from fedapp.training.trainer import Trainer, can, train_one
from tests.training.cases import reference


class Noisy(nn.Module):
    """Draws from PyTorch's global stream."""

    def __init__(self) -> None:
        super().__init__()
        self.output = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            x = x + torch.randn_like(x)
        outputs: torch.Tensor = self.output(x)
        return outputs


class Tied(nn.Module):
    """Uses one matrix twice, under two names; another is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6, bias=False)
        self.second = nn.Linear(6, 6, bias=False)
        self.second.weight = self.first.weight
        self.frozen = nn.Linear(6, 3).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.frozen(torch.relu(self.second(torch.relu(self.first(x)))))
        return outputs


def with_dropout() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3))


def with_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def task_of(model: nn.Module, client: int = 0, rows: int = 7, batch: int = 3, epochs: int = 2) -> LocalTask:
    generator = torch.Generator().manual_seed(client)
    x, y = torch.randn(rows, 6, generator=generator), torch.arange(rows) % 3
    names, state = names_of(model), {name: v.detach().clone() for name, v in model.state_dict().items()}
    steps = [np.arange(rows)[at : at + batch] for at in range(0, rows, batch)] * epochs
    indices = np.stack([np.pad(step, (0, batch - len(step))) for step in steps])
    plan = Batches(indices, np.array([len(step) for step in steps]), rows)
    return LocalTask(
        model,
        {name: state[name] for name in names.trained},
        x,
        y,
        0,
        plan,
        0.1,
        LocalRule(),
        fixed={name: state[name] for name in names.fixed},
        ids=(7, client, 1),
    )


def same(one: Any, other: Any) -> bool:
    (w, loss), (v, other_loss) = one, other
    return loss == other_loss and all(np.array_equal(w[name], v[name]) for name in w)


@pytest.mark.parametrize("make", [with_dropout, Noisy, with_norm, Tied])
def test_a_tasks_result_is_its_own_on_any_number_of_threads(make):
    model = make().eval()
    tasks = [task_of(model, client) for client in range(24)]
    torch.manual_seed(1)
    expected = [train_one(task) for task in tasks]
    for workers in (1, 4):
        torch.manual_seed(2)
        trainer = Trainer(workers=workers)
        found = trainer.train(tasks)
        trainer.close()
        assert all(same(one, other) for one, other in zip(found, expected, strict=True))
    assert not same(expected[0], train_one(replace(tasks[0], ids=(8, 0, 1)))) or make in (with_norm, Tied)


def test_the_models_own_state_and_the_global_stream_stay_as_they_were():
    for make in (with_dropout, Noisy, with_norm, Tied):
        model = make().eval()
        before, stream = copy.deepcopy(model.state_dict()), torch.get_rng_state()
        task = task_of(model)
        sent = {name: value.clone() for name, value in {**task.start, **task.fixed}.items()}
        train_one(task)
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        assert all(torch.equal(value, sent[name]) for name, value in {**task.start, **task.fixed}.items())
        assert torch.equal(torch.get_rng_state(), stream)
        assert not model.training


def test_dropout_drops_its_share_and_keeps_the_mean():
    trainee = Trainee(nn.Sequential(nn.Dropout(0.25), nn.Dropout2d(0.5)))
    trainee.begin(3)
    values, channels = trainee.module[0](torch.ones(200, 500)), trainee.module[1](torch.ones(500, 40, 2, 2))
    assert isinstance(trainee.module[0], Dropout)
    assert sorted(values.unique().tolist()) == pytest.approx([0, 4 / 3])
    assert float((values == 0).float().mean()) == pytest.approx(0.25, abs=0.01)
    assert float(values.mean()) == pytest.approx(1, abs=0.01)
    assert float((channels == 0).float().mean()) == pytest.approx(0.5, abs=0.02)
    assert torch.equal(channels.amax((2, 3)), channels.amin((2, 3)))  # all of a channel, or nothing
    trainee.module.eval()
    assert torch.equal(trainee.module(torch.ones(2, 3, 4, 4)), torch.ones(2, 3, 4, 4))


def test_running_statistics_are_pytorchs_and_come_back():
    model = with_norm().eval()
    task = task_of(model, rows=6, batch=3)
    trained, _ = train_one(task)
    own = copy.deepcopy(model).train()
    optimizer = torch.optim.SGD(own.parameters(), lr=0.1)
    for rows, _ in task.batches.ragged():
        optimizer.zero_grad()
        nn.functional.cross_entropy(own(task.x[rows]), task.y[rows]).backward()
        optimizer.step()
    for name, value in own.state_dict().items():
        np.testing.assert_allclose(trained[name], value.numpy(), rtol=1e-5, atol=1e-6)
    assert int(trained["1.num_batches_tracked"]) == 4


def test_one_row_is_normalised_by_the_running_statistics():
    model = with_norm().eval()
    with torch.no_grad():
        model[1].running_mean += 0.5
    trained, _ = train_one(task_of(model, rows=1, batch=1, epochs=1))
    # as a judged model would, and without a word of a single row's deviation in the statistics
    assert np.array_equal(trained["1.running_mean"], model[1].running_mean.numpy())
    assert not np.array_equal(trained["0.weight"], model[0].weight.detach().numpy())
    task = task_of(model, rows=1, batch=1, epochs=1)
    leaves = copy.deepcopy(model)
    nn.functional.cross_entropy(leaves(task.x), task.y).backward()
    expected = model[0].weight - 0.1 * leaves[0].weight.grad
    np.testing.assert_allclose(trained["0.weight"], expected.detach().numpy(), rtol=1e-5, atol=1e-7)


def test_frozen_weights_stay_and_tied_ones_are_one():
    model = Tied().eval()
    names = names_of(model)
    assert names.trained == ("first.weight",)
    assert names.fixed == ("frozen.weight", "frozen.bias")
    assert names.twins == {"second.weight": "first.weight"}
    trained, _ = train_one(task_of(model))
    assert np.array_equal(trained["frozen.weight"], model.frozen.weight.numpy())
    assert not np.array_equal(trained["first.weight"], model.first.weight.detach().numpy())
    # a state with both names is judged by the one
    state = dict(model.state_dict())
    assert evaluate(model, state, torch.randn(4, 6), torch.zeros(4, dtype=torch.int64)).loss > 0


class Centred(nn.Module):
    """Takes the mean over a batch from each of its rows."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.first(x))
        outputs: torch.Tensor = self.last(hidden - hidden.mean(0))
        return outputs


@pytest.mark.parametrize(
    ("make", "batched"),
    [(with_dropout, False), (with_norm, False), (Noisy, False), (Centred, False), (Tied, True)],
)
@pytest.mark.parametrize("lr", [0.1, 1e-4])
def test_what_vmap_would_change_is_trained_singly(make, batched, lr):
    assert can("vmapped", replace(task_of(make().eval()), lr=lr)) == batched


def test_a_loss_that_looks_across_the_batch_is_trained_singly():
    def apart(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        rows = nn.functional.normalize(outputs, dim=1)
        return nn.functional.cross_entropy(outputs, targets, reduction="none") + torch.logsumexp(
            rows @ rows.T, 1
        )

    task = replace(task_of(Tied().eval()), lr=1e-4)
    assert can("vmapped", task)
    assert not can("vmapped", replace(task, model=Tied().eval(), loss=Loss("apart", apart)))


# What a trainee's layers are --------------------------------------------------------------------------------------


class Parts(nn.Module):
    """Reads a chain's parts one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.chain = nn.Sequential(nn.ReLU(), nn.MaxPool2d(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.chain[0](x)
        return outputs


def test_pooling_before_a_relu_changes_no_bit():
    chain = nn.Sequential(nn.Sequential(nn.ReLU(), nn.MaxPool2d(2)), nn.ReLU(), nn.MaxPool2d(3, 1, padding=1))
    trainee = Trainee(chain)
    assert [type(layer) for layer in trainee.module.modules()] == [
        nn.Sequential,
        nn.Sequential,
        nn.MaxPool2d,
        nn.ReLU,
        nn.MaxPool2d,
        nn.ReLU,
    ]
    x = torch.randn(50, 3, 8, 8).round(decimals=1)  # ties, too
    x[0, 0, 0, 0] = float("nan")
    found = []
    for module in (chain, trainee.module):
        inputs = x.clone().requires_grad_()
        outputs = module(inputs)
        (g,) = torch.autograd.grad(
            (outputs * torch.arange(outputs.numel()).view(outputs.shape)).sum(), inputs
        )
        found.append((outputs.detach().numpy().tobytes(), g.numpy().tobytes()))
    assert found[0] == found[1]


def test_a_chain_within_a_users_module_stays():
    module = Parts()
    x = torch.randn(2, 3, 8, 8)
    assert torch.equal(Trainee(module).module(x), module(x))


class Viewed(nn.Module):
    """Takes images apart with ``view``, as Flower's quickstart does, which asks for one layout in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.output = nn.Conv2d(3, 4, 3, padding=1), nn.Linear(4 * 4 * 4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.max_pool2d(torch.relu(self.first(x)), 2)
        outputs: torch.Tensor = self.output(x.view(-1, 4 * 4 * 4))
        return outputs


def test_a_module_that_wants_its_images_in_one_piece_is_trained():
    torch.manual_seed(0)
    task = replace(
        task_of(Viewed()),
        x=torch.randn(7, 3, 8, 8),
        y=torch.tensor([0, 1, 2, 0, 1, 2, 0]),
    )
    trained, loss = train_one(task)
    expected, expected_loss = reference(task)
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    for name, value in expected.items():
        np.testing.assert_allclose(trained[name], value.numpy(), rtol=1e-4, atol=1e-5)
