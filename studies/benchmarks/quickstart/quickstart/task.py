"""Model, data and training, as in Flower's quickstart; the data are tensors from one .npz file."""

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

_train: TensorDataset | None = None  # loaded once in each of Ray's processes


def make_model(name: str) -> nn.Module:
    """Return a new model for 28x28 grey images: ``logistic`` or ``mlp``."""
    if name == "logistic":
        return nn.Sequential(nn.Flatten(), nn.Linear(784, 10))
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))


def load_rows(path: str, part: str) -> TensorDataset:
    """Return images (N, 1, 28, 28) in [0, 1] and labels of ``train`` or ``test``."""
    with np.load(path) as arrays:
        x, y = arrays[f"x_{part}"], arrays[f"y_{part}"]
    images = torch.from_numpy(x.reshape(-1, 1, 28, 28)).float().div_(255)
    return TensorDataset(images, torch.from_numpy(y.astype(np.int64)))


def load_data(path: str, partition_id: int, num_partitions: int, batch_size: int) -> DataLoader:
    """Return a client's part of the training rows."""
    global _train
    if _train is None:
        _train = load_rows(path, "train")
    first, last = (len(_train) * number // num_partitions for number in (partition_id, partition_id + 1))
    return DataLoader(Subset(_train, range(first, last)), batch_size=batch_size, shuffle=True)


def train(model: nn.Module, loader: DataLoader, lr: float) -> float:
    """Train for one epoch; return the mean loss of the batches."""
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    model.train()
    running_loss = 0.0
    for images, labels in loader:
        optimizer.zero_grad()
        loss = criterion(model(images), labels)
        loss.backward()
        optimizer.step()
        running_loss += loss.item()
    return running_loss / len(loader)


def accuracy(model: nn.Module, path: str) -> float:
    """Return the share of test rows whose largest output is the label's."""
    images, labels = load_rows(path, "test").tensors
    model.eval()
    with torch.no_grad():
        return float((model(images).argmax(1) == labels).float().mean())
