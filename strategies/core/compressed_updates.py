"""The server's side of compressed updates: what requests ask for, how replies are read, what is left out."""

from collections.abc import Mapping, Sequence
from typing import Any

from flwr.app import ArrayRecord
from flwr.serverapp import Grid

from strategies.clients.roster import Client
from strategies.core.run_state import RunState
from strategies.flower.arrays import Layout
from strategies.updates.compression import Compression, compressing, request_fields, size_of
from strategies.updates.compression_residual import LeftOut


class CompressedUpdates:
    """A run whose clients are asked to compress their updates.

    Parameters
    ----------
    name : str
        The code (``strategies.updates.compressors``), not ``none``.
    seed : int
        Of the run.
    """

    def __init__(self, name: str, seed: int, run: RunState) -> None:
        self.name, self._seed, self._run = name, seed, run
        self._residual = LeftOut(name)

    def look(self, grid: Grid, *, evaluating: bool) -> None:
        """Look where clients keep what their updates leave out; ``evaluating``: they evaluate while they train."""
        self._residual.look(grid, evaluating=evaluating)

    def fields(self, run_id: int) -> Mapping[str, Any]:
        """Return the fields of a training request that ask for a compressed update."""
        flower = self._run.flower
        return request_fields(self.name, self._seed, run_id, flower.arrayrecord_key, flower.untrained)

    def reader(self, layout: Layout) -> Compression | None:
        """Return what reads compressed updates of a model."""
        return compressing(self.name, layout, self._run.flower.untrained)

    def size(self, arrays: ArrayRecord) -> int:
        """Return how many bytes a client's reply to a model takes."""
        return size_of(Layout.of(arrays), self.name, self._run.flower.untrained)

    def whole_model_came(self) -> None:
        """Warn once that clients don't compress."""
        self._run.warn_once(
            "compression = %r: clients send their models whole; an app follows by the mod `compresses` of "
            "strategies.compression",
            self.name,
        )

    def hand_back(self, clients: Sequence[Client]) -> None:
        """Give clients, who are there now, what a resumed run's state has of them."""
        self._residual.hand_back(self._run.run_id)

    def reset(self) -> None:
        """Keep nothing of an earlier run: what its clients have left out belongs to its number."""

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a state, once clients are there."""
        self._residual.restore(state)

    def state(self) -> dict[str, Any]:
        """Return what clients have left out so far."""
        return self._residual.state(self._run.run_id)
