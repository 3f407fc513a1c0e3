"""The job of a contender and its log: two JSON files between its process and the harness."""

import json
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedapp.data.arrays import channels_first
from fedapp.models import build_model
from strategies import streams


@dataclass(frozen=True)
class Job:
    """One run of one contender.

    Attributes
    ----------
    data : str
        An .npz file with x_train, y_train, x_test, y_test; bytes are scaled by 1/255, floats stay as they are.
    model : str
        One of ``fedapp.models.MODELS``, or ``module:name``; all contenders start from the same parameters.
    num_clients, participants : int
        Clients, and how many of them train in a round.
    batch_size : int
    lr : float
        Learning rate of the clients, who train for one epoch.
    rounds : int
        Aggregations; of an asynchronous run that is arrivals.
    evaluate_every : int
        Aggregations between two evaluations on the test rows; the last model is always evaluated.
    seed : int
    server_lr : float
        0: rounds. Else asynchronous FedAvg with time-based weights and this learning rate of the server.
    threads : int
        Threads of hand-written loops and of peers.
    """

    data: str
    model: str
    num_clients: int
    participants: int
    batch_size: int
    lr: float
    rounds: int
    evaluate_every: int
    seed: int = 0
    server_lr: float = 0.0
    threads: int = 1

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read what ``write`` wrote."""
        return cls(**json.loads(path.read_text("utf-8")))

    def write(self, path: Path) -> None:
        """Write as JSON."""
        path.write_text(json.dumps(asdict(self)), "utf-8")

    def stream_of_batches(self) -> np.random.Generator:
        """Return the random stream from which hand-written loops draw batches."""
        return streams.generator(self.seed, "bare-batches")

    def stream_of_participants(self) -> np.random.Generator:
        """Return the random stream from which hand-written loops draw participants."""
        return streams.generator(self.seed, "bare-participants")

    def initial_model(self, x: Tensor) -> nn.Module:
        """Return the model that all contenders start from, for inputs of the shape of x (N, C, H, W)."""
        shape = tuple(x.shape[1:])
        return build_model(self.model, kind="image", input_shape=shape, num_classes=10, seed=self.seed)

    def evaluates(self, aggregation: int) -> bool:
        """Return True if the model after ``aggregation`` aggregations is evaluated."""
        return aggregation == self.rounds or aggregation > 0 == aggregation % self.evaluate_every


@dataclass
class Log:
    """The log of a run: ``time.time()`` at the initial model and after each aggregation, and accuracies."""

    marks: list[float] = field(default_factory=list)
    accuracy: dict[int, float] = field(default_factory=dict)

    def mark(self) -> None:
        """Note that an aggregation is complete."""
        self.marks.append(time.time())

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read what ``write`` wrote."""
        content = json.loads(path.read_text("utf-8"))
        return cls(content["marks"], {int(key): value for key, value in content["accuracy"].items()})

    def write(self, path: Path) -> None:
        """Write as JSON."""
        path.write_text(json.dumps(asdict(self)), "utf-8")


def load_rows(path: str, part: str) -> tuple[Tensor, Tensor]:
    """Return inputs, images (N, C, H, W) or tokens (N, T), float32, and labels of ``train`` or ``test``."""
    with np.load(path) as arrays:
        x, y = arrays[f"x_{part}"], arrays[f"y_{part}"]
    inputs = torch.from_numpy((channels_first(x) if x.ndim > 2 else x).astype(np.float32, order="C"))
    return inputs.div_(255) if x.dtype == np.uint8 else inputs, torch.from_numpy(y.astype(np.int64))


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean loss of labels (B,), or of tokens (B, T), with the classes in the last axis of the logits."""
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten())


def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """Share of the labels, or tokens, whose logit is the largest."""
    with torch.no_grad():
        hits = [(model(a).argmax(-1) == b).sum() for a, b in zip(x.split(1000), y.split(1000), strict=True)]
    return float(sum(hits)) / y.numel()
