"""Tiers: the strategy's clients are regions of clients (``strategies.tiers``).

In a simulation (``tiers = regions:R``) the regions' rounds run in this process. On devices (``tiers = relays``) each
SuperNode is a relay, and the rounds of its region run on another SuperLink (``fedapp.worker.region``).
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from flwr.serverapp import Grid

from fedapp.config import ConfigError, RunConfig
from fedapp.data import Partition
from strategies import FederatedStrategy
from strategies.core.run_state import RunOptions
from strategies.flower import messages
from strategies.tiers.grid import TieredGrid, devices_of_regions
from strategies.tiers.times import RegionTimes

NONE, RELAYS = "none", "relays"


def keys_of_clients(config: RunConfig) -> dict[str, Any]:
    """Return keys that are about single clients, with the values for a strategy whose clients are regions.

    A region says how much its clients count together. The number of relays is that of connected SuperNodes.
    """
    if config.tiers == NONE:
        return {}
    return {"client_weights": "samples"} | ({} if config.tiers == RELAYS else {"min_clients": 1})


def fields_for_relays(config: RunConfig) -> dict[str, Any]:
    """Return the fields by which a relay knows its region's rounds, and a device that it is no relay."""
    if config.tiers != RELAYS:
        return {}
    return {messages.EDGE_ROUNDS: config.edge_rounds, messages.WEIGHTS: config.client_weights}


def check_place(config: RunConfig, *, on_devices: bool) -> None:
    """Raise ConfigError if devices are to be divided into regions, or simulated clients are to be relays."""
    if on_devices and config.tiers not in (NONE, RELAYS):
        raise ConfigError(
            f"tiers = {config.tiers!r}: only a simulation divides its clients; allowed are none, and relays on a "
            "SuperLink of relays"
        )
    if not on_devices and config.tiers == RELAYS:
        raise ConfigError(
            "tiers = 'relays': only SuperNodes are relays; a simulation has none, and regions:R with R regions"
        )


def regions_of(config: RunConfig, num_clients: int) -> Sequence[range]:
    """Return the indices of each region's clients in a simulation; () without such regions.

    Raises
    ------
    ConfigError
        If there are fewer clients than regions.
    """
    if config.tiers in (NONE, RELAYS):
        return ()
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
    """Return the Grid of a simulation's regions on which a strategy is started; else ``grid`` itself."""
    if config.tiers in (NONE, RELAYS):
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
        compression_down=config.compression_down,
        seed=config.seed,
        untrained=strategy.flower_options.untrained,
    )
