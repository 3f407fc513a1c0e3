"""Model, data and training, as in Flower's quickstart; the data are tensors from one .npz file."""

import numpy as np
import torch
from flwr.app import ArrayRecord
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


def initial(config: dict) -> ArrayRecord:
    """Return the first model."""
    return ArrayRecord(make_model(config["model"]).state_dict())


def train(arrays: ArrayRecord, config: dict, node: dict) -> tuple[ArrayRecord, float, int]:
    """Train for one epoch; return the model, the mean loss of the batches, and the number of rows."""
    model = make_model(config["model"])
    model.load_state_dict(arrays.to_torch_state_dict())
    loader = load_data(config["data"], node["partition-id"], node["num-partitions"], config["batch-size"])
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"])
    model.train()
    running_loss = 0.0
    for images, labels in loader:
        optimizer.zero_grad()
        loss = criterion(model(images), labels)
        loss.backward()
        optimizer.step()
        running_loss += loss.item()
    return ArrayRecord(model.state_dict()), running_loss / len(loader), len(loader.dataset)


def accuracy(arrays: ArrayRecord, config: dict) -> float:
    """Return the share of test rows whose largest output is the label's."""
    model = make_model(config["model"])
    model.load_state_dict(arrays.to_torch_state_dict())
    images, labels = load_rows(config["data"], "test").tensors
    model.eval()
    with torch.no_grad():
        return float((model(images).argmax(1) == labels).float().mean())
