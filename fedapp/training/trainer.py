"""Train the tasks of many clients, in chunks, on threads.

What is in a chunk doesn't depend on the number of threads, nor does any result.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from fedapp.training.autograd import train_single, train_vmapped
from fedapp.training.choose import Way, can, way_of
from fedapp.training.chunks import cut
from fedapp.training.dense import train_dense
from fedapp.training.dual import train_dual
from fedapp.training.task import LocalTask
from fedapp.training.vectors import Parameters

# Trained parameters, on the host, and the loss averaged over the steps.
Trained = tuple[dict[str, np.ndarray], float]


def _cores() -> int:
    """Number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


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
            task = tasks[i]
            plain = task.constant is None, task.augmentation is None, task.anchor is None
            return id(task.model), task.rule, task.loss, task.optimizer, *plain, id(task.x), ways[i]

        def shape(i: int) -> tuple[int, ...]:
            batches = tasks[i].batches
            return -len(batches), -batches.indices.shape[1]

        for _, group in groupby(sorted(range(len(tasks)), key=lambda i: (hash(kind(i)), shape(i))), key=kind):
            positions = list(group)
            way = ways[positions[0]]
            if way in ("single", "dual"):
                yield from ((_TRAIN[way], [i]) for i in positions)
                continue
            for chunk in cut([tasks[i] for i in positions], positions, padded=way == "vmapped"):
                yield _TRAIN[way], chunk

    def _way(self, task: LocalTask) -> Way:
        way = self.way or way_of(task)
        return way if can(way, task) else "single"


def _each(
    train: Callable[[LocalTask], tuple[Parameters, Tensor]], tasks: Sequence[LocalTask]
) -> list[Trained]:
    return [_to_host(*train(task)) for task in tasks]


def _to_host(w: Parameters, loss: Tensor) -> Trained:
    return {name: value.cpu().numpy() for name, value in w.items()}, float(loss)


def _unstack(w: Parameters, losses: Tensor) -> list[Trained]:
    """Bring a stack to the host in one piece and take it apart."""
    arrays = {name: value.cpu().numpy() for name, value in w.items()}
    return [
        ({name: array[k] for name, array in arrays.items()}, loss) for k, loss in enumerate(losses.tolist())
    ]


_TRAIN: dict[Way, Callable[[Sequence[LocalTask]], list[Trained]]] = {
    "stacked": lambda tasks: _unstack(*train_dense(tasks)),
    "vmapped": lambda tasks: _unstack(*train_vmapped(tasks)),
    "dual": partial(_each, train_dual),
    "single": partial(_each, train_single),
}
