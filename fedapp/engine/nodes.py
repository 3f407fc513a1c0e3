"""The nodes of a simulation in this process: their contexts, made at their first use, and their descriptions."""

from collections.abc import Iterator, Mapping, MutableMapping, Sequence

import numpy as np
import torch
from flwr.app import ConfigRecord, Context, RecordDict, UserConfig

from fedapp import federation
from fedapp.client.handlers import USER_ERRORS, description
from fedapp.client.request import config_of, device_of, expected_data, use_threads
from strategies.flower.grids import Description
from strategies.flower.internals import RUN_ID
from strategies.flower.simulated import SimulatedContext

PARTITION_ID, NUM_PARTITIONS = "partition-id", "num-partitions"


class Nodes(MutableMapping[int, Context]):
    """Contexts by node id, which persist: node i + 1 has partition i, unless its node config is changed.

    Parameters
    ----------
    number : int
        Number of nodes; their ids are 1 to ``number``.

    Attributes
    ----------
    known : mapping of int to Context
        Contexts of the nodes that have been used; all others have the config that they begin with.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.known: dict[int, Context] = {}

    def partition_of(self, node_id: int) -> object:
        """Return the partition in a node's config, without making its context."""
        known = self.known.get(node_id)
        return node_id - 1 if known is None else known.node_config.get(PARTITION_ID)

    @property
    def untouched(self) -> bool:
        """Whether the config of every node is the one it began with."""
        return all(context.node_config == self._config_of(node_id) for node_id, context in self.known.items())

    def _config_of(self, node_id: int) -> UserConfig:
        return {PARTITION_ID: node_id - 1, NUM_PARTITIONS: self.number}

    def __getitem__(self, node_id: int) -> Context:
        if (context := self.known.get(node_id)) is None:
            if not 1 <= node_id <= self.number:
                raise KeyError(node_id)
            config = self._config_of(node_id)
            context = SimulatedContext(RUN_ID, node_id, config, RecordDict(), run_config={})
            self.known[node_id] = context
        return context

    def __setitem__(self, node_id: int, context: Context) -> None:
        self.known[node_id] = context

    def __delitem__(self, node_id: int) -> None:
        raise TypeError("a simulation's nodes can't be removed")

    def __iter__(self) -> Iterator[int]:
        return iter(range(1, self.number + 1))

    def __len__(self) -> int:
        return self.number


def descriptions(
    node_ids: Sequence[int], record: ConfigRecord, nodes: Nodes, device: torch.device | None = None
) -> Mapping[int, Description]:
    """Return the descriptions of the nodes whose clients have rows of the common data; others must be sent a request.

    Clients train on ``device``, by default the one that the config says for this process.
    """
    if not nodes.untouched:
        return {}
    try:
        config, number = config_of(record), len(nodes)
        expected_data(record, federation.dataset_of(config, number))
        sizes = np.diff(federation.partition_of(config, number).client_offsets).tolist()
        device = device or device_of(config)
        use_threads(config)
    except USER_ERRORS:
        return {}
    return {
        node_id: description(sizes[node_id - 1], device, node_id - 1, number)
        for node_id in node_ids
        if sizes[node_id - 1]
    }
