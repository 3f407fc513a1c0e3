"""The server's side of compressed updates: fields of requests, reading of replies, and clients' residuals.

Clients keep their compression residuals (strategies/updates/compression_residual.py). A checkpoint of a simulation
has them, and a resumed run returns them to its clients.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid

from strategies.clients.roster import Client
from strategies.core.run_state import RunState
from strategies.flower.arrays import Layout, pack, unpack
from strategies.flower.errors import RunError
from strategies.flower.grids import DEPLOYMENT, RAY, engine_of, innermost
from strategies.flower.internals import simulated_contexts
from strategies.updates.compression import Compression, compressing, request_fields, size_of
from strategies.updates.compression_residual import keep_residual, residuals_of
from strategies.updates.compressors import code_of

log = logging.getLogger("flwr.strategies")

_PARTITION = "partition-id"


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
        self._grid: Grid | None = None  # of a run whose clients keep residuals
        self._on_ray: Callable[[], list[Context]] | None = None
        self._saved: Mapping[str, Any] | None = None

    def check_grid(self, grid: Grid, *, evaluating: bool) -> None:
        """Find out where the clients of a new run keep their compression residuals.

        Parameters
        ----------
        evaluating : bool
            Whether clients are asked to evaluate a model while they train.

        Raises
        ------
        RunError
            If the clients couldn't keep their residuals.
        """
        code, self._on_ray = code_of(self.name), None
        self._grid = innermost(grid) if code is not None and code.biased else None
        # On Ray, of training and evaluation at the same time, only the state of the one that ends last is kept.
        if self._grid is not None and engine_of(grid) == RAY and evaluating:
            raise RunError(
                f"compression = {self.name!r}: a client on Ray that evaluates while it trains loses what its "
                "updates have left out; allowed are qsgd:BITS and none, or no evaluation on clients"
            )

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
            "compression = %r: clients send their models whole; a ClientApp compresses its updates by the mod "
            "strategies.compress_updates",
            self.name,
        )

    def hand_back(self, clients: Sequence[Client]) -> None:
        """Return the residuals of a resumed run to the clients, which are connected now; warn if one is lost."""
        state, self._saved = self._saved, None
        if state is None or self._grid is None:
            return
        by_partition = {context.node_config[_PARTITION]: context for context in self._contexts()}
        start, gone = 0, not by_partition
        for partition, task, count in state.get("left-out-of", ()):
            rows = [pack(np.array(row)) for row in state["left-out"][start : start + count]]
            start += count
            if (context := by_partition.get(partition)) is None:
                gone = True
            else:
                keep_residual(context, self._run.run_id, task, rows[0] if count > 1 else None, rows[-1])
        if gone:
            log.warning(
                "compression = %r: what clients' updates had left out isn't there any more; they begin anew",
                self.name,
            )

    def restore(self, state: Mapping[str, Any]) -> None:
        """Keep a state's residuals until clients are connected."""
        self._saved = state

    def state(self) -> dict[str, Any]:
        """Return the clients' residuals: rows for before, if any, and after the last task of each."""
        rows, of = list[np.ndarray](), []
        for context in self._contexts():
            if (found := residuals_of(context, self._run.run_id)) is not None:
                task, residuals = found
                of.append([context.node_config[_PARTITION], task, len(residuals)])
                rows += map(unpack, residuals)
        return {"left-out": np.stack(rows), "left-out-of": of} if rows else {}

    def _contexts(self) -> list[Context]:
        """Return the contexts of a simulation's clients that have a partition; none of devices."""
        if self._grid is None or engine_of(self._grid) == DEPLOYMENT:
            return []
        own = getattr(self._grid, "contexts", None)
        if own is not None:
            contexts = list(own.values())
        else:
            self._on_ray = self._on_ray or simulated_contexts(self._grid.run.run_id)
            contexts = self._on_ray()
            if not contexts:  # Flower creates contexts while the ServerApp is already running
                self._on_ray = None
        return [context for context in contexts if _PARTITION in context.node_config]
