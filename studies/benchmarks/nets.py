"""Models of benchmarks that the app hasn't built in: ``model="studies.benchmarks.nets:simple_cnn"``."""

from torch import nn


def simple_cnn(input_shape: tuple[int, ...], num_outputs: int) -> nn.Sequential:
    """Make the CNN of pfl-research's CIFAR-10 benchmark, with its initial values: Glorot's for weights."""
    channels, height, width = input_shape
    model = nn.Sequential(
        nn.Conv2d(channels, 32, 3),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Dropout(0.25),
        nn.Flatten(),
        nn.Linear(64 * ((height - 4) // 2) * ((width - 4) // 2), 128),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(128, num_outputs),
    )
    for layer in model:
        if isinstance(layer, nn.Conv2d | nn.Linear):
            nn.init.xavier_uniform_(layer.weight)
    return model
