"""The engines that run in this process, by name."""

from flwr.serverapp import Grid

from fedapp import client_app
from fedapp.engine.sequential import SequentialGrid
from fedapp.engine.vectorized import VectorizedGrid
from fedapp.names import Way
from fedapp.training.trainer import Trainer


def make_grid(engine: str, num_clients: int, workers: int = 0, way: Way | None = None) -> Grid:
    """Return the Grid of an engine in ``IN_PROCESS``; ``workers`` and ``way`` are the vectorized one's (Trainer)."""
    if engine == "sequential":
        return SequentialGrid(client_app.app, num_clients)
    return VectorizedGrid(client_app.app, num_clients, Trainer(way, workers))
