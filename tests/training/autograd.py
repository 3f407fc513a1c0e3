"""Local training by autograd, one client after the other: what the faster ways are compared with."""

import torch

from fedapp.training.autograd import cross_entropy, train
from fedapp.training.task import LocalTask
from fedapp.training.vectors import Parameters


def by_autograd(task: LocalTask, dtype: torch.dtype) -> tuple[Parameters, float]:
    """Train one client by autograd."""
    rows = slice(task.offset, task.offset + task.batches.num_examples)

    def cast(values: Parameters | None) -> Parameters | None:
        return None if values is None else {name: value.to(dtype) for name, value in values.items()}

    w, loss = train(
        cross_entropy(task.model),
        cast(task.start),
        task.x[rows].to(dtype),
        task.y[rows],
        task.batches.ragged(),
        task.lr,
        task.rule,
        neighbours=cast(task.neighbours),
    )
    return w, float(loss)
