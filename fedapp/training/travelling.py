"""What of a model travels between server and clients, and how two sides know that they have the rest alike.

Parameters that are trained travel, and arrays that training changes, such as running statistics. Frozen parameters
and constant buffers don't: each side builds the model by itself, and a digest of these arrays, which goes with every
task, tells whether the two sides have the same.
"""

import copy
import hashlib
from collections.abc import Collection, Mapping
from weakref import WeakKeyDictionary

import safetensors.torch
import torch
from torch import Tensor, nn

from fedapp.training.autograd import train_single
from fedapp.training.losses import Loss
from fedapp.training.state import as_bytes, copied_state, is_statistic, names_of, same_values
from fedapp.training.task import plain_task
from fedapp.training.trainee import global_stream

STEPS, ROWS, LR = 2, 4, 1e-3  # of the training that shows what changes


class OtherArraysError(ValueError):
    """Frozen arrays that were sent aren't those of the model that this side builds."""


def travelling(model: nn.Module, loss: Loss, x: Tensor, y: Tensor) -> tuple[str, ...]:
    """Return the names of the arrays that travel, in the order of the state dict.

    These are the trained parameters, buffers that are named as running statistics are, and whatever two steps of
    local training on some rows change.

    Parameters
    ----------
    x, y : Tensor
        Inputs (n, ...) and targets (n, ...) of at least one training row.
    """
    names = names_of(model)
    state = copied_state(model)
    travel = {*names.trained, *filter(is_statistic, names.fixed)}
    if unsure := [name for name in names.fixed if name not in travel]:
        task = plain_task(model, loss, x[:ROWS], y[:ROWS], steps=STEPS, lr=LR)
        with global_stream(0, x.device):
            after, _ = train_single(task)
        travel.update(name for name in unsure if not same_values(after[name], state[name]))
    return tuple(name for name in state if name in travel)


def frozen_names(model: nn.Module, sent: Collection[str]) -> tuple[str, ...]:
    """Return the names of a model's arrays that aren't among those sent."""
    return tuple(name for name in names_of(model).own(model.state_dict()) if name not in sent)


def frozen_bytes(model: nn.Module, sent: Collection[str]) -> bytes:
    """Return a model's arrays that aren't among those sent, as a safetensors file."""
    state = model.state_dict()
    return safetensors.torch.save(
        {name: state[name].detach().cpu().contiguous() for name in frozen_names(model, sent)}
    )


_digests: "WeakKeyDictionary[nn.Module, dict[frozenset[str], str]]" = WeakKeyDictionary()


def digest_of(model: nn.Module, sent: Collection[str]) -> str:
    """Return a digest of a model's arrays that aren't among those sent; "" if there are none.

    Of their names, types, shapes and bits.
    """
    known, key = _digests.setdefault(model, {}), frozenset(sent)
    if key not in known:
        state, names = model.state_dict(), sorted(frozen_names(model, sent))
        digest = hashlib.sha256()
        for name in names:
            value = state[name]
            digest.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
            digest.update(as_bytes(value).cpu().numpy().data)
        known[key] = digest.hexdigest() if names else ""
    return known[key]


def with_frozen(model: nn.Module, sent: Collection[str], data: bytes) -> nn.Module:
    """Return a copy of a model that has the arrays of ``frozen_bytes`` in place of its own.

    Raises
    ------
    OtherArraysError
        If the bytes hold other names, types or shapes than the model has.
    """
    try:
        given: Mapping[str, Tensor] = safetensors.torch.load(data)
    except Exception as error:  # whatever safetensors raises on bytes that are none
        raise OtherArraysError(f"its frozen arrays can't be read ({error})") from None
    made = copy.deepcopy(model)
    state = names_of(made).own(made.state_dict())
    for name in frozen_names(made, sent):
        own, value = state[name], given.get(name)
        if value is None or (value.shape, value.dtype) != (own.shape, own.dtype):
            what = "none" if value is None else f"{value.dtype} {tuple(value.shape)}"
            raise OtherArraysError(
                f"its array {name} is {own.dtype} {tuple(own.shape)} here, and {what} on the server"
            )
        with torch.no_grad():
            own.copy_(value)
    return made
