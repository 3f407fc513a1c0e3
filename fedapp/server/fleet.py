"""What the tasks of a run weigh, which their times follow from where the devices are known by what they can do."""

from collections.abc import Callable

import numpy as np
from flwr.app import ArrayRecord
from numpy.typing import NDArray
from torch import Tensor, nn

from fedapp.config import ConfigError, RunConfig
from fedapp.training import work as local_work
from fedapp.training.flop import flop_of
from strategies.clients.roster import Client
from strategies.flower import messages
from strategies.timing.availability import ALWAYS, make_availability
from strategies.timing.task_costs import TaskCost
from strategies.timing.time_scenario import TimeScenario


def work_of_clients(config: RunConfig, num_clients: int) -> list[int]:
    """Return E_k, the local epochs or local steps of every client, by index; ValueError if they can't be told."""
    slowness = TimeScenario(config.time_scenario, num_clients, config.seed).slowness
    usual = config.local_epochs or config.local_steps
    return local_work.local_work(config.step_heterogeneity, usual, slowness, config.seed)


def check_fleet(config: RunConfig, num_clients: int) -> None:
    """Read the files of availability and of devices, if the config names any; ValueError if one isn't valid."""
    if config.clock == "wall":
        return
    if config.availability != ALWAYS:
        make_availability(config.availability, num_clients, config.seed)
    devices = TimeScenario(config.time_scenario, num_clients, config.seed).devices
    if devices is not None and config.task_work == "flop" and not devices.says_speed:
        raise ConfigError(
            f"task-work = 'flop': time-scenario = {config.time_scenario!r} says no speed in operations a second; "
            f"allowed is such as {config.time_scenario},1e9"
        )


def work_of(
    config: RunConfig,
    num_clients: int,
    model: nn.Module,
    rows: Callable[[], Tensor],
    reference_steps: int = 0,
) -> Callable[[int, float], float]:
    """Return the function that gives the work of a client's task from the client's index and number of examples.

    Parameters
    ----------
    reference_steps : int
        Number of local steps that take the time scenario's time, where the strategy sets the steps of each task; 0:
        the config says how much clients work.
    rows : callable
        Returns inputs (n, ...) of some rows, on which operations are counted.

    Raises
    ------
    ConfigError
        If the model has no operation that is counted.
    """
    each = 1.0
    if config.task_work == "flop" and not (each := flop_of(model, rows())):
        raise ConfigError(
            f"task-work = 'flop': of model = {config.model!r} nothing is counted (products of matrices, "
            "convolutions); allowed is examples"
        )
    listed = "none"
    if config.step_heterogeneity != "none":
        listed = local_work.to_text(work_of_clients(config, num_clients))

    def work(client: int, num_examples: float) -> float:
        epochs, steps = 0, reference_steps
        if not reference_steps:
            epochs, steps = local_work.of_client(listed, config.local_epochs, config.local_steps, client)
        return each * local_work.examples_of(num_examples, config.batch_size, epochs, steps)

    return work


def by_client(work: Callable[[int, float], float], sizes: NDArray[np.int64]) -> Callable[[Client], float]:
    """Return the function that gives a client's work, by its reported size or else its size in the partition."""

    def told(client: Client) -> float:
        known = int(sizes[client.index]) if client.index < len(sizes) else 0
        return work(client.index, client.num_examples or known)

    return told


def task_times(
    config: RunConfig, work: Callable[[int, float], float], sizes: NDArray[np.int64], arrays: ArrayRecord
) -> NDArray[np.float64]:
    """Return the seconds (C,) of the clients' tasks, by their sizes (C,) and the model that goes both ways."""
    scenario = TimeScenario(config.time_scenario, len(sizes), config.seed)
    num_bytes = messages.num_bytes(arrays)
    task_costs = (
        TaskCost(work(client, size), num_bytes, num_bytes) for client, size in enumerate(sizes.tolist())
    )
    return np.array([scenario.mean(client, load) for client, load in enumerate(task_costs)])
