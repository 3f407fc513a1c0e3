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
