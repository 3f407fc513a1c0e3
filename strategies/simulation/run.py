"""A whole run, simulated in processes of this machine."""

import logging
import sys
from collections.abc import Callable

from flwr.app import ArrayRecord, ConfigRecord, Context, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import Result, Strategy

from strategies.core.reporter import EvaluateFn
from strategies.flower.internals import RUN_ID, SERVER
from strategies.simulation.grid import Config, ProcessGrid

log = logging.getLogger("flwr.strategies")


def simulate(
    client_app: ClientApp,
    server: Strategy | ServerApp,
    num_clients: int,
    initial_arrays: ArrayRecord | None = None,
    num_rounds: int = 3,
    timeout: float = 3600,
    train_config: ConfigRecord | None = None,
    evaluate_config: ConfigRecord | None = None,
    evaluate_fn: EvaluateFn | None = None,
    *,
    run_config: Config | None = None,
    node_config: Callable[[int], Config] | None = None,
    workers: int = 0,
    progress: bool | None = None,
) -> Result | None:
    """Simulate a run of any ClientApp, unchanged, in processes of this machine, without Ray.

    ::

        from strategies import FedAvg, simulate

        result = simulate(client_app, FedAvg(), num_clients=100, initial_arrays=arrays, num_rounds=10)

    Each worker process imports the app once and answers one message at a time. The model is written once a round, to
    memory that all workers read. A client keeps its ``Context`` with its state from message to message, whichever
    worker answers. An exception of a client is an error reply, as in Flower's simulation, and so is the end of its
    process: a client that crashes is missing in its round, and another process takes the worker's place. The same
    seed gives the same bits as Flower's simulation on Ray, as far as the app itself does.

    A simulation is one machine's. A GPU is shared by all workers, without fractions; Flower's simulation on Ray
    schedules clients on fractions of GPUs and on several machines.

    Parameters
    ----------
    client_app : ClientApp
        The app that every client runs.
    server : Strategy or ServerApp
        A strategy of this library or of Flower's, which is started with the arguments below; or a ServerApp, whose
        main function is called with a Grid and a Context, and starts whatever strategy it likes.
    num_clients : int
        Number of clients.
    initial_arrays, num_rounds, timeout, train_config, evaluate_config, evaluate_fn
        Arguments of the strategy's ``start``; a ServerApp has its own.
    run_config : mapping, optional
        The run config that clients, and a ServerApp, find in their contexts.
    node_config : callable, optional
        Returns the node config of a client, by its index, beside ``partition-id`` and ``num-partitions``.
    workers : int
        Number of processes; 0: as many as there are cores.
    progress : bool, optional
        Whether a line on standard error counts the replies; by default on a terminal.

    Returns
    -------
    Result, optional
        What the strategy's ``start`` returns; None for a ServerApp.

    Raises
    ------
    TypeError
        If a strategy isn't given initial arrays, or a ServerApp is.
    ValueError
        If there is no client, or a negative number of workers.
    RunError
        If no other process can get the app, there are fewer clients than the strategy needs, or the run can't go on.
    """
    own_main = isinstance(server, ServerApp)
    if own_main == (initial_arrays is not None):
        raise TypeError(
            "simulate(initial_arrays): a ServerApp has its own"
            if own_main
            else "simulate() needs initial_arrays, the model that the strategy begins with"
        )
    shown = sys.stderr.isatty() if progress is None else progress
    grid = ProcessGrid(
        client_app,
        num_clients,
        run_config=run_config,
        node_config=node_config,
        workers=workers,
        progress=_show if shown else _ignore,
    )
    with grid:
        log.info("simulation: %d clients in %d processes", num_clients, len(grid.pool.pids))
        if isinstance(server, ServerApp):
            server(grid, Context(RUN_ID, SERVER, {}, RecordDict(), dict(run_config or {})))
            return None
        assert initial_arrays is not None
        return server.start(
            grid, initial_arrays, num_rounds, timeout, train_config, evaluate_config, evaluate_fn
        )


def _ignore(answered: int, pushed: int) -> None:
    pass


def _show(answered: int, pushed: int) -> None:
    """Write the number of replies over the last line of a terminal; erase it after the last reply."""
    text = f"\r{answered} of {pushed} replies" if answered < pushed else "\r\033[K"
    print(text, end="", file=sys.stderr, flush=True)
