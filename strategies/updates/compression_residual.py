"""What the compressed updates of a client have left out: in its context's state, and saved with a simulated run.

A client keeps it twice, as it was before its last task and as it is since. When a run is saved, a task may be under
way whose client, in a simulation, has done it long ago: the run that goes on hands it out again, and its client finds
what it found before. On devices it stays where it is, and is gone when a SuperNode starts anew.
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
from strategies.flower.grids import DEPLOYMENT, RAY, engine_of
from strategies.flower.internals import simulated_contexts
from strategies.updates.compressors import code_of

log = logging.getLogger("flwr.strategies")

# Records of the context's state: the arrays, and the run and the task that they belong to.
LEFT_OUT, LEFT_OUT_OF = "strategies.left-out", "strategies.left-out-of"
_BEFORE, _SINCE = "before", "since"
_PARTITION = "partition-id"


def left_out_before(context: Context, run: int, task: int) -> Array | None:
    """Return what a client's updates before this task of this run have left out; None if that is nothing."""
    of, kept = context.state.get(LEFT_OUT_OF), context.state.get(LEFT_OUT)
    if not isinstance(of, ConfigRecord) or not isinstance(kept, ArrayRecord) or of[messages.RUN] != run:
        return None
    return kept.get(_BEFORE if of[messages.TASK] == task else _SINCE)


def keep_left_out(context: Context, run: int, task: int, before: Array | None, since: Array) -> None:
    """Keep what was left out before a task, None for nothing, and what is since."""
    context.state[LEFT_OUT_OF] = ConfigRecord({messages.RUN: run, messages.TASK: task})
    context.state[LEFT_OUT] = ArrayRecord(
        {_SINCE: since} if before is None else {_BEFORE: before, _SINCE: since}
    )


class LeftOut:
    """The server's side of it: what of a simulation's clients goes into a run's state, and back to them.

    Parameters
    ----------
    compression : str
        As a strategy is told.
    """

    def __init__(self, compression: str) -> None:
        self.compression = compression
        self._grid: Grid | None = None
        self._on_ray: Callable[[], list[Context]] | None = None
        self._saved: Mapping[str, Any] | None = None

    def look(self, grid: Grid, *, evaluating: bool) -> None:
        """Look where clients keep it in the run that begins.

        Parameters
        ----------
        evaluating : bool
            Whether clients are asked to evaluate a model while they train.

        Raises
        ------
        RunError
            If they couldn't keep it.
        """
        code, self._on_ray = code_of(self.compression), None
        self._grid = grid if code is not None and code.biased else None
        if (
            self._grid is not None and engine_of(grid) == RAY and evaluating
        ):  # whichever of the two ends last has its state kept
            raise RunError(
                f"compression = {self.compression!r}: a client on Ray that evaluates while it trains loses what its "
                "updates have left out; allowed are qsgd:BITS and none, or no evaluation on clients"
            )

    def state(self, run: int) -> dict[str, Any]:
        """Return what clients have left out in a run: rows of what was before a task, if there is any, and since."""
        rows, of = [], []
        for context in self._contexts():
            kept, task = context.state.get(LEFT_OUT), context.state.get(LEFT_OUT_OF)
            if isinstance(kept, ArrayRecord) and isinstance(task, ConfigRecord) and task[messages.RUN] == run:
                own = [unpack(kept[name]) for name in (_BEFORE, _SINCE) if name in kept]
                of.append([context.node_config[_PARTITION], task[messages.TASK], len(own)])
                rows += own
        return {"left-out": np.stack(rows), "left-out-of": of} if rows else {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a state, once clients are there."""
        self._saved = state

    def hand_back(self, run: int) -> None:
        """Give clients, who are there now, what the state has that the run goes on from; say so where it is gone."""
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
            if not (contexts := self._on_ray()):  # Flower makes them beside a ServerApp that runs already
                self._on_ray = None
        return [context for context in contexts if _PARTITION in context.node_config]
