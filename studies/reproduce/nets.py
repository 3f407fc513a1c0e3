"""Models of published benchmarks that the app hasn't built in: ``model="studies.reproduce.nets:lenet"``."""

from torch import nn


def lenet(input_shape: tuple[int, ...], num_outputs: int) -> nn.Sequential:
    """Make the CNN of NIID-Bench (Li et al. 2022, section V): 6 and 16 channels of 5x5, then 120 and 84 units."""
    channels, height, width = input_shape
    sides = [((side - 4) // 2 - 4) // 2 for side in (height, width)]
    return nn.Sequential(
        nn.Conv2d(channels, 6, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * sides[0] * sides[1], 120),
        nn.ReLU(),
        nn.Linear(120, 84),
        nn.ReLU(),
        nn.Linear(84, num_outputs),
    )


def flgo_cnn(input_shape: tuple[int, ...], num_outputs: int) -> nn.Sequential:
    """Make the CNN of FLGo's MNIST task (Wang et al. 2023): 32 and 64 channels of 5x5, then 512 units."""
    channels, height, width = input_shape
    return nn.Sequential(
        nn.Conv2d(channels, 32, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * (height // 4) * (width // 4), 512),
        nn.ReLU(),
        nn.Linear(512, num_outputs),
    )
