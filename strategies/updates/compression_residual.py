"""The compression residual of a client (error feedback), in its context's state, and saved with a simulated run.

A client keeps two residuals: the one before its last task and the one after it. When a simulated run is saved, a task
may be running by the virtual clock though its client has already done the work: the resumed run dispatches the task
again, and the client starts from the residual before it. On devices the residual stays on the device, and is lost
when its SuperNode restarts.
"""

import logging
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context
from flwr.serverapp import Grid

from strategies.flower import messages
from strategies.flower.arrays import pack, unpack
from strategies.flower.errors import RunError
from strategies.flower.grids import DEPLOYMENT, RAY, engine_of, innermost
from strategies.flower.internals import simulated_contexts
from strategies.updates.compressors import code_of

log = logging.getLogger("flwr.strategies")

# Records of the context's state: the residuals, and the run and the task that they belong to.
LEFT_OUT, LEFT_OUT_OF = "strategies.left-out", "strategies.left-out-of"
_BEFORE, _SINCE = "before", "since"
_PARTITION = "partition-id"


def left_out_before(context: Context, run: int, task: int) -> Array | None:
    """Return a client's compression residual before this task of this run; None if there is none."""
    of, kept = context.state.get(LEFT_OUT_OF), context.state.get(LEFT_OUT)
    if not isinstance(of, ConfigRecord) or not isinstance(kept, ArrayRecord) or of[messages.RUN] != run:
        return None
    return kept.get(_BEFORE if of[messages.TASK] == task else _SINCE)


def keep_left_out(context: Context, run: int, task: int, before: Array | None, since: Array) -> None:
    """Keep the compression residual before a task, None if there was none, and the residual after it."""
    context.state[LEFT_OUT_OF] = ConfigRecord({messages.RUN: run, messages.TASK: task})
    context.state[LEFT_OUT] = ArrayRecord(
        {_SINCE: since} if before is None else {_BEFORE: before, _SINCE: since}
    )


class LeftOut:
    """Saves the compression residuals of a simulation's clients in the run's state, and restores them.

    Parameters
    ----------
    compression : str
        The strategy's parameter ``compression``.
    """

    def __init__(self, compression: str) -> None:
        self.compression = compression
        self._grid: Grid | None = None
        self._on_ray: Callable[[], list[Context]] | None = None
        self._saved: Mapping[str, Any] | None = None

    def look(self, grid: Grid, *, evaluating: bool) -> None:
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
        code, self._on_ray = code_of(self.compression), None
        self._grid = innermost(grid) if code is not None and code.biased else None
        # On Ray, of training and evaluation at the same time, only the state of the one that ends last is kept.
        if self._grid is not None and engine_of(grid) == RAY and evaluating:
            raise RunError(
                f"compression = {self.compression!r}: a client on Ray that evaluates while it trains loses what its "
                "updates have left out; allowed are qsgd:BITS and none, or no evaluation on clients"
            )

    def state(self, run: int) -> dict[str, Any]:
        """Return the compression residuals of a run's clients: rows for before, if any, and after the last task."""
        rows, of = [], []
        for context in self._contexts():
            kept, task = context.state.get(LEFT_OUT), context.state.get(LEFT_OUT_OF)
            if isinstance(kept, ArrayRecord) and isinstance(task, ConfigRecord) and task[messages.RUN] == run:
                own = [unpack(kept[name]) for name in (_BEFORE, _SINCE) if name in kept]
                of.append([context.node_config[_PARTITION], task[messages.TASK], len(own)])
                rows += own
        return {"left-out": np.stack(rows), "left-out-of": of} if rows else {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Keep a saved state, which ``hand_back`` returns to the clients once they are connected."""
        self._saved = state

    def hand_back(self, run: int) -> None:
        """Return the saved residuals to the connected clients; log a warning where a residual is lost."""
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
                keep_left_out(context, run, task, rows[0] if count > 1 else None, rows[-1])
        if gone:
            log.warning(
                "compression = %r: what clients' updates had left out isn't there any more; they begin anew",
                self.compression,
            )

    def _contexts(self) -> list[Context]:
        """Return the contexts of a simulation's clients that have a partition; none of devices."""
        if self._grid is None or engine_of(self._grid) == DEPLOYMENT:
            return []
        own = getattr(self._grid, "contexts", None)
        if own is not None:
            contexts = list(own.values())
        else:
            self._on_ray = self._on_ray or simulated_contexts(self._grid.run.run_id)
            if not (
                contexts := self._on_ray()
            ):  # Flower creates contexts while the ServerApp is already running
                self._on_ray = None
        return [context for context in contexts if _PARTITION in context.node_config]
