"""Whether a model is trained as PyTorch would train it, by two steps on a few rows."""

import copy
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fedapp.training.autograd import train_single
from fedapp.training.batches import steps_of_all
from fedapp.training.losses import Loss
from fedapp.training.parts import inputs_of
from fedapp.training.state import as_array, copied_state, names_of, same_values
from fedapp.training.task import LocalTask, plain_task
from fedapp.training.trainee import Trainee, draws_globally, global_stream
from fedapp.training.trainer import train_one, way_of

State = Mapping[str, np.ndarray]

STEPS, ROWS = 2, 4
PASSES = 3  # after which a model's attributes are looked at
# The first step's length beside the model's, short enough that no second step differs by rounding.
LENGTH = 1e-3
# What may differ: of what a tensor has moved by, of what all have, and of the tensor.
OF_ITS_MOVE, OF_ALL_MOVES, OF_ITSELF = 0.05, 1e-3, 1e-5


def trial(model: nn.Module, loss: Loss, x: Tensor, y: Tensor) -> str | None:
    """Train on some rows, twice, and once by PyTorch's SGD on a copy; say what isn't as it should be.

    A model that draws random numbers isn't compared with PyTorch, whose draws are others.
    """
    x, y = x[:ROWS], y[:ROWS]
    names = names_of(model)
    state = copied_state(model)
    rate = _rate(model, loss, x, y)
    if rate is None:
        return None
    task = plain_task(model, loss, x, y, steps=STEPS, lr=rate)
    first = train_one(task)[0]
    if other := _unrepeated(task, first):
        return (
            f"the same training gives another {other} the second time; what it keeps from one forward pass to "
            "the next must be a buffer (register_buffer), and what it draws PyTorch's"
        )
    trainee = Trainee(model)
    # One row has no deviation, of which PyTorch's batch normalisation makes an error.
    if len(x) < 2 or trainee.drops or draws_globally(model, trainee, state, x):
        return None
    expected = _by_pytorch(task)
    other = _unlike_pytorch(task, first, expected)
    if other:
        # PyTorch's rounding may put an activation on the other side of a ReLU's zero, hardly so at two places.
        end = {name: torch.from_numpy(value) for name, value in expected.items()}
        task = replace(
            task,
            start={name: end[name] for name in names.trained},
            fixed={name: end[name] for name in names.fixed},
        )
        other = _unlike_pytorch(task, train_one(task)[0], _by_pytorch(task))
    return f"local training gives another {other} than PyTorch's SGD does on {len(x)} rows" if other else None


def _unrepeated(task: LocalTask, first: State) -> str | None:
    """Return the name of a tensor that training again makes otherwise than in ``first``; None if all are equal."""
    again = train_one(task)[0]
    # What a model keeps may come again with every second or third forward pass: then single steps tell.
    alone = [train_one(replace(task, batches=steps_of_all(1, len(task.y))))[0] for _ in range(3)]
    pairs = ((again, first), (alone[1], alone[0]), (alone[2], alone[0]))
    return next(filter(None, (_different(task, *pair) for pair in pairs)), None)


def _unlike_pytorch(task: LocalTask, found: State, expected: State) -> str | None:
    """Return the name of a tensor that training makes otherwise than PyTorch; None if there is none.

    ``found`` is made in the task's own way of training; automatic differentiation is compared, too.
    """
    other = _different(task, found, expected)
    if other is None and way_of(task) != "single":
        single = {name: as_array(value) for name, value in train_single(task)[0].items()}
        other = _different(task, single, expected)
    return other


@dataclass(frozen=True)
class Carried:
    """Attributes that a model's forward passes change, by the names of module and attribute.

    Attributes
    ----------
    read : tuple of str
        What was changed, where the outputs are then others: it would pass from client to client.
    counters : tuple of str
        Whole numbers that the outputs of a few passes don't depend on.
    """

    read: tuple[str, ...] = ()
    counters: tuple[str, ...] = ()


def carried(model: nn.Module, x: Tensor) -> Carried:
    """Return the attributes, other than buffers, that a model keeps from one forward pass to the next.

    An attribute that a pass writes before it reads it, such as activations to look at, affects no later pass.
    """
    used, fresh = copy.deepcopy(model).train(), copy.deepcopy(model).train()
    seen = [_attributes(used)]
    for _ in range(PASSES):
        used(x)
        seen.append(_attributes(used))
    first, second, *_, last = seen
    counted = tuple(name for name in _changed(second, last) if type(last[name]) is int)
    names = tuple(dict.fromkeys((*_changed(first, second), *_changed(second, last))))
    if not names:
        return Carried()
    with torch.no_grad():
        for values in (nn.Module.named_parameters, nn.Module.named_buffers):
            start = dict(values(fresh))
            for name, value in values(used):
                value.copy_(start.get(name, value))
        outputs = []
        for one in (fresh, used):
            with global_stream(0, x.device):
                outputs.append(tree_leaves(one(x)))
    pairs = zip(*outputs, strict=True)
    same = all(not isinstance(each, Tensor) or same_values(each, other) for each, other in pairs)
    return Carried(counters=counted) if same else Carried(names)


_OF_EVERY_MODULE = frozenset(vars(nn.Module()))  # training, _parameters, _buffers, …

_CONTAINERS = (list, tuple, deque, dict)


def _attributes(model: nn.Module) -> dict[str, Any]:
    """Return the numbers and tensors of a model's modules, in attributes of their own or in containers there."""
    return {
        f"{name}.{key}".lstrip("."): _in_container(value)
        if isinstance(value, _CONTAINERS)
        else _copied(value)
        for name, layer in model.named_modules()
        for key, value in vars(layer).items()
        if key not in _OF_EVERY_MODULE and (isinstance(value, _CONTAINERS) or _is_value(value))
    }


def _is_value(value: Any) -> bool:
    """Tell whether this is a number or a tensor; sparse ones can't be compared."""
    return isinstance(value, int | float) or (isinstance(value, Tensor) and value.layout is torch.strided)


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def _in_container(container: Any) -> list[Any]:
    """Return a tuple of the lengths and numbers in a container and its containers, then copies of their tensors.

    A container that is there twice, as one that holds itself, counts once.
    """
    numbers: list[Any] = []
    tensors: list[Any] = []
    known, ahead = {id(container): container}, [container]
    while ahead:
        one = ahead.pop()
        values = list(one.values() if isinstance(one, dict) else one)
        numbers.append(len(values))
        for value in values:
            if isinstance(value, _CONTAINERS):
                if id(value) not in known:
                    known[id(value)] = value
                    ahead.append(value)
            elif _is_value(value):
                (tensors if isinstance(value, Tensor) else numbers).append(_copied(value))
    return [tuple(numbers), *tensors]


def _changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    def same(one: Any, other: Any) -> bool:
        if isinstance(one, Tensor) and isinstance(other, Tensor):
            return same_values(one, other)
        if isinstance(one, list) and isinstance(other, list):
            return len(one) == len(other) and all(map(same, one, other))
        return type(one) is not type(other) or one == other or (one != one and other != other)

    return [name for name, value in after.items() if name in before and not same(before[name], value)]


def _rate(model: nn.Module, loss: Loss, x: Tensor, y: Tensor) -> float | None:
    """Return the step size of short steps; None where there is no way to go."""
    own = copy.deepcopy(model).train()
    torch.autograd.backward(loss.mean(own(x), y, inputs=lambda: inputs_of(own, x)))
    moved = [(p, p.grad) for p in own.parameters() if p.grad is not None]
    size = sum(float(p.detach().double().square().sum()) for p, _ in moved)
    slope = sum(float(g.to_dense().double().square().sum()) for _, g in moved)
    rate = LENGTH * (max(size, 1.0) / slope) ** 0.5 if slope else np.inf
    return rate if np.isfinite(rate) else None


def _by_pytorch(task: LocalTask) -> State:
    """Return the state after the task's steps by PyTorch's SGD."""
    own, state = copy.deepcopy(task.model).train(), {**task.fixed, **task.start}
    with torch.no_grad():
        for name, value in (*own.named_parameters(), *own.named_buffers()):
            value.copy_(state.get(name, value))
    optimizer = torch.optim.SGD([p for p in own.parameters() if p.requires_grad], lr=task.lr)
    for _ in range(STEPS):
        optimizer.zero_grad()
        value = task.loss.mean(own(task.x), task.y, inputs=lambda: inputs_of(own, task.x))
        torch.autograd.backward(value)
        optimizer.step()
    return {name: as_array(value) for name, value in own.state_dict().items()}


def _different(task: LocalTask, found: State, expected: State) -> str | None:
    """Return the name of a tensor that has come out otherwise; buffers may be large, and don't count as moves."""
    start = {name: as_array(value) for name, value in {**task.fixed, **task.start}.items()}

    def size(one: np.ndarray) -> float:
        return float(np.linalg.norm(one.astype(np.float64)))

    with np.errstate(invalid="ignore", over="ignore"):
        moves = {name: size(expected[name] - start[name]) for name in found if start[name].dtype.kind == "f"}
    of_all = np.hypot.reduce([moves[name] for name in task.start if name in moves])
    if not np.isfinite(of_all):  # it diverges in two steps
        return None
    for name, value in found.items():
        if name not in moves:
            near = np.array_equal(value, expected[name])
        elif not np.isfinite(moves[name]):  # a mask with −∞, say, which has no length
            near = np.allclose(value, expected[name], rtol=OF_ITS_MOVE, equal_nan=True)
        else:
            allowed = OF_ITS_MOVE * moves[name] + OF_ALL_MOVES * float(of_all) + OF_ITSELF * size(start[name])
            near = size(value - expected[name]) <= allowed
        if not near:
            return name
    return None
