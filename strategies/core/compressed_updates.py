"""The server's side of compressed updates: fields of requests, reading of replies, compression residuals."""

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
    """The compression of clients' updates in a run.

    Parameters
    ----------
    name : str
        The compressor (``strategies.updates.compressors``), not ``none``.
    seed : int
        The run's seed.
    """

    def __init__(self, name: str, seed: int, run: RunState) -> None:
        self.name, self._seed, self._run = name, seed, run
        self._residual = LeftOut(name)

    def look(self, grid: Grid, *, evaluating: bool) -> None:
        """Find where clients keep their compression residuals; ``evaluating``: clients evaluate while they train."""
        self._residual.look(grid, evaluating=evaluating)

    def fields(self, run_id: int) -> Mapping[str, Any]:
        """Return the fields of a training request that ask for a compressed update."""
        flower = self._run.flower
        return request_fields(self.name, self._seed, run_id, flower.arrayrecord_key, flower.untrained)

    def reader(self, layout: Layout) -> Compression | None:
        """Return the reader of compressed updates of a model."""
        return compressing(self.name, layout, self._run.flower.untrained)

    def size(self, arrays: ArrayRecord) -> int:
        """Return the bytes of a client's compressed reply to a model."""
        return size_of(Layout.of(arrays), self.name, self._run.flower.untrained)

    def whole_model_came(self) -> None:
        """Warn once that clients send their models whole."""
        self._run.warn_once(
            "compression = %r: clients send their models whole; an app follows by the mod `compresses` of "
            "strategies.compression",
            self.name,
        )

    def hand_back(self, clients: Sequence[Client]) -> None:
        """Return the residuals in a resumed run's state to the clients, which are connected now."""
        self._residual.hand_back(self._run.run_id)

    def reset(self) -> None:
        """Do nothing: residuals belong to a run's id."""

    def restore(self, state: Mapping[str, Any]) -> None:
        """Keep a state's residuals until clients are connected."""
        self._residual.restore(state)

    def state(self) -> dict[str, Any]:
        """Return the clients' compression residuals."""
        return self._residual.state(self._run.run_id)
