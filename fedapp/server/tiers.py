"""Tiers of a simulation: the strategy's clients are regions of clients (``strategies.tiers``)."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from flwr.serverapp import Grid

from fedapp.config import ConfigError, RunConfig
from fedapp.data import Partition
from strategies import FederatedStrategy
from strategies.core.run_state import RunOptions
from strategies.tiers.grid import TieredGrid, devices_of_regions
from strategies.tiers.times import RegionTimes

NONE = "none"

# Keys that are about single clients, and what a strategy has in their place whose clients are regions: a region says
# how much its clients count together.
OF_CLIENTS: dict[str, Any] = {"client_weights": "samples", "min_clients": 1}


def regions_of(config: RunConfig, num_clients: int, *, on_devices: bool = False) -> Sequence[range]:
    """Return the indices of each region's clients; () without tiers.

    Raises
    ------
    ConfigError
        If there are fewer clients than regions, or clients are devices.
    """
    if config.tiers == NONE:
        return ()
    if on_devices:
        raise ConfigError(f"tiers = {config.tiers!r}: only a simulation divides its clients; allowed is none")
    number = int(config.tiers.partition(":")[2])
    if number > num_clients:
        raise ConfigError(
            f"tiers = {config.tiers!r}: there are {num_clients} clients; allowed are {num_clients} or less"
        )
    return devices_of_regions(num_clients, number)


def names_of(regions: Sequence[range]) -> tuple[str, ...]:
    """Return the names of regions: which clients they have."""
    return tuple(f"clients {own.start} to {own.stop - 1}" for own in regions)


def by_region(partition: Partition, regions: Sequence[range]) -> Partition:
    """Return the partition among regions in place of clients."""
    starts = [own.start for own in regions]
    return replace(partition, client_offsets=partition.client_offsets[np.array([*starts, regions[-1].stop])])


def task_times(config: RunConfig, regions: Sequence[range]) -> RegionTimes:
    """Return the task times of regions in virtual time."""
    scenario = "F0" if config.clock == "wall" else config.time_scenario
    return RegionTimes(scenario, regions, config.edge_rounds, config.seed)


def tiered(grid: Grid, config: RunConfig, strategy: FederatedStrategy, timeout: float) -> Grid:
    """Return the Grid of the regions on which a strategy is started; ``grid`` itself without tiers."""
    if config.tiers == NONE:
        return grid
    given = strategy.run_options
    options = RunOptions(should_stop=lambda: given.should_stop(), frozen=given.frozen)
    given.frozen = None  # the regions send them to their clients
    return TieredGrid(
        grid,
        int(config.tiers.partition(":")[2]),
        config.edge_rounds,
        timeout,
        options,
        client_weights=config.client_weights,
        seed=config.seed,
        untrained=strategy.flower_options.untrained,
    )
