"""What a method remembers from one aggregation to the next: saved with a run, taken up by one that goes on."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from strategies.core.client_vectors import ClientVectors

_VALUES, _VECTORS = "memory:", "vectors:"  # how the names begin under which a state holds them


class Memory(dict[str, Any]):
    """Arrays and values that JSON holds, by name, and vectors of each client.

    Attributes
    ----------
    vectors : dict of str to ClientVectors
        By name.
    """

    def __init__(self) -> None:
        super().__init__()
        self.vectors: dict[str, ClientVectors] = {}

    def state(self) -> dict[str, Any]:
        """Return what a run goes on from."""
        state = {f"{_VALUES}{name}": value for name, value in self.items()}
        for name, vectors in self.vectors.items():
            state |= vectors.state(f"{_VECTORS}{name}")
        return state

    @classmethod
    def restored(cls, state: Mapping[str, Any]) -> "Memory":
        """Return the memory of a state."""
        memory = cls()
        for key, value in state.items():
            if key.startswith(_VALUES):
                kept = np.array(value) if isinstance(value, np.ndarray) else value
                memory[key.removeprefix(_VALUES)] = kept
            elif key.startswith(_VECTORS) and f"{key}-initial" in state:
                vectors = ClientVectors.restored(state, key)
                assert vectors is not None
                memory.vectors[key.removeprefix(_VECTORS)] = vectors
        return memory
