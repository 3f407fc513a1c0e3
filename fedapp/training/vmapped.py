"""Whether a module can be trained under ``torch.func.vmap``, many clients at once: by trying it."""

import logging
import warnings
import weakref
from dataclasses import replace

import numpy as np
import torch
from torch import nn

from fedapp.training.autograd import train_single, train_vmapped
from fedapp.training.batches import Batches
from fedapp.training.rule import LocalRule, Parameters
from fedapp.training.task import LocalTask

log = logging.getLogger("flwr.fedapp")

_tried: "weakref.WeakKeyDictionary[nn.Module, bool]" = weakref.WeakKeyDictionary()

# The step's length beside the model's: rounding is far below it, and so small a step is like one of the gradient.
LENGTH = 1e-3
# What batched sums may differ by: of a move and of the loss, and of a tensor itself in units of its rounding.
CLOSE, ROUNDING = 2e-3, 8.0


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
    whole, part = (
        LocalTask(
            task.model,
            task.start,
            x,
            y,
            0,
            Batches(np.arange(size)[None], np.array([size]), 3),
            1.0,
            LocalRule(),
            fixed=task.fixed,
            loss=task.loss,
        )
        for size in (3, 2)
    )
    try:
        gradient = _length(task.start, train_single(whole)[0])
        if not 0 < gradient < np.inf:
            gradient = 1.0
        rate = LENGTH * max(_length(task.start), 1.0) / gradient
        tasks = [replace(each, lr=rate) for each in (whole, part)]
        together, losses = train_vmapped(tasks)
        return all(
            _same({name: value[k] for name, value in together.items()}, float(losses[k]), one)
            for k, one in enumerate(tasks)
        )
    except Exception:  # vmap raises whatever it meets
        return False


def _same(found: Parameters, found_loss: float, task: LocalTask) -> bool:
    """Tell whether a client's parameters have moved, and its loss is, as when it is trained alone."""
    alone, loss = train_single(task)
    start = {**task.fixed, **task.start}
    of_all = _length(task.start, alone)
    for name, value in alone.items():
        other, begun = found.get(name, start[name]), start[name]
        if not value.is_floating_point():
            if not torch.equal(other, value):
                return False
        elif not np.isfinite(move := _length({name: value}, {name: begun})):  # a mask with −∞, say
            if not torch.allclose(other, value, rtol=CLOSE, equal_nan=True):
                return False
        else:
            rounding = ROUNDING * torch.finfo(value.dtype).eps * _length({name: begun})
            if not _length({name: other}, {name: value}) <= CLOSE * (move + of_all) + rounding:
                return False
    return bool(np.isclose(found_loss, float(loss), rtol=CLOSE, atol=CLOSE**2, equal_nan=True))


def _length(of: Parameters, less: Parameters | None = None) -> float:
    """Return the norm of all values, less others."""
    apart = [value if less is None else value - less[name] for name, value in of.items()]
    return float(sum(float(value.double().square().sum()) for value in apart) ** 0.5)
