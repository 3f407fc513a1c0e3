"""A Grid whose nodes are regions, each a relay to some of the nodes of another Grid: tiers in a simulation."""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any
from uuid import uuid4

from flwr.app import ConfigRecord, Message
from flwr.serverapp import Grid

from strategies.clients.roster import Client, Roster
from strategies.core.run_state import RunOptions
from strategies.flower import messages
from strategies.flower.exchange import arriving
from strategies.flower.grids import AddressedGrid, Description, GridAround, asked_ids
from strategies.flower.internals import give_id
from strategies.tiers.relay import Relay, check_request
from strategies.tiers.times import RegionTimes
from strategies.updates.sums import BlockSum, SummingGrid, SumRequest


def region_of(index: int, num_devices: int, num_regions: int) -> int:
    """Return the region of a device: each has consecutive indices, ⌊C/R⌋ or ⌈C/R⌉ of them."""
    return index * num_regions // num_devices


def devices_of_regions(num_devices: int, num_regions: int) -> list[range]:
    """Return the indices of each region's devices.

    Raises
    ------
    ValueError
        If there are fewer devices than regions, or no region.
    """
    if not 1 <= num_regions <= num_devices:
        raise ValueError(
            f"tiers: {num_regions} regions of {num_devices} clients; allowed are 1 to {num_devices}"
        )
    starts = [-(-region * num_devices // num_regions) for region in range(num_regions + 1)]
    return [range(begin, end) for begin, end in pairwise(starts)]


class _RegionGrid(GridAround):
    """A region's nodes, of a Grid that may sum; their descriptions are known."""

    def __init__(self, grid: Grid, clients: Sequence[Client]) -> None:
        self.grid, self._all = AddressedGrid(grid, {client.node_id for client in clients}), grid
        # No more than these are waited for.
        number = {messages.NUM_PARTITIONS: len(clients)}
        self._described = {client.node_id: {**client.description, **number} for client in clients}

    def descriptions(self, node_ids: Collection[int], config: ConfigRecord) -> Mapping[int, Description]:
        return {node_id: self._described[node_id] for node_id in node_ids}

    def can_sum(self, request: SumRequest) -> bool:
        return isinstance(self._all, SummingGrid) and self._all.can_sum(request)

    def sums(self, request: SumRequest) -> Iterator[BlockSum]:
        assert isinstance(self._all, SummingGrid)
        return self._all.sums(request)


class TieredGrid(GridAround):
    """The regions of a simulation: a strategy that runs on this Grid has regions as its clients.

    ::

        FedFix().start(TieredGrid(grid, 20, edge_rounds=2), initial_arrays, num_rounds=50)

    Region r has consecutive devices (``devices_of_regions``). It answers a training message with what ``edge_rounds``
    rounds among all its devices make of the model (``strategies.tiers.relay``). One region works at a time. In
    virtual time its task takes as long as its rounds, each of which takes as long as its slowest device.

    The strategy must weigh its clients by examples (``client_weights = "samples"``, the default): with
    ``client_weights="uniform"`` here, a region says the number of its devices in place of their examples, so that
    devices count equally.

    Parameters
    ----------
    grid : Grid
        The devices, all of which answer ``query.describe``.
    num_regions : int
        R.
    edge_rounds : int
        κ₂, the rounds in a region for each round, or task, of the strategy.
    timeout : float
        Real seconds to wait for a device's reply.
    run_options : RunOptions, optional
        What is given to the regions' runs, such as ``should_stop``.
    options
        Of the regions' rounds: see ``strategies.tiers.relay.Relay``.
    """

    def __init__(
        self,
        grid: Grid,
        num_regions: int,
        edge_rounds: int = 1,
        timeout: float = 3600.0,
        run_options: RunOptions | None = None,
        **options: Any,
    ) -> None:
        self.grid, self.num_regions = grid, num_regions
        self._options = run_options or RunOptions()
        self._new_relay: dict[str, Any] = {"edge_rounds": edge_rounds, "timeout": timeout, **options}
        self._edge_rounds = edge_rounds
        self._roster = Roster(timeout=timeout, should_stop=self._options.should_stop)
        self._relays: dict[int, Relay] = {}  # by node id
        self._devices: list[range] = []
        self._waiting: dict[str, Message] = {}  # by message id
        self._replies: dict[str, Message] = {}

    def close(self) -> None:
        """End the regions' runs."""
        for relay in self._relays.values():
            relay.close()

    def time_scenario(self, name: str, num_clients: int, seed: int) -> RegionTimes:
        """Return the task times of the regions under the devices' time scenario."""
        return RegionTimes(name, self._devices, self._edge_rounds, seed)

    def get_node_ids(self) -> Iterable[int]:
        """Return the ids of the regions' nodes, 1 to R."""
        return list(range(1, self.num_regions + 1))

    def get_nodes(self) -> Any:
        """Refuse: a region is no node of Flower's."""
        raise NotImplementedError("get_node_ids returns the ids of the regions")

    def descriptions(self, node_ids: Collection[int], config: ConfigRecord) -> Mapping[int, Description]:
        """Return the descriptions of regions: their index, their number, and how much each counts."""
        if not self._relays:
            self._open(config)
        return {
            node_id: {
                messages.PARTITION_ID: node_id - 1,
                messages.NUM_PARTITIONS: self.num_regions,
                messages.NUM_EXAMPLES: self._relays[node_id].size(config),
            }
            for node_id in node_ids
            if node_id in self._relays
        }

    def _open(self, config: ConfigRecord) -> None:
        """Ask the devices who they are, and make the relays."""
        clients = self._roster.refresh(self.grid, config)
        if self._options.should_stop():
            return
        number = max(client.index for client in clients) + 1
        self._devices = devices_of_regions(number, self.num_regions)
        by_region: dict[int, list[Client]] = {region: [] for region in range(self.num_regions)}
        for client in clients:
            by_region[region_of(client.index, number, self.num_regions)].append(client)
        for region, own in by_region.items():
            grid = _RegionGrid(self.grid, own)
            self._relays[region + 1] = Relay(grid, run_options=self._options, **self._new_relay)

    def push_messages(self, requests: Iterable[Message]) -> Iterable[str]:
        """Queue messages to regions; return their ids.

        Raises
        ------
        RunError
            If the strategy asks for what single devices alone can do.
        """
        ids = []
        for message in requests:
            give_id(message, str(uuid4()))
            if message.metadata.message_type == messages.TRAIN:
                check_request(message)
            self._waiting[message.metadata.message_id] = message
            ids.append(message.metadata.message_id)
        return ids

    def pull_messages(
        self, message_ids: Iterable[str] | None = None, *, reply_to_message_ids: Iterable[str] | None = None
    ) -> Iterable[Message]:
        """Return the replies that are there; if there is none, let one region work."""
        ids = asked_ids(reply_to_message_ids, message_ids)
        wanted = [*self._waiting, *self._replies] if ids is None else ids
        if not any(name in self._replies for name in wanted):
            name = next((name for name in wanted if name in self._waiting), None)
            if name is not None:
                message = self._waiting.pop(name)
                self._replies[name] = self._relays[message.metadata.dst_node_id](message)
        return [self._replies.pop(name) for name in wanted if name in self._replies]

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Push messages and return the replies that arrive within ``timeout`` seconds; None: wait for all."""
        return [reply for _, reply in arriving(self, messages, math.inf if timeout is None else timeout)]
