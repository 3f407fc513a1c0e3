"""Whether a module can be trained under ``torch.func.vmap``, many clients at once: by trying it."""

import logging
import warnings
import weakref

import numpy as np
import torch
from torch import nn

from fedapp.training.autograd import train_single, train_vmapped
from fedapp.training.batches import Batches
from fedapp.training.rule import LocalRule
from fedapp.training.task import LocalTask

log = logging.getLogger("flwr.fedapp")

_tried: "weakref.WeakKeyDictionary[nn.Module, bool]" = weakref.WeakKeyDictionary()

# What batched sums may differ by, relative to the largest parameter.
CLOSE = 1e-3


def trains_under_vmap(task: LocalTask) -> bool:
    """Tell whether two clients, one of them padded, come out of vmap as they come out singly.

    A module doesn't where vmap has no rule for something in it (recurrent layers), where it draws random numbers, and
    where it mixes the rows of a batch, as batch normalisation does: padding would count. Tried once for a module, and
    said once where it doesn't.
    """
    if not task.optimizer.stacks:
        return False
    if task.model not in _tried:
        _tried[task.model] = _try(task)
        if not _tried[task.model]:
            log.info("the model is trained one client at a time: torch.func.vmap can't batch it over clients")
    return _tried[task.model]


def _try(task: LocalTask) -> bool:
    # Of attention on a CPU, which then goes from client to client.
    warnings.filterwarnings(
        "ignore", message="There is a performance drop because we have not yet implemented"
    )
    if any(isinstance(module, nn.RNNBase) for module in task.model.modules()):
        return False  # vmap has no rule for recurrent layers: it would loop over the clients
    x, y = (torch.cat([rows[task.rows][:3]] * 3)[:3] for rows in (task.x, task.y))
    if x.is_floating_point():  # rows that differ, even of a client with one; no token is larger than it was
        x = x * torch.tensor([1.0, 0.5, 0.25], device=x.device).view(-1, *[1] * (x.dim() - 1))
    tasks = [
        LocalTask(
            task.model,
            task.start,
            x,
            y,
            0,
            Batches(np.arange(size)[None], np.array([size]), 3),
            task.lr,
            LocalRule(),
            fixed=task.fixed,
            loss=task.loss,
        )
        for size in (3, 2)
    ]
    try:
        together, _ = train_vmapped(tasks)
        for k, one in enumerate(tasks):
            alone, _ = train_single(one)
            for name, value in alone.items():
                other = together[name][k] if name in together else task.fixed[name]
                if not torch.allclose(other, value, rtol=0, atol=_tolerance(value), equal_nan=True):
                    return False
    except Exception:  # vmap raises whatever it meets
        return False
    return True


def _tolerance(value: torch.Tensor) -> float:
    return CLOSE * max(float(value.abs().nan_to_num().max()), CLOSE) if value.is_floating_point() else 0.0
