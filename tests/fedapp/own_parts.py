"""Parts that don't fit, and some that do."""

import torch
from torch import Tensor, nn

number = 7


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
