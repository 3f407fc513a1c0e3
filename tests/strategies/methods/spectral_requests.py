"""What the spectral method sends, as arrays."""

import numpy as np
from flwr.app import ArrayRecord, Message

# Clients of the tests that compute u in a second way.
MANY = [3.0, -1.0, 2.0, 0.5, -4.0, 7.0]


def vectors(record: ArrayRecord) -> np.ndarray:
    return np.concatenate([array.numpy().ravel() for array in record.values()])


def sent(request: Message, record: str) -> np.ndarray:
    return vectors(request.content.array_records[record])
