"""Train the tasks of many clients, in chunks, on threads, each in the way that suits its model and the device:

- **stacked**: models of dense layers as one stack of batched products (``fedapp.training.dense``);
- **dual**: the same with many features and few examples, each client by itself (``fedapp.training.dual``);
- **vmapped**: other models under ``torch.func.vmap``, ragged clients padded and masked, where that works;
- **single**: one client after the other. Both by automatic differentiation (``fedapp.training.autograd``).

On a CPU convolutions and LSTMs are trained singly: batched over clients they are several times slower. What gains
there is a frozen net with adapters in short steps: a product with frozen weights is then one for all clients. On a
GPU, where the launch of a small kernel costs more than the kernel, all these are vmapped, unless there are only a few
clients: a step under vmap launches several times the kernels of a client's own. The choice follows from tasks and
device alone, never from a stopwatch, so that it is the same in every run. Neither what is in a chunk nor any result
depends on the number of threads.
"""

import math
import os
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from fedapp.names import Way
from fedapp.training.autograd import train_single, train_vmapped
from fedapp.training.chunks import cut_evenly, cut_padded, stack_bytes
from fedapp.training.dense import train_dense
from fedapp.training.dual import has_dual, train_dual
from fedapp.training.layers import dense_layers
from fedapp.training.rule import Parameters
from fedapp.training.state import as_array
from fedapp.training.task import LocalTask, TaskBlock, TaskStack
from fedapp.training.vmapped import trains_under_vmap


def way_of(task: LocalTask) -> Way:
    """Return how a client is trained: a way that ``can``."""
    on_cpu = task.x.device.type == "cpu"
    if can("stacked", task):
        return "dual" if on_cpu and is_dual_faster(task) and can("dual", task) else "stacked"
    if on_cpu and not is_vmap_faster(task):
        return "single"
    return "vmapped" if can("vmapped", task) else "single"


def can(way: Way, task: LocalTask) -> bool:
    """Say whether a task can be trained in a way: dense models alone in a stack or in dual form.

    Neither, where the images of a step are changed as it reads them, or where a task trains a part of the model.
    In bfloat16 clients are trained singly, whatever runs them: elsewhere products would be rounded otherwise. So are
    they with a loss of the whole batch, in which the padding of a stack would count.
    """
    if task.precision != "fp32" or task.loss.of_batch:
        return way == "single"
    if way in ("stacked", "dual") and (task.augmentation is not None or not _trains_all(task)):
        return False
    if way == "dual":
        return has_dual(task)
    if way == "stacked":
        return bool(dense_layers(task.model)) and task.loss.errors is not None and task.optimizer.stacks
    return way == "single" or trains_under_vmap(task)


def _trains_all(task: LocalTask) -> bool:
    return all(name in task.start for layer in dense_layers(task.model) for name in layer)


# How many times as fast the dual form must be, for the Gram matrix to be worth its making.
WORTH = 1.5


@dataclass(frozen=True)
class Costs:
    """What the first layer of a task costs, in nanoseconds of a core.

    The numbers are rough, but constants: a task must be trained in the same way in every process and every run.

    Parameters
    ----------
    n, d, k : int
        Examples, features, and outputs of the first layer.
    layers : int
        How many there are.
    seen, steps : int
        Examples that the task's steps see, one counted as often as it is seen; and the steps.
    """

    n: int
    d: int
    k: int
    layers: int
    seen: int
    steps: int

    @classmethod
    def of(cls, task: LocalTask) -> "Costs":
        """Return what a task of dense layers costs."""
        layers, batches = dense_layers(task.model), task.batches
        k, d = task.start[layers[0][0]].shape
        return cls(batches.num_examples, d, k, len(layers), int(batches.sizes.sum()), len(batches))

    @property
    def primal(self) -> float:
        """For each feature of an example, and each weight in a step."""
        return (1.4 + 0.025 * self.k) * self.seen * self.d + 0.8 * self.k * self.d * self.steps

    @property
    def dual(self) -> float:
        """For each product of two examples, each feature of an example once, each coefficient in a step, and each
        step.
        """
        products = (0.75 + 0.025 * self.k) * self.seen * self.n
        once = (1.2 + 0.03 * self.k) * self.n * self.d
        return products + once + (50_000.0 * self.layers + 2.0 * self.k * self.n) * self.steps


# Multiplications of a step, for each array of weights, up to which calling PyTorch takes a good part of the step.
BRIEF = 700_000


def is_vmap_faster(task: LocalTask) -> bool:
    """Say whether a CPU trains several such tasks faster at once: half of the net is frozen, and steps are short.

    Frozen arrays are there once, whatever the number of clients, and their products are taken once for all of them.
    """
    modules, weights = list(task.model.modules()), list(task.model.parameters())
    if any(isinstance(module, _ConvNd) for module in modules):
        return False
    number = sum(value.numel() for value in weights)
    if 2 * sum(value.numel() for value in (*task.start.values(), *task.fixed.values())) > number:
        return False
    by_token = any(isinstance(module, nn.Embedding) for module in modules)
    positions = math.prod(task.x.shape[1:] if by_token else task.x.shape[1:-1])
    return bool(task.batches.indices.shape[1] * positions * number <= BRIEF * len(weights))


def is_dual_faster(task: LocalTask) -> bool:
    """Say whether a CPU trains a task faster in its dual form; with n ≤ d, XXᵀ takes no more memory than X."""
    costs = Costs.of(task)
    return costs.n <= costs.d and WORTH * costs.dual < costs.primal


# Trained parameters, on the host, and the loss averaged over the steps.
Trained = tuple[dict[str, np.ndarray], float]

# The steps of a task, its examples in a step, and what else decides how it is trained.
Shape = tuple[int, ...]

# Of a stack: the trained parameters (G, ...), and the mean losses (G,).
TrainedStack = tuple[Parameters, Tensor]

# Bytes of a stack whose steps are short.
SHORT = 1 << 20

# Fewer clients a GPU trains singly: to launch a step of many clients took as long as to launch 7 steps of single ones
# for W3's CNN, and 8 for ResNet-18, in a bare loop (studies/benchmarks/RESULTS.md).
FEWEST_VMAPPED_ON_GPU = 4

# Errors of the whole process: smaller stacks would fit, but give other bits; a GPU is unusable after an error.
OF_ALL_TASKS = (MemoryError, torch.OutOfMemoryError, torch.AcceleratorError)

S = TypeVar("S")
T = TypeVar("T")


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _take_one_thread() -> None:
    """Let torch use no thread but this one."""
    torch.set_num_threads(1)
    torch.get_num_threads()  # settles it: else this thread's first product takes what was set last in any thread


def train_one(task: LocalTask) -> Trained:
    """Train one client; the result is detached from ``task.start``."""
    way = way_of(task)
    return _unstack(*_TOGETHER["single" if way == "vmapped" else way]([task]))[0]


class Trainer:
    """Trains tasks in chunks, on threads.

    Parameters
    ----------
    way : str, optional
        Overrides ``way_of``; a task that can't be stacked, or has no dual form, is trained singly.
    workers : int
        Number of threads; 0: one for each core (a GPU is used by one thread).
    """

    def __init__(self, way: Way | None = None, workers: int = 0) -> None:
        self.way = way
        self.workers = workers or _cores()
        # A task's sums must not depend on how many cores there are.
        self._threads = ThreadPoolExecutor(self.workers, "fedapp-training", _take_one_thread)

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown()

    def train(
        self, tasks: Sequence[LocalTask], groups: Sequence[Sequence[int]] = ()
    ) -> list[Trained | Exception]:
        """Return the trained parameters and mean loss of every task, or what it raised, in the order of the tasks.

        An error for lack of memory is raised here, as it is the stack's and not a task's. An error of a GPU, such as
        an index out of range in one client's data, is raised as well, as this process can't use the GPU after it.

        ``groups`` divide the tasks by their places: tasks of different groups are never stacked. By default all tasks
        are one group.
        """
        together = groups or [range(len(tasks))]
        jobs = [job for group in together for job in self._chunks(tasks, group)]

        def work(job: tuple[Way, list[int]]) -> dict[int, Trained | Exception]:
            done: dict[int, Trained | Exception] = {}
            for places, found in _each_or_why(lambda own: _TOGETHER[job[0]]([tasks[i] for i in own]), job[1]):
                each = [found] if isinstance(found, Exception) else _unstack(*found)
                done |= zip(places, each, strict=True)
            return done

        gpu = bool(tasks) and tasks[0].x.device.type != "cpu"
        # Not in this thread, whose products are divided over torch's own: sums would depend on how many there are.
        run = map if gpu else self._threads.map
        trained = {place: one for done in run(work, jobs) for place, one in done.items()}
        return [trained[place] for place in range(len(tasks))]

    def stacks(self, block: TaskBlock) -> Iterator[tuple[list[int], TrainedStack | Exception]]:
        """Train a block on this thread; yield the places of tasks, and their result, or the exception of one task."""
        for way, places in self._stacks_of(block):
            yield from _each_or_why(partial(_train_places, block, way), places)

    def waits(self, task: LocalTask, number: int) -> bool:
        """Tell whether threads would wait for each other, with stacks of ``number`` tasks like ``task``.

        A step of a small stack spends its time between calls of PyTorch, under Python's lock.
        """
        return (
            self._way(task) == "stacked" and stack_bytes(task, task.batches.indices.shape[1]) * number < SHORT
        )

    def ahead(
        self, work: Callable[[S], T], items: Iterable[S], *, alone: bool = False, in_turn: bool = False
    ) -> Iterator[T]:
        """Yield the results of ``work`` on threads, in order; threads are a few items ahead of the caller.

        With ``in_turn`` they aren't ahead, and one thread works at a time; with ``alone`` this thread works.
        """
        if alone:
            yield from map(work, items)
            return
        most = 0 if in_turn else 2 * self.workers
        under_way: deque[Future[T]] = deque()
        try:
            for item in items:
                under_way.append(self._threads.submit(work, item))
                if len(under_way) > most:
                    yield under_way.popleft().result()
            while under_way:
                yield under_way.popleft().result()
        finally:
            for future in under_way:
                future.cancel()

    def _chunks(
        self, tasks: Sequence[LocalTask], group: Sequence[int] | None = None
    ) -> Iterator[tuple[Way, list[int]]]:
        """Yield a way to train and the places of tasks, all or a group's, to train that way, a chunk at a time."""
        places = range(len(tasks)) if group is None else group
        return self._cut({i: (_shape(tasks[i]), _kind(tasks[i])) for i in places}, tasks.__getitem__)

    def _stacks_of(self, block: TaskBlock) -> Iterator[tuple[Way, list[int]]]:
        """Yield a way to train and the places of tasks, a stack at a time: as ``_chunks`` of the same tasks."""
        return self._cut({place: (shape, ()) for place, shape in enumerate(block.kinds)}, block.one)

    def _cut(
        self, kinds: Mapping[int, tuple[Shape, Hashable]], one: Callable[[int], LocalTask]
    ) -> Iterator[tuple[Way, list[int]]]:
        """Cut tasks into chunks; ``kinds``: by place the shape of a task, and what is alike in one chunk.

        By the tasks alone and their order: what is stacked with what decides the last bits of a sum.
        """
        ways: dict[tuple[Shape, Hashable], Way] = {}  # of tasks that differ in nothing that it follows from
        first: dict[tuple[Hashable, Way], int] = {}
        keys: dict[int, tuple[int, int, int]] = {}
        for place, same in kinds.items():
            if same not in ways:
                ways[same] = self._way(one(place))
            (steps, width, *_), kind = same
            keys[place] = first.setdefault((kind, ways[same]), place), -steps, -width
        for number, alike in groupby(sorted(kinds, key=keys.__getitem__), key=lambda place: keys[place][0]):
            places, way = list(alike), ways[kinds[number]]
            if way in ("single", "dual"):
                chunks: Iterable[list[int]] = ([place] for place in places)
            elif way == "vmapped":
                chunks = cut_padded([one(place) for place in places], places)
            else:
                chunks = cut_evenly(one(places[0]), max(kinds[place][0][1] for place in places), places)
            for chunk in chunks:
                yield from self._as_stacked(way, one(chunk[0]), chunk)

    def _as_stacked(self, way: Way, like: LocalTask, places: list[int]) -> Iterator[tuple[Way, list[int]]]:
        """Yield the ways and places of a stack: on a GPU few clients are trained singly, unless ``way`` is given."""
        few = way == "vmapped" and len(places) < FEWEST_VMAPPED_ON_GPU and like.x.device.type != "cpu"
        if few and self.way is None:
            yield from (("single", [place]) for place in places)
        else:
            yield way, places

    def _way(self, task: LocalTask) -> Way:
        way = self.way or way_of(task)
        return way if can(way, task) else "single"


def _shape(task: LocalTask) -> Shape:
    batches = task.batches
    return len(batches), batches.indices.shape[1], batches.num_examples, batches.whole


def _kind(task: LocalTask) -> Hashable:
    """Return what tasks that are trained together have in common."""
    plain = task.constant is None, task.augmentation is None, task.anchor is None
    return id(task.model), task.rule, task.loss, task.optimizer, task.precision, *plain, id(task.x)


def _each_or_why(
    train: Callable[[list[int]], TrainedStack], places: list[int]
) -> Iterator[tuple[list[int], TrainedStack | Exception]]:
    """Train the tasks of these places together; if that raises, each alone, so that one's exception is its own."""
    try:
        found: TrainedStack | Exception = train(places)
    except OF_ALL_TASKS:
        raise
    except Exception as error:  # whatever a model, or what it is trained on, has it raise
        found = error.with_traceback(None)  # which would keep the tensors of the steps
    if isinstance(found, Exception) and len(places) > 1:
        for place in places:
            yield from _each_or_why(train, [place])
    else:
        yield places, found


def _train_places(block: TaskBlock, way: Way, places: Sequence[int]) -> TrainedStack:
    """Train some tasks of a block together."""
    if way == "stacked":
        return train_dense(block.stacked(places))
    return _TOGETHER[way]([block.one(place) for place in places])


def _unstack(w: Parameters, losses: Tensor) -> list[Trained]:
    """Bring a stack to the host in one piece and take it apart."""
    arrays = {name: as_array(value) for name, value in w.items()}
    # An array also where a client's is one number.
    return [
        ({name: np.asarray(array[k]) for name, array in arrays.items()}, loss)
        for k, loss in enumerate(losses.tolist())
    ]


def _alone(train: Callable[[LocalTask], TrainedStack], tasks: Sequence[LocalTask]) -> TrainedStack:
    """Return a client that was trained by itself as a stack of one."""
    w, loss = train(tasks[0])
    return {name: value.detach().unsqueeze(0) for name, value in w.items()}, loss.reshape(1)


_TOGETHER: dict[Way, Callable[[Sequence[LocalTask]], TrainedStack]] = {
    "stacked": lambda tasks: train_dense(TaskStack.of(tasks)),
    "vmapped": train_vmapped,
    "dual": partial(_alone, train_dual),
    "single": partial(_alone, train_single),
}
