"""The vectorized engine, counted: runs whose models are in no message, and the same runs by messages."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedapp import client_app, server
from fedapp.engine.vectorized import VectorizedGrid
from fedapp.training.trainer import Trainer
from strategies import REGISTRY
from strategies.flower.grids import WorkRequest
from strategies.updates.sums import BlockSum, SumRequest

# Hooks for which the engine has to send a model in a message: one looks at it, one could write beside it.
HOOKS: dict[str, Callable[..., Any]] = {
    "on_local_model": lambda self, client, model: None,
    "extra_records": lambda self, client: {},
}


class Counting(VectorizedGrid):
    """Counts what it is asked for."""

    def __init__(self, clients: int = 20, workers: int = 2) -> None:
        super().__init__(client_app.app, clients, Trainer(None, workers))
        self.rounds_of_sums = self.tasks = self.models = 0

    def sums(self, request: SumRequest) -> Iterator[BlockSum]:
        self.rounds_of_sums += 1
        return super().sums(request)

    def hand_out(self, request: WorkRequest) -> Sequence[str]:
        self.tasks += len(request.tasks)
        return super().hand_out(request)

    def push_messages(self, messages: Iterable[Any]) -> Iterable[str]:
        messages = list(messages)
        self.models += sum(message.metadata.message_type == "train" for message in messages)
        return super().push_messages(messages)


@pytest.fixture
def run_both(configure, tmp_path, monkeypatch):
    """Run a config without models in messages, and then with them, for the sake of a hook."""
    numbers = itertools.count()

    def run(hook: str, clients: int, **values: Any) -> list[Path]:
        paths = []
        for asks in (False, True):
            if asks:
                method = REGISTRY[values["strategy"]]
                own = type(method.__name__, (method,), {hook: HOOKS[hook]})
                monkeypatch.setitem(REGISTRY, values["strategy"], own)
            config = configure(results_dir=str(tmp_path), run_name=f"run-{next(numbers)}", **values)
            grid = Counting(clients)
            paths.append(server.run(grid, server.prepare(config, clients)).path)
            assert (grid.rounds_of_sums + grid.tasks > 0, grid.models > 0) == (not asks, asks)
        return paths

    return run


@pytest.fixture
def too_large(tmp_path):
    """A config of 20 clients' own data, of which client 0's are so large that its model isn't finite."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(200, 5)).astype(np.float32)
    x[:10] *= 1e25
    labels, groups = rng.integers(0, 3, 200), np.arange(20)
    arrays = {"x_train": x, "y_train": labels, "group_train": np.repeat(groups, 10)}
    arrays |= {"x_test": x[100:], "y_test": labels[100:], "group_test": np.repeat(groups, 5)}
    np.savez(tmp_path / "data.npz", **arrays)
    own = {"dataset": "npz", "data_path": str(tmp_path / "data.npz"), "partitioner": "natural"}
    return own | {"normalize": False, "lr": 1.0}
