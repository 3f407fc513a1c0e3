"""When the last contribution of each client arrived, of methods in which what the server keeps of a client ages."""

import numpy as np
from numpy.typing import NDArray

from strategies.core.run_state import Memory

ARRIVED = "arrived"


def last_arrivals(memory: Memory, size: int) -> NDArray[np.int64]:
    """Return the aggregation of each client's last contribution, by client index, of ``size`` clients or more.

    It is 0 until one is entered. The array is a part of the memory, to be written to.
    """
    known: NDArray[np.int64] = memory.get(ARRIVED, np.empty(0, dtype=np.int64))
    if len(known) < size:
        memory[ARRIVED] = known = np.append(known, np.zeros(size - len(known), dtype=np.int64))
    return known
