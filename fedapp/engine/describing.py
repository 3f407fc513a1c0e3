"""What clients in this process say of themselves, without a message to each: it follows from the partition.

Each answers to a message with the same (``fedapp.client.handlers.describe``), a tenth of a millisecond later.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from flwr.app import ConfigRecord

from fedapp import federation
from fedapp.client.device import device_of
from fedapp.client.handlers import USER_ERRORS, description
from fedapp.client.local_data import expected_data
from fedapp.client.request import config_of, use_threads
from fedapp.engine.nodes import Nodes
from strategies.flower.grids import Description


def descriptions(
    node_ids: Sequence[int], record: ConfigRecord, nodes: Nodes, device: torch.device | None = None
) -> Mapping[int, Description]:
    """Return the descriptions of those that have rows of the common data; the others have reasons to tell.

    They train on ``device``; by default on this process's.
    """
    if not nodes.untouched:
        return {}
    try:
        config, number = config_of(record), len(nodes)
        expected_data(config, record, number)
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
