"""Local training in bfloat16: PyTorch's autocast bit for bit, with float32 weights; float32 is as it was."""

import copy
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedapp.own import OwnPartError
from fedapp.training import precision
from fedapp.training.check import check_parts
from fedapp.training.losses import CROSS_ENTROPY
from fedapp.training.trainer import Trainer, can, train_one, way_of
from tests.own_models import NextToken
from tests.training.test_as_pytorch import CLASSES, Checkpointed, Running, task_of


class Pixels(nn.Sequential):
    """Convolutions with statistics of their own, as batch normalisation has them."""

    def __init__(self) -> None:
        layers = [nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten()]
        super().__init__(*layers, nn.Linear(4 * 36, CLASSES))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.output = nn.LSTM(2, 8, batch_first=True), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.output(self.lstm(x)[0][:, -1])
        return outputs


class Summary(nn.Module):
    """A transformer's mean over its tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.net = NextToken((10,), CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.net(x.abs().long() % CLASSES).mean(1)
        return outputs


def dense() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, CLASSES))


KINDS: list[tuple[Callable[[], nn.Module], tuple[int, ...]]] = [
    (dense, (6,)),
    (Checkpointed, (6,)),
    (Running, (6,)),
    (Pixels, (1, 6, 6)),
    (Recurrent, (5, 2)),
    (Summary, (10,)),
]


def runs_in_pytorch(model: nn.Module, x: Tensor) -> bool:
    """Return False where autocast can't run a model: PyTorch has no LSTM in bfloat16 for a CPU without AVX-512."""
    with torch.autocast("cpu", torch.bfloat16):
        try:
            copy.deepcopy(model)(x)
        except RuntimeError as error:
            return "could not create a primitive" not in str(error)
    return True


@pytest.mark.parametrize(("make", "shape"), KINDS)
def test_it_is_plain_autocast_step_for_step(make: Callable[[], nn.Module], shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    task = replace(task_of(make(), shape, n=12), precision="bf16")
    x, own = task.x, copy.deepcopy(task.model).train()
    if x.dim() == 4:  # the order of a convolution's sums goes by the layout in memory
        x, own = (each.to(memory_format=torch.channels_last) for each in (x, own))
    if not runs_in_pytorch(own, x):
        with pytest.raises(OwnPartError, match=r"with precision = 'bf16'"):
            check_parts("own", own, CROSS_ENTROPY, (), x, task.y, precision="bf16")
        return
    optimizer = torch.optim.SGD(own.parameters(), lr=task.lr)
    losses = []
    for rows, _ in task.batches.ragged():
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            outputs = own(x[rows])
        loss = F.cross_entropy(outputs.float(), task.y[rows])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    trained, loss_of_steps = train_one(task)
    for name, value in own.state_dict().items():
        assert trained[name].dtype == value.detach().numpy().dtype
        np.testing.assert_array_equal(trained[name], value.detach().numpy(), err_msg=name)
    assert loss_of_steps == pytest.approx(float(np.mean(losses)), rel=1e-6)
    plain, _ = train_one(replace(task, precision="fp32"))
    moves = [(trained[name], plain[name], start.numpy()) for name, start in task.start.items()]
    far = np.sqrt(sum(float(np.square(found - other).sum()) for found, other, _ in moves))
    gone = np.sqrt(sum(float(np.square(other - start).sum()) for _, other, start in moves))
    assert 0 < far < 0.1 * gone


def test_a_client_has_the_same_bits_alone_and_among_others() -> None:
    torch.manual_seed(0)
    task = replace(task_of(dense()), precision="bf16")
    assert way_of(replace(task, precision="fp32")) in ("stacked", "dual")
    assert way_of(task) == "single"
    assert not any(can(way, task) for way in ("stacked", "dual", "vmapped"))
    trainer = Trainer("stacked", 1)
    found = trainer.train([task, replace(task, lr=0.2), task])
    trainer.close()
    alone = train_one(task)[0]
    for one in (found[0], found[2]):
        assert isinstance(one, tuple)
        assert all(np.array_equal(one[0][name], value) for name, value in alone.items())


class Watched(nn.Module):
    """Notes in which precision it is called, and whether in training."""

    seen: set[tuple[bool, bool]] = set()  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.output = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        Watched.seen.add((self.training, torch.is_autocast_enabled("cpu")))
        outputs: Tensor = self.output(x)
        return outputs


@pytest.mark.parametrize("chosen", ["fp32", "bf16"])
def test_float32_knows_nothing_of_it(chosen: precision.Precision) -> None:
    task = replace(task_of(Watched()), precision=chosen)
    Watched.seen.clear()
    train_one(task)
    assert (True, True) in Watched.seen if chosen == "bf16" else Watched.seen == {(True, False)}
    assert not torch.is_autocast_enabled("cpu")


def test_what_has_no_arithmetic_of_bfloat16_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(precision, "is_fast", lambda _: False)
    with caplog.at_level("WARNING", "flwr.fedapp"):
        precision.say_slow("fp32", torch.device("cpu"))
        assert not caplog.messages
        precision.say_slow("bf16", torch.device("cpu"))
    assert caplog.messages == [
        "precision = 'bf16': this processor has no arithmetic of bfloat16; PyTorch emulates it, which rounds alike "
        "and takes longer than fp32"
    ]
