"""Models as users write them are trained as PyTorch's own SGD trains them."""

import copy
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fedapp.training.augment import Augmentation, augmented
from fedapp.training.autograd import train_vmapped
from fedapp.training.batches import Batches, plan_batches, task_rng
from fedapp.training.optimizer import LocalOptimizer
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
        model,
        {name: state[name] for name in names.trained},
        torch.randn(n, *shape, generator=rng),
        torch.arange(n) % CLASSES,
        0,
        plan,
        0.1,
        LocalRule(),
        fixed={name: state[name] for name in names.fixed},
    )


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


def with_a_hooked_dropout() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.0), nn.Linear(8, CLASSES))
    model[1].register_forward_hook(lambda layer, inputs, outputs: 2 * outputs)
    return model


@pytest.mark.parametrize(
    "make",
    [
        lambda: Scaled(nn.Flatten(), nn.Linear(6, CLASSES)),
        ends_in_a_relu_that_is_there_twice,
        tied_dense,
        with_a_forward_of_a_layers_own,
        with_a_hooked_dropout,
    ],
    ids=["own forward", "one relu twice", "tied", "a layer's own forward", "hooked dropout"],
)
def test_what_only_looks_known(make):
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


def test_batch_normalisation_that_is_switched_off_stays_so():
    torch.manual_seed(0)
    task = task_of(FrozenNorm())
    assert_as_pytorch(task)
    assert int(train_one(task)[0]["norm.num_batches_tracked"]) == 0


def test_batch_normalisation_goes_on_after_a_single_row():
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, CLASSES))
    task = task_of(model, n=9, epochs=2)  # the third batch of each epoch has one row
    assert sorted(task.batches.sizes.tolist()) == [1, 1, 4, 4, 4, 4]
    assert int(train_one(task)[0]["1.num_batches_tracked"]) == 4


class Running(nn.Module):
    """Centres by a running mean that is assigned anew, not changed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.output = nn.Linear(6, CLASSES)
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean = 0.5 * self.mean + 0.5 * x.mean(0)
        outputs: Tensor = self.output(x - self.mean)
        return outputs


def test_a_buffer_that_is_assigned_comes_back():
    torch.manual_seed(0)
    task = task_of(Running())
    assert_as_pytorch(task)
    assert np.abs(train_one(task)[0]["mean"]).min() > 0


class Afterwards(nn.Module):
    """Divides by a deviation that it assigns only then, and notes a mean in place, with its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.output = nn.Linear(6, 6), nn.Linear(6, CLASSES)
        self.register_buffer("std", torch.ones(6))
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        outputs: Tensor = self.output(h / self.std)
        self.std = 0.9 * self.std + 0.1 * h.detach().std(0)
        self.mean.mul_(0.9).add_(0.1 * h.mean(0))
        return outputs


def test_a_buffer_may_be_assigned_after_its_use_and_note_a_gradient():
    torch.manual_seed(0)
    task = task_of(Afterwards(), n=12)
    assert_as_pytorch(task)
    state = train_one(task)[0]
    assert np.abs(state["std"] - 1).min() > 0
    assert np.abs(state["mean"]).min() > 0


class Resized(Running):
    def forward(self, x: Tensor) -> Tensor:
        self.mean = x.detach()
        outputs: Tensor = self.output(x)
        return outputs


def test_a_buffer_of_another_shape_is_named():
    with pytest.raises(
        RuntimeError, match=r"^the buffer mean \(6,\) is assigned \(4, 6\) in the forward pass"
    ):
        train_one(task_of(Resized()))


class Checkpointed(nn.Module):
    """Computes its hidden layers anew in the backward pass."""

    def __init__(self, width: int = 8, last: Callable[[], nn.Module] = nn.Tanh) -> None:
        super().__init__()
        self.anew = True
        self.hidden = nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, width), last())
        self.output = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        hidden = checkpoint(self.hidden, x, use_reentrant=False) if self.anew else self.hidden(x)
        outputs: Tensor = self.output(hidden)
        return outputs


def test_gradients_of_what_is_computed_anew():
    torch.manual_seed(0)
    task = task_of(Checkpointed(8), epochs=6)
    assert_as_pytorch(task)
    averaged = {name: value + 0.1 for name, value in task.start.items()}
    task = replace(task, rule=LocalRule(beta=0.6), neighbours=averaged)
    once = copy.deepcopy(task.model)
    once.anew = False  # type: ignore[assignment]
    (trained, _), (expected, _) = train_one(task), train_one(replace(task, model=once))
    for name, value in expected.items():
        np.testing.assert_allclose(trained[name], value, rtol=1e-4, atol=1e-5)


def test_statistics_of_what_is_computed_anew_are_pytorchs():
    torch.manual_seed(0)
    assert_as_pytorch(task_of(Checkpointed(8, lambda: nn.BatchNorm1d(8)), n=8))


def test_dropout_that_would_be_drawn_anew_is_refused():
    with pytest.raises(RuntimeError, match=r"^nn\.Dropout within torch\.utils\.checkpoint would drop other"):
        train_one(task_of(Checkpointed(8, nn.Dropout)))


class Skips(nn.Module):
    """Leaves a layer out at every other step."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.skipped = nn.Linear(6, width), nn.Linear(width, width)
        self.output = nn.Linear(width, CLASSES)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        self.count += 1
        if self.count % 2:
            x = x + torch.relu(self.skipped(x))
        outputs: Tensor = self.output(x)
        return outputs


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_a_layer_that_is_left_out_of_a_step(optimizer):
    torch.manual_seed(0)
    task = task_of(Skips(8))
    assert_as_pytorch(task)
    trained, loss = train_one(replace(task, optimizer=LocalOptimizer(optimizer)))
    assert np.isfinite(loss)
    assert trained.keys() == {*task.start, *task.fixed}


class Viewed(nn.Module):
    """Takes images apart with ``view``, which asks for one layout in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.output = nn.Conv2d(3, 4, 5), nn.Linear(4 * 4 * 4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = x.view(-1, 3, 64).view(-1, 3, 8, 8)
        outputs: Tensor = self.output(torch.relu(self.first(x)).view(-1, 64))
        return outputs


@pytest.mark.parametrize("name", ["flip", "crop", "flip+crop"])
def test_changed_images_are_in_one_piece(name):
    torch.manual_seed(0)
    task = task_of(Viewed(), (3, 8, 8))
    drawn = Augmentation.drawn(name, len(task.batches), task.batches.indices.shape[1], 0, 0, 1)
    assert drawn is not None
    trained, _ = train_one(replace(task, augmentation=drawn))
    together, _ = train_vmapped([replace(task, augmentation=drawn)])
    own = copy.deepcopy(task.model)
    optimizer = torch.optim.SGD(own.parameters(), lr=task.lr)
    for step, (rows, _) in enumerate(task.batches.ragged()):
        flips, shifts = (torch.from_numpy(each[step, : len(rows)]) for each in (drawn.flips, drawn.shifts))
        optimizer.zero_grad()
        images = augmented(task.x[rows], flips, shifts).contiguous()
        task.loss.mean(own(images), task.y[rows]).backward()
        optimizer.step()
    for key, value in own.state_dict().items():
        np.testing.assert_allclose(trained[key], value.numpy(), rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(together[key][0].numpy(), value.numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize("norm", [nn.utils.weight_norm, nn.utils.spectral_norm])
def test_a_large_layer_whose_weights_follow_from_others(norm):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 300), nn.Tanh(), norm(nn.Linear(300, 300)), nn.Linear(300, CLASSES))
    with torch.no_grad():
        model(torch.zeros(1, 6))  # whose weights aren't leaves can't be copied
    assert_as_pytorch(task_of(model))


class Warm(nn.Module):
    """Counts steps where no state dict sees them."""

    def __init__(self) -> None:
        super().__init__()
        self.output = nn.Linear(6, CLASSES)
        self.register_buffer("count", torch.zeros(()), persistent=False)
        self.register_buffer("former", None)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.count += 1
            self.former = x.detach().mean(0) if self.former is None else self.former
            x = x - self.former
        outputs: Tensor = self.output(x) * (self.count / 20).clamp(max=1)
        return outputs


def test_buffers_outside_the_state_dict_begin_anew_in_each_task():
    torch.manual_seed(0)
    task = task_of(Warm())
    assert_as_pytorch(task)
    assert_as_pytorch(task)


class Tokens(nn.Module):
    """The mean of the embeddings of an example's six signs."""

    def __init__(self, *, sparse: bool) -> None:
        super().__init__()
        self.embedding, self.output = nn.Embedding(4, 5, sparse=sparse), nn.Linear(5, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.output(self.embedding((x > 0).long()).mean(1))
        return outputs


@pytest.mark.parametrize(
    ("rule", "changes"),
    [
        (LocalRule(l2=0.1), {}),
        (LocalRule(alpha=0.5), {}),  # fedprox and ditto
        (LocalRule(clip_norm=0.1), {}),
        (LocalRule(momentum=0.9), {}),
        (LocalRule(), {"constant": {}}),  # scaffold and feddyn
        (LocalRule(), {"optimizer": LocalOptimizer("rmsprop")}),
        (LocalRule(), {"optimizer": LocalOptimizer("adam")}),
    ],
)
def test_sparse_gradients_of_an_embedding_train_as_dense_ones_do(rule, changes):
    found = []
    for sparse in (False, True):
        torch.manual_seed(0)
        task = replace(task_of(Tokens(sparse=sparse)), rule=rule, **changes)
        if "constant" in changes:
            task = replace(task, constant={name: torch.ones_like(w) for name, w in task.start.items()})
        found.append(train_one(task)[0])
        assert found[-1].keys() == dict(task.model.named_parameters()).keys()
    for name, value in found[0].items():
        np.testing.assert_allclose(found[1][name], value, rtol=1e-6, atol=1e-7)
