"""Parts that don't fit, and some that do."""

import os
from typing import Any

import torch
from torch import Tensor, nn

from strategies import FedAvg

number = 7
made = nn.Linear(64, 10)


class _Noisy(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 0.1 * torch.randn_like(x) if self.training else x


def noisy(num_classes: int) -> nn.Module:
    """Draws from PyTorch's global stream."""
    return nn.Sequential(nn.Flatten(), _Noisy(), nn.Linear(64, num_classes))


def normalising(num_classes: int) -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, num_classes)
    )


def half_frozen(num_classes: int) -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 8).requires_grad_(False), nn.ReLU(), nn.Linear(8, num_classes)
    )


def other_on_ray(num_classes: int) -> nn.Module:
    """Has a frozen layer that Ray's workers build otherwise."""
    net = half_frozen(num_classes)
    if "RAY_RAYLET_PID" in os.environ:
        net[1].weight.data += os.getpid()
    return net


def no_module() -> str:
    return "net"


class NeedsDepth(nn.Module):
    def __init__(self, input_shape: tuple[int, ...], depth: int) -> None:
        super().__init__()


def fails() -> nn.Module:
    raise RuntimeError("out of luck")


def too_narrow() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(63, 10))


def no_parameters() -> nn.Module:
    return nn.Flatten()


def one_output() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 1))


def text(outputs: Tensor, targets: Tensor) -> str:
    return "good"


class Scaled(nn.Module):
    """With a parameter that is one number."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.linear = nn.Linear(64, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.scale * self.linear(x.flatten(1))
        return outputs


class Empty(nn.Module):
    """With a buffer of no values, before all else in its state."""

    where: Tensor

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.register_buffer("where", torch.empty(0))
        self.linear = nn.Linear(64, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.linear(x.flatten(1))
        return outputs


class Embedding(nn.Module):
    """Knows the categories 0 to 49 but 30, which raises an IndexError: the check of the largest can't see that."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.embedding, self.linear = nn.Embedding(50, 4), nn.Linear(4, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        category = x[:, 0].long()
        outputs: Tensor = self.linear(self.embedding(torch.where(category == 30, 57, category)))
        return outputs


class Tied(nn.Module):
    """One matrix under two names."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.first = nn.Linear(64, 64, bias=False)
        self.second = nn.Linear(64, 64, bias=False)
        self.second.weight = self.first.weight
        self.output = nn.Linear(64, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.output(self.second(torch.relu(self.first(x.flatten(1)))))
        return outputs


class NeedsGamma:
    """A loss that can't be made without an argument."""

    def __init__(self, gamma: float) -> None:
        self.gamma = gamma

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return outputs.sum(1)


class RaisesAtItsFirstRound(FedAvg):
    def configure_train(self, *_: object, **__: object) -> Any:
        raise ZeroDivisionError("my own")


class _Halving(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(0.5)


def halving(num_classes: int) -> nn.Module:
    return nn.Sequential(_Halving(), nn.Flatten(), nn.Linear(64, num_classes))


def merging(outputs: Tensor, targets: Tensor) -> Tensor:
    """Counts nines as eights."""
    targets[targets == 9] = 8
    return nn.functional.cross_entropy(outputs, targets, reduction="none")
