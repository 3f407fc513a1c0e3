"""Train the tasks of many clients, in the way that suits the model and the device. Without Flower.

- **stacked**: models of dense layers as one stack of batched products (``fedapp.dense_training``);
- **dual**: linear models with many features, each client by itself (``fedapp.dual_training``);
- **vmapped**: other models under ``torch.func.vmap``, ragged clients padded and masked;
- **single**: one client after the other.

On a CPU convolutions and LSTMs are trained singly: batched over clients they are several times slower. On a GPU,
where the launch of a small kernel costs more than the kernel, they are vmapped. The choice follows from task and
device alone, never from a stopwatch, so that it is the same in every run.

Chunks of tasks are shared out to threads. What is in a chunk doesn't depend on their number, nor does any result.
"""

import copy
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor, nn

from fedapp.dense_training import dense_layers, stack_parameters, train_dense
from fedapp.dual_training import has_dual, is_dual_faster, train_dual
from fedapp.local_training import (
    LocalTask,
    Parameters,
    cross_entropy,
    functional_gradient,
    plain_gradient,
    train,
)  # fmt: skip

Way = Literal["stacked", "dual", "vmapped", "single"]
WAYS: tuple[Way, ...] = get_args(Way)
# Trained parameters, on the host, and the loss averaged over the steps.
Trained = tuple[dict[str, np.ndarray], float]

# Working memory of a chunk in bytes: on a CPU what stays in its caches, on a GPU what keeps it busy.
CPU_CHUNK = 4 << 20
GPU_CHUNK = 4 << 30

# Padded examples per real one that a vmapped chunk may have.
MOST_PADDING = 1.5


def _cores() -> int:
    """Number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def way_of(task: LocalTask) -> Way:
    """Return how a client is trained."""
    on_cpu = task.x.device.type == "cpu"
    if dense_layers(task.model):
        return "dual" if on_cpu and is_dual_faster(task) and has_dual(task) else "stacked"
    if on_cpu or any(isinstance(module, nn.RNNBase) for module in task.model.modules()):
        return "single"  # vmap has no rule for recurrent layers: it would loop over the clients
    return "vmapped"


def train_one(task: LocalTask) -> Trained:
    """Train one client; the result is detached from ``task.start``."""
    way = way_of(task)
    return _TRAIN["single" if way == "vmapped" else way]([task])[0]


class Trainer:
    """Trains tasks in chunks, on threads.

    Parameters
    ----------
    way : str, optional
        Overrides ``way_of``; what can't be stacked, or has no dual form, is trained singly.
    workers : int
        Threads; 0: one for each core (one alone on a GPU, whose work is in order anyway).
    """

    def __init__(self, way: Way | None = None, workers: int = 0) -> None:
        self.way = way
        self.workers = workers or _cores()
        # A task's sums must not depend on how many cores there are.
        self._threads = ThreadPoolExecutor(self.workers, "fedapp-training", torch.set_num_threads, (1,))

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown()

    def train(self, tasks: Sequence[LocalTask]) -> list[Trained]:
        """Return the trained parameters and mean loss of every task, in the order of the tasks."""
        trained: list[Trained | None] = [None] * len(tasks)
        jobs = list(self._chunks(tasks))
        gpu = bool(tasks) and tasks[0].x.device.type != "cpu"
        run = map if gpu or len(jobs) == 1 else self._threads.map
        results = run(lambda job: job[0]([tasks[i] for i in job[1]]), jobs)
        for (_, positions), result in zip(jobs, results, strict=True):
            for position, one in zip(positions, result, strict=True):
                trained[position] = one
        return trained  # type: ignore[return-value]

    def _chunks(
        self, tasks: Sequence[LocalTask]
    ) -> Iterator[tuple[Callable[[Sequence[LocalTask]], list[Trained]], list[int]]]:
        """Yield a way to train and the positions of the tasks to train that way, a chunk at a time."""

        ways = [self._way(task) for task in tasks]

        def kind(i: int) -> tuple[object, ...]:
            return id(tasks[i].model), tasks[i].rule, id(tasks[i].x), ways[i]

        def shape(i: int) -> tuple[int, ...]:
            batches = tasks[i].batches
            return -len(batches), -batches.indices.shape[1]

        for _, group in groupby(sorted(range(len(tasks)), key=lambda i: (hash(kind(i)), shape(i))), key=kind):
            positions = list(group)
            way = ways[positions[0]]
            if way in ("single", "dual"):
                yield from ((_TRAIN[way], [i]) for i in positions)
                continue
            for chunk in _cut([tasks[i] for i in positions], positions, padded=way == "vmapped"):
                yield _TRAIN[way], chunk

    def _way(self, task: LocalTask) -> Way:
        way = self.way or way_of(task)
        if (way == "stacked" and not dense_layers(task.model)) or (way == "dual" and not has_dual(task)):
            return "single"
        return way


def _cut(tasks: Sequence[LocalTask], positions: Sequence[int], *, padded: bool) -> Iterator[list[int]]:
    """Cut sorted tasks into chunks that fit the memory and, if padded, don't waste too much."""
    budget = CPU_CHUNK if tasks[0].x.device.type == "cpu" else GPU_CHUNK
    # Parameters, and two intermediate values of a batch beside its inputs; activations of convolutions are larger.
    model_bytes = sum(value.nbytes for value in tasks[0].start.values())
    row_bytes = 4 * int(np.prod(tasks[0].x.shape[1:])) * (16 if padded else 1)
    chunk: list[int] = []
    used, real, steps, width = 0, 0, 0, 0
    for task, position in zip(tasks, positions, strict=True):
        batches = task.batches
        size = model_bytes * (4 if padded else 1) + row_bytes * batches.indices.shape[1]
        new_steps, new_width = max(steps, len(batches)), max(width, batches.indices.shape[1])
        amount = real + int(batches.sizes.sum())
        waste = new_steps * new_width * (len(chunk) + 1) > MOST_PADDING * amount
        if chunk and (used + size > budget or (padded and waste)):
            yield chunk
            chunk, used, real, steps, width = [], 0, 0, 0, 0
            new_steps, new_width, amount = len(batches), batches.indices.shape[1], int(batches.sizes.sum())
        chunk.append(position)
        used, real, steps, width = used + size, amount, new_steps, new_width
    yield chunk


def _train_stacked(tasks: Sequence[LocalTask]) -> list[Trained]:
    return _unstack(*train_dense(tasks))


def _train_dual(tasks: Sequence[LocalTask]) -> list[Trained]:
    return [_to_host(*train_dual(task)) for task in tasks]


def _train_single(tasks: Sequence[LocalTask]) -> list[Trained]:
    trained = []
    for task in tasks:
        rows = slice(task.offset, task.offset + task.batches.num_examples)
        w, loss = train(
            cross_entropy(_own_copy(task.model)),
            {name: _by_channel(value) for name, value in task.start.items()},
            _by_channel(task.x[rows]),
            task.y[rows],
            task.batches.ragged(task.x.device),
            task.lr,
            task.rule,
            neighbours=task.neighbours,
            gradient=plain_gradient,
        )
        trained.append(_to_host(w, loss))
    return trained


def _by_channel(value: Tensor) -> Tensor:
    """Lay images and the weights of convolutions out as their kernels are fastest with."""
    return value.to(memory_format=torch.channels_last) if value.dim() == 4 else value


_copies = threading.local()


def _own_copy(model: nn.Module) -> nn.Module:
    """Return this thread's copy of a model: functional_call puts parameters into the module for a while."""
    if getattr(_copies, "model", None) is not model:
        _copies.model, _copies.copy = model, copy.deepcopy(model)
    own: nn.Module = _copies.copy
    return own


def _train_vmapped(tasks: Sequence[LocalTask]) -> list[Trained]:
    first = tasks[0]
    device = first.x.device
    steps = max(len(task.batches) for task in tasks)
    width = max(task.batches.indices.shape[1] for task in tasks)
    padded = [task.batches.padded(steps, width) for task in tasks]
    offsets = np.array([task.offset for task in tasks])[:, None, None]
    rows = torch.from_numpy(np.stack([indices for indices, _ in padded]) + offsets).to(device)
    mask = torch.from_numpy(np.stack([mask for _, mask in padded])).to(device)
    lr = torch.tensor([task.lr for task in tasks], device=device)

    def one(
        start: Parameters, rows: Tensor, mask: Tensor, lr: Tensor, neighbours: Parameters
    ) -> tuple[Parameters, Tensor]:
        batches: Iterable[tuple[Tensor, Tensor]] = zip(rows.unbind(0), mask.unbind(0), strict=True)
        return train(
            cross_entropy(_own_copy(first.model)),
            start,
            first.x,
            first.y,
            batches,
            lr,
            first.rule,
            neighbours=neighbours,
            gradient=functional_gradient,
        )

    stack = stack_parameters([task.start for task in tasks])
    neighbours = stack_parameters([task.neighbours or {} for task in tasks]) if first.rule.beta != 1 else {}
    return _unstack(*torch.func.vmap(one)(stack, rows, mask, lr, neighbours))


def _to_host(w: Parameters, loss: Tensor) -> Trained:
    return {name: value.cpu().numpy() for name, value in w.items()}, float(loss)


def _unstack(w: Parameters, losses: Tensor) -> list[Trained]:
    """Bring a stack to the host in one piece and take it apart."""
    arrays = {name: value.cpu().numpy() for name, value in w.items()}
    return [
        ({name: array[k] for name, array in arrays.items()}, loss) for k, loss in enumerate(losses.tolist())
    ]


_TRAIN: dict[Way, Callable[[Sequence[LocalTask]], list[Trained]]] = {
    "stacked": _train_stacked,
    "dual": _train_dual,
    "vmapped": _train_vmapped,
    "single": _train_single,
}
