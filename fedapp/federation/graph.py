"""The graph of a division's clients, as a run without privacy of directions (message-epsilon = 0) would have it."""

import numpy as np

from fedapp import federation
from fedapp.config import RunConfig
from fedapp.data.direction import client_direction
from strategies.clients.client_graph import DirectionGraph


def graph_arrays(config: RunConfig, num_clients: int) -> dict[str, np.ndarray]:
    """Return the graph of a partition, without noise: directions (C, d), and (C, C) arrays from them."""
    partition = federation.partition_of(config, num_clients)
    dataset = federation.with_moments(config, federation.dataset_of(config, num_clients), partition)
    vectors = np.stack(
        [client_direction(dataset, partition.client(i), config.normalize) for i in range(num_clients)]
    )
    clients = DirectionGraph(config.message_floor, config.neighbours)
    clients.build(range(num_clients), vectors)
    return clients.snapshot()
