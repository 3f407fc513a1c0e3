"""A module as local training runs it: in training mode, with random numbers of the task's own.

Dropout draws from a generator that begins anew with each task, so that a task's result is the same on every engine,
whatever else its process trains. A module that draws otherwise (``torch.rand`` in its forward, dropout inside an
LSTM) takes PyTorch's global stream, which is then seeded for the task, and other threads wait: the same result, on
one core.
"""

import copy
import itertools
import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedapp.training.convolutions import Convolutions
from fedapp.training.layers import is_changed
from fedapp.training.rule import Parameters
from fedapp.training.state import StateNames, names_of, same_values

# Dropout of single values, and of whole channels.
_DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)

_GLOBAL_STREAM = threading.RLock()


class Dropout(nn.Module):
    """Dropout with a generator of its own: values, or channels, are zero with probability p, others 1/(1−p) times."""

    def __init__(self, p: float, trainee: "Trainee", *, channels: bool) -> None:
        super().__init__()
        self.p, self.channels = p, channels
        self._trainee = weakref.ref(trainee)

    def forward(self, x: Tensor) -> Tensor:
        """Drop (B, ...)."""
        if self.p == 0 or not self.training:
            return x
        if torch._C._current_graph_task_id() != -1:  # as torch.utils.checkpoint itself asks
            raise RuntimeError(
                "nn.Dropout within torch.utils.checkpoint would drop other values when they are computed again; "
                "torch.nn.functional.dropout doesn't"
            )
        trainee = self._trainee()
        assert trainee is not None
        shape = (*x.shape[:2], *[1] * (x.dim() - 2)) if self.channels else x.shape
        kept = torch.empty(shape, device=x.device, dtype=x.dtype)
        kept.bernoulli_(1 - self.p, generator=trainee.generator(x.device))
        return x * kept.div_(max(1 - self.p, 1e-12))


class Trainee:
    """A copy of a module for training in one thread: while functional_call runs, the copy holds other parameters.

    Parameters
    ----------
    model : nn.Module
        The module that is copied, and not changed.
    """

    def __init__(self, model: nn.Module) -> None:
        self.module = copy.deepcopy(model).train()
        self._generators: dict[torch.device, torch.Generator] = {}  # noqa: TID251
        self._seed = 0
        self.drops = _seed_dropout(self.module, self)
        self._alone = False
        _pool_first(self.module)
        for layer in self.module.modules():
            if isinstance(layer, _BatchNorm):
                _judge_alone(layer)
        self._held, self._outside = _places(self.module, names_of(model))
        self._own = names_of(model).own(model.state_dict())

    @cached_property
    def convolutions(self) -> Convolutions:
        """The module's convolutions, where it is trained under ``vmap``."""
        return Convolutions(self.module)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Train one client, without ``vmap``: the module holds the state that it was last called with.

        The backward pass of ``torch.utils.checkpoint`` reads this state to compute activations again.
        """
        self.forget()
        self._alone = True
        try:
            yield
        finally:
            self._alone = False

    @property
    def is_alone(self) -> bool:
        """Whether one client is trained."""
        return self._alone

    def forget(self) -> None:
        """Put buffers that aren't in the state dict back to what they were in the model."""
        for buffers, key, value in self._outside:
            buffers[key] = None if value is None else value.clone()

    def check_constant(self, sent: Collection[str]) -> None:
        """Raise RuntimeError if training has changed an array of the model's own, one that isn't among those sent."""
        for values, key, name in self._held:
            if name not in sent and not same_values(values[key], self._own[name]):
                raise RuntimeError(
                    f"{name} has changed in local training, but not in the two steps that were tried before the run, "
                    "so that it isn't sent; a buffer whose name begins with running_ always is"
                )

    def begin(self, seed: int) -> None:
        """Begin a task: what it draws follows from its seed."""
        self._seed = seed
        for generator in self._generators.values():
            generator.manual_seed(seed)

    def generator(self, device: torch.device) -> torch.Generator:  # noqa: TID251
        """Return the task's generator on a device."""
        if device not in self._generators:
            # Seeded from the task's stream: torch can't draw from NumPy's generators.
            self._generators[device] = torch.Generator(device).manual_seed(self._seed)  # noqa: TID251
        return self._generators[device]

    def __call__(self, state: Parameters, x: Tensor) -> Tensor:
        """Return the outputs for inputs (B, ...); buffers in ``state`` are brought up to date.

        In place, or by a tensor in their place where the module assigns one.
        """
        if not self._alone:
            outputs: Tensor = torch.func.functional_call(self.module, state, (x,))
            return outputs
        held = [place for place in self._held if place[2] in state]
        for values, key, name in held:
            values[key] = state[name]
        outputs = self.module(x)
        for values, key, name in held:
            if (found := values[key]) is None:
                raise RuntimeError(f"{name} is None after the forward pass")
            state[name] = found
        return outputs


Values = dict[str, Tensor | None]


def _places(
    module: nn.Module, names: StateNames
) -> tuple[list[tuple[Values, str, str]], list[tuple[Values, str, Tensor | None]]]:
    """Return where a module keeps its state, by names in ``names.own``, and its buffers outside of it."""
    held: dict[tuple[int, str], tuple[Values, str, str]] = {}
    outside: dict[tuple[int, str], tuple[Values, str, Tensor | None]] = {}
    known = {*names.trained, *names.fixed}
    for prefix, layer in module.named_modules(remove_duplicate=False):
        for values in (layer._parameters, layer._buffers):
            for key, value in values.items():
                name = f"{prefix}.{key}" if prefix else key
                name, place = names.twins.get(name, name), (id(values), key)
                if name in known and value is not None:
                    held[place] = values, key, name
                elif values is layer._buffers and place not in held:
                    outside[place] = values, key, None if value is None else value.clone()
    return list(held.values()), list(outside.values())


def _seed_dropout(module: nn.Module, trainee: Trainee) -> bool:
    """Put ``Dropout`` in the place of PyTorch's, where it is as its class; tell whether there was any."""
    found = False
    for name, layer in list(module.named_children()):
        if type(layer) in _DROPOUT and not is_changed(layer):
            own = Dropout(layer.p, trainee, channels=not isinstance(layer, nn.Dropout))  # type: ignore[arg-type]
            setattr(module, name, own.train(layer.training))
            found = True
        else:
            found |= _seed_dropout(layer, trainee)
    return found


def _pool_first(module: nn.Module) -> None:
    """Swap (ReLU, MaxPool2d) in a chain of layers: the same bits from fewer values.

    A Sequential within a module of the user's own stays as it is: its parts may be read one by one.
    """
    if type(module) is not nn.Sequential:
        return
    for first, second in itertools.pairwise(module._modules):
        one, other = module._modules[first], module._modules[second]
        swaps = type(one) is nn.ReLU and type(other) is nn.MaxPool2d and not other.return_indices
        if swaps and not any(map(is_changed, (module, one, other))):
            module._modules[first], module._modules[second] = other, one
    for layer in module:
        _pool_first(layer)


def _judge_alone(layer: nn.Module) -> None:
    """Let batch normalisation go by its running statistics where there is one value a channel, and no deviation.

    What the module's own ``train`` has put in evaluation mode stays there.
    """
    off: list[bool] = []

    def before(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        x = inputs[0]
        one = x.numel() <= x.shape[1] if x.dim() > 1 else x.numel() <= 1
        off.append(layer.training and one)
        layer.training &= not one

    def after(layer: nn.Module, *_: object) -> None:
        layer.training |= bool(off) and off.pop()

    layer.register_forward_pre_hook(before)
    layer.register_forward_hook(after, always_call=True)


@contextmanager
def global_stream(seed: int, device: torch.device) -> Iterator[None]:
    """Have PyTorch's global stream to oneself, seeded."""
    devices = [device] if device.type == "cuda" else []
    with _GLOBAL_STREAM, torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)  # noqa: TID251
        yield


_draws: "weakref.WeakKeyDictionary[nn.Module, bool]" = weakref.WeakKeyDictionary()


def draws_globally(model: nn.Module, trainee: Trainee, state: Mapping[str, Tensor], x: Tensor) -> bool:
    """Tell whether a module draws from PyTorch's global stream in training; tried once on two rows of ``x``."""
    if model not in _draws:
        rows = x[torch.zeros(2, dtype=torch.int64, device=x.device)]
        copies = {name: value.clone() for name, value in state.items()}
        with global_stream(0, x.device), torch.no_grad():
            before = _stream_state(x.device)
            trainee(copies, rows)
            _draws[model] = any(
                not torch.equal(a, b) for a, b in zip(before, _stream_state(x.device), strict=True)
            )
    return _draws[model]


def _stream_state(device: torch.device) -> list[Tensor]:
    states = [torch.get_rng_state()]
    return [*states, torch.cuda.get_rng_state(device)] if device.type == "cuda" else states


def as_it_is(value: Tensor) -> Tensor:
    """Return a tensor as it lies in memory."""
    return value


def by_channel(value: Tensor) -> Tensor:
    """Lay images and the weights of convolutions out as their kernels are fastest with."""
    return value.to(memory_format=torch.channels_last) if value.dim() == 4 else value


_by_channel: "weakref.WeakKeyDictionary[nn.Module, bool]" = weakref.WeakKeyDictionary()


def takes_by_channel(
    model: nn.Module,
    outputs_of: Callable[[Parameters, Tensor], Tensor],
    state: Mapping[str, Tensor],
    x: Tensor,
) -> bool:
    """Return True if a module supports images in channels_last; ``x.view(B, -1)`` after a convolution doesn't.

    ``outputs_of``, of the module's state and inputs, is tried once on two rows of ``x``.
    """
    if model not in _by_channel:
        rows = by_channel(x[torch.zeros(2, dtype=torch.int64, device=x.device)])
        copies = {name: by_channel(value).clone() for name, value in state.items()}
        try:
            with global_stream(0, x.device), torch.no_grad():
                outputs_of(copies, rows)
            _by_channel[model] = True
        except RuntimeError:  # if it is another one, it is raised in training, too
            _by_channel[model] = False
    return _by_channel[model]
