"""The models that clients were sent last, of methods whose clients go on from their own.

Each model is kept once, as long as a client has it.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from strategies.flower.arrays import Layout, Vector

_MODELS, _VERSIONS, _ROUNDS = "sent-models", "sent-versions", "sent-rounds"  # in a checkpoint


class SentModels:
    """Which round's model each client has, and these models, as a part of a strategy's state.

    Parameters
    ----------
    layout : callable
        Returns the layout of the model: models are kept in the narrowest dtype that holds them exactly.

    Attributes
    ----------
    rounds : dict of int to int
        The round after which each client was sent its model, by client index; 0: the initial model.
    """

    def __init__(self, layout: Callable[[], Layout]) -> None:
        self._layout = layout
        self.rounds: dict[int, int] = {}
        self._models: dict[int, NDArray[Any]] = {}  # (D,), by round

    def send(self, clients: Iterable[int], number: int) -> None:
        """Note that clients, by index, have the model of a round, which ``hold`` keeps before it changes."""
        self.rounds |= dict.fromkeys(clients, number)

    def hold(self, number: int, model: Vector) -> None:
        """Keep the model (D,) of a round if a client has it, and drop those that no client has any more."""
        had = set(self.rounds.values())
        if number in had and number not in self._models:
            self._models[number] = model.astype(self._layout().narrow)
        self._models = {each: kept for each, kept in self._models.items() if each in had}

    def get(self, client: int) -> Vector:
        """Return the model (D,) that a client has."""
        return np.asarray(self._models[self.rounds[client]], dtype=np.float64)

    @property
    def num_bytes(self) -> int:
        """The size of the models in bytes."""
        return sum(model.nbytes for model in self._models.values())

    def state(self) -> dict[str, Any]:
        """Return the models for a checkpoint, and who has them."""
        models = list(self._models.values())
        return {
            _MODELS: np.stack(models) if models else np.empty((0, 0), np.float32),
            _VERSIONS: list(self._models),
            _ROUNDS: np.array(list(self.rounds.items()), dtype=np.int64).reshape(-1, 2),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the models."""
        self._models = dict(zip(state[_VERSIONS], np.array(state[_MODELS]), strict=True))
        self.rounds = dict(np.asarray(state[_ROUNDS]).tolist())
