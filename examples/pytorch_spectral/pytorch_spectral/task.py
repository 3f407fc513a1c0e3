"""The model, the data and the training: nothing of it knows Flower."""

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    """A small network for images of 8 × 8, with running statistics as many have."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the scores of the ten digits."""
        return self.layers(x)


def load_data(partition_id: int, num_partitions: int) -> tuple[TensorDataset, TensorDataset]:
    """Return one client's digits, of which a fifth are for testing; odd clients' pictures are turned by 90°."""
    x, y = load_digits(return_X_y=True)
    if partition_id % 2:
        x = np.rot90(x.reshape(-1, 8, 8), axes=(1, 2)).reshape(len(x), -1)
    own = np.arange(partition_id, len(y), num_partitions)
    data = torch.tensor(x[own] / 16, dtype=torch.float32), torch.tensor(y[own])
    test = torch.arange(len(own)) % 5 == 0
    return TensorDataset(*(part[~test] for part in data)), TensorDataset(*(part[test] for part in data))


def train(net: Net, data: TensorDataset, epochs: int, lr: float, seed: int) -> float:
    """Train in place; return the mean loss of the last epoch."""
    batches = DataLoader(data, batch_size=32, shuffle=True, generator=torch.Generator().manual_seed(seed))
    optimizer, loss_of = torch.optim.SGD(net.parameters(), lr=lr), nn.CrossEntropyLoss()
    net.train()
    for _ in range(epochs):
        total = 0.0
        for x, y in batches:
            optimizer.zero_grad()
            loss = loss_of(net(x), y)
            loss.backward()
            optimizer.step()
            total += loss.item()
    return total / len(batches)


def test(net: Net, data: TensorDataset) -> tuple[float, float]:
    """Return loss and accuracy."""
    x, y = data.tensors
    net.eval()
    with torch.no_grad():
        scores = net(x)
    return nn.functional.cross_entropy(scores, y).item(), (scores.argmax(1) == y).float().mean().item()
