"""Local steps on a GPU as CUDA graphs: a step's kernels are recorded once, and launched together from then on.

A step of a small model is a hundred kernels or more that take a few microseconds each, and launching them one by one
takes several times as long as the GPU works on them. A replay runs the kernels that a step would run, so that results
have the same bits.

What Python does in a step happens only when the step is recorded. So only steps are that are known to be the same
kernels each time: those of PyTorch's own layers that draw no random numbers, with losses that are built in, by SGD
and in float32 (``has_replay``). A module's own forward pass may look at anything, and is run at each step.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedapp.own import is_own
from fedapp.training.layers import is_changed
from fedapp.training.optimizer import SGD
from fedapp.training.task import LocalTask

# Steps of one kind before one is recorded, which takes about as long as they do: a task is never much slower for it.
# PyTorch's libraries take their memory at the first, which must not be recorded.
BEFORE = 16

_LAYERS = {
    nn.Sequential,
    nn.Identity,
    nn.Flatten,
    nn.Unflatten,
    nn.Linear,
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.MaxPool1d,
    nn.MaxPool2d,
    nn.AvgPool1d,
    nn.AvgPool2d,
    nn.AdaptiveAvgPool1d,
    nn.AdaptiveAvgPool2d,
    nn.ReLU,
    nn.LeakyReLU,
    nn.ELU,
    nn.GELU,
    nn.SiLU,
    nn.Tanh,
    nn.Sigmoid,
    nn.Softplus,
    nn.GroupNorm,
    nn.LayerNorm,
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
}

Step = Callable[..., None]


def has_replay(task: LocalTask) -> bool:
    """Tell whether a task's steps may be replayed on a GPU: each is the same kernels as the one before."""
    return (
        task.precision == "fp32"
        and task.optimizer == SGD
        and not is_own(task.loss.name)
        and all(map(_is_known, task.model.modules()))
    )


def _is_known(layer: nn.Module) -> bool:
    if is_changed(layer):
        return False
    if isinstance(layer, _BatchNorm) and layer.momentum is None:  # reads its number of batches back
        return False
    return type(layer) in _LAYERS or type(layer).__module__ == "torchvision.models.resnet"


@contextmanager
def replayed(step: Step) -> Iterator[Step]:
    """Yield a function that takes a step on a GPU: it replays the step's recording, once there is one.

    Parameters
    ----------
    step : callable
        Of inputs that are tensors, or the same at each step of a kind. All else that it reads and changes must stay
        where it is in memory, and it must return None. Which may be recorded: ``has_replay``.
    """
    outside, stream = torch.cuda.current_stream(), _stream()
    stream.wait_stream(outside)
    with torch.cuda.stream(stream):
        try:
            yield _Replayed(step, stream)
        finally:  # also if a step raises: what it was given is freed after its kernels
            outside.wait_stream(stream)


@cache
def _stream() -> torch.cuda.Stream:
    """Return a stream of this process's: PyTorch keeps freed memory for each stream by itself."""
    return torch.cuda.Stream()  # type: ignore[no-untyped-call]


class _Replayed:
    """Takes steps on a stream, and replays those whose kind has been recorded: inputs of the same shapes."""

    def __init__(self, step: Step, stream: torch.cuda.Stream) -> None:
        self._step, self._stream = step, stream
        self._pool = torch.cuda.graph_pool_handle()  # nothing in it outlasts a step
        self._seen: dict[tuple[Any, ...], int] = {}
        self._recorded: dict[tuple[Any, ...], tuple[list[Any], torch.cuda.CUDAGraph]] = {}

    def __call__(self, *inputs: Any) -> None:
        kind = tuple(map(_kind, inputs))
        if kind not in self._recorded:
            self._seen[kind] = self._seen.get(kind, 0) + 1
            if self._seen[kind] <= BEFORE:
                self._step(*inputs)
                return
            self._recorded[kind] = self._record(inputs)
        kept, graph = self._recorded[kind]
        for memory, value in zip(kept, inputs, strict=True):
            if isinstance(value, Tensor):
                memory.copy_(value)
        graph.replay()

    def _record(self, inputs: tuple[Any, ...]) -> tuple[list[Any], torch.cuda.CUDAGraph]:
        kept = [each.clone() if isinstance(each, Tensor) else each for each in inputs]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
            self._step(*kept)
        return kept, graph


def _kind(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.shape, value.dtype
    return (value.start, value.stop) if isinstance(value, slice) else value
