"""The engines that run clients in this process, by name."""

from flwr.serverapp import Grid

from fedapp import client_app
from fedapp.engine.sequential import SequentialGrid

IN_PROCESS = ("sequential",)


def make_grid(engine: str, num_clients: int) -> Grid:
    """Return the Grid of an engine in ``IN_PROCESS``."""
    return SequentialGrid(client_app.app, num_clients)
