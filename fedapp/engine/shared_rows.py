"""The rows of all clients in one place, which tasks without messages share, and the rows of each client."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from flwr.app import ConfigRecord

from fedapp import federation
from fedapp.client.request import config_of, device_of, expected_data, local_data, no_rows
from fedapp.config import RunConfig
from fedapp.data import Dataset
from fedapp.engine.nodes import Nodes
from fedapp.federation.rows import Rows, RowsOf
from strategies.flower import messages
from strategies.flower.grids import WorkRequest
from strategies.updates.sums import SumRequest


@dataclass(frozen=True, eq=False)
class SharedRows:
    """The data that the clients of a config share.

    Attributes
    ----------
    record : ConfigRecord
        The config record of every request.
    config : RunConfig
        The run config in ``record``.
    dataset : Dataset
        The data that the model expects.
    rows : Rows
        The rows of all clients, on ``device``.
    offsets : sequence of int
        Where each partition begins in the rows, and where the last one ends.
    nodes : Nodes
        The nodes of the simulation.
    """

    record: ConfigRecord
    config: RunConfig
    dataset: Dataset
    device: torch.device
    rows: Rows
    offsets: Sequence[int]
    nodes: Nodes

    @classmethod
    def of(cls, record: ConfigRecord, nodes: Nodes, rows_of: RowsOf) -> "SharedRows":
        """Look the data up; ``rows_of`` returns the rows of all clients.

        Raises
        ------
        DataError
            If the data aren't there, or aren't those that the model expects.
        """
        config, number = config_of(record), len(nodes)
        device = device_of(config)
        dataset = expected_data(record, federation.dataset_of(config, number))
        offsets = federation.partition_of(config, number).client_offsets.tolist()
        rows = rows_of(config, number, device, dataset.moments)
        return cls(record, config, dataset, device, rows, offsets, nodes)

    def span(self, node_id: int) -> tuple[int, int]:
        """Return where the rows of a node's client begin and end; these rows are loaded then.

        Raises
        ------
        DataError
            If the client has no rows.
        """
        place = self.nodes.partition_of(node_id)
        if not isinstance(place, int) or not 0 <= place < len(self.nodes):
            local_data(self.config, self.record, self.nodes[node_id])  # says what is wrong
        assert isinstance(place, int)
        begin, end = self.offsets[place], self.offsets[place + 1]
        if begin == end:
            raise no_rows(place)
        self.rows.need(begin, end)
        return begin, end


def can_share(request: SumRequest | WorkRequest, nodes: Nodes) -> bool:
    """Tell whether tasks can be done without messages.

    They can if the local rule reads nothing but the model and α, no client has data of its own or a personal model,
    and clients send their updates without noise of their own.
    """
    config = config_of(request.config)
    shared = not config.personal and not any(
        "data-path" in context.node_config for context in nodes.known.values()
    )
    return shared and config.dp == "none" and set(request.rule) <= {messages.ALPHA}
