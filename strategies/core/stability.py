"""The stability monitor: one warning when the model swings or grows instead of learning.

Steps that are too large for the staleness of updates, or for the loss, show in the model before they show in a number
that isn't finite. The monitor looks at the model's movement s_k over the k-th *sweep*, as many contributions as there
are clients (a round), and, where the loss is known, at the loss:

    grows     the median length of the last 3 movements is 8 times that of the first 3
    swings    the last 8 movements turn back, cos(s_k, s_{k−1}) or cos(s_k, s_{k−2}) below −1/2 in most, don't get
              shorter, and each is at least a quarter as long as the way from the initial model
    loss      of the last 8 evaluations the loss rose in 3 or more by half of all that had been learnt, and the lowest
              loss fell by less than a tenth of that

Noise at a plateau does none of it: its movements turn back, too, but are short beside the way that the model has
come. Nor does a run on non-IID data with few clients, whose loss swings at first with every client's turn, as long as
it goes on to lower losses. Lengths are measured on at most 4096 entries of the model, evenly spread.
"""

import logging
import math
from collections import deque
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from strategies.core.config import StrategyConfig

log = logging.getLogger("flwr.strategies")

ENTRIES = 4096  # the largest number of values of the model that are watched
WINDOW, SHORT = 8, 3  # numbers of movements, or of losses, in the long and the short window
GROWTH, TURN, WAY = 8.0, -0.5, 0.25
LOST, LEARNT, GAINED = 0.5, 0.1, 0.1


def keys_that_help(config: StrategyConfig, *, has_rounds: bool) -> str:
    """Return the keys of a config by which the model moves less, in words."""
    keys = ["a smaller lr"]
    if config.server_lr:
        keys.append(
            f"a smaller server_lr than {config.server_lr:g}"
            + ("" if has_rounds else " (0: the method's own)")
        )
    if hasattr(config, "buffer_size"):
        keys.append("a larger buffer_size")
    return f"what helps is {' or '.join(keys)}"


class StabilityMonitor:
    """Watches the model and the loss of a run.

    Parameters
    ----------
    cure : callable
        Returns the keys that help, in words.

    Attributes
    ----------
    warning : str
        What was logged; "" as long as the run is stable. After a warning nothing is watched.
    """

    def __init__(self, cure: Callable[[], str]) -> None:
        self._cure = cure
        self.warning = ""
        self._first: NDArray[np.float64] | None = None  # the initial model
        self._last: NDArray[np.float64] | None = None  # the model at the end of the last sweep
        self._part = 0.0  # the part of the sweep under way that is done
        self._moves: deque[NDArray[np.float64]] = deque(maxlen=WINDOW)
        self._at_first = 0.0  # the median length of the first 3 movements
        self._first_loss = math.nan
        self._losses: deque[float] = deque(maxlen=WINDOW)
        self._lowest: deque[float] = deque(maxlen=WINDOW)  # loss until each of these evaluations

    def state(self) -> dict[str, Any]:
        """Return the warning, or else what the next movements and losses are compared with."""
        if self.warning:
            return {"unstable": self.warning}
        state: dict[str, Any] = {}
        if self._first is not None:
            state |= {"began-at": self._first, "last-sweep-at": self._last, "part-of-sweep": self._part}
        if self._moves:
            state |= {"moves": np.stack(self._moves), "moved-at-first": self._at_first}
        if self._losses:
            state |= {
                "losses-before": [self._first_loss, self._lowest[-1]],
                "last-losses": [*self._losses],
                "lowest-losses": [*self._lowest],
            }
        return state

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore a state; a run that hasn't moved or been evaluated lacks movements or losses."""
        self.warning = str(state.get("unstable", ""))
        if "began-at" in state:
            self._first, self._last = np.array(state["began-at"]), np.array(state["last-sweep-at"])
            self._part = float(state["part-of-sweep"])
        self._moves.extend(np.array(move) for move in state.get("moves", ()))
        self._at_first = float(state.get("moved-at-first", 0.0))
        self._first_loss, _ = state.get("losses-before", (math.nan, math.nan))
        self._losses.extend(state.get("last-losses", ()))
        self._lowest.extend(state.get("lowest-losses", ()))

    def note_model(self, model: NDArray[Any], part: float) -> None:
        """Take note of a global model (D,) after an aggregation.

        Parameters
        ----------
        part : float
            The aggregation's part of a sweep: its contributions over the number of clients, 1 for a round.
        """
        self._part += part
        if self.warning or (self._last is not None and self._part < 1 - 1e-9):
            return
        self._part = 0.0
        some = np.array(model[:: max(-(-len(model) // ENTRIES), 1)], dtype=np.float64)
        if self._first is None or self._last is None:
            self._first = self._last = some
            return
        move, self._last = some - self._last, some
        if np.linalg.norm(move) == 0:
            return
        self._moves.append(move)
        lengths = [float(np.linalg.norm(each)) for each in self._moves]
        typical = float(np.median(lengths[-SHORT:])) if len(lengths) >= SHORT else 0.0
        self._at_first = self._at_first or typical
        if typical > GROWTH * self._at_first:
            times = typical / self._at_first
            self._warn(f"the model's movement has grown to {times:.0f} times what it was at first")
        elif self._swings(lengths, float(np.linalg.norm(some - self._first))):
            self._warn("the model swings: its movements turn back and don't get shorter")

    def _swings(self, lengths: list[float], way: float) -> bool:
        """Return True if the movements turn back, given their lengths and that of the way from the initial model."""
        if len(lengths) < WINDOW or min(lengths) < WAY * way or sum(lengths[4:]) < 0.9 * sum(lengths[:4]):
            return False
        units = [move / length for move, length in zip(self._moves, lengths, strict=True)]
        turns = [min(units[k] @ units[k - 1], units[k] @ units[k - 2]) < TURN for k in range(2, WINDOW)]
        return bool(sum(turns) > len(turns) / 2)

    def evaluated(self, loss: float) -> None:
        """Take note of the global model's loss at an evaluation."""
        if self.warning:
            return
        if math.isnan(self._first_loss):
            self._first_loss = lowest = loss
        else:
            lowest = min(self._lowest[-1], loss)
        self._losses.append(loss)
        self._lowest.append(lowest)
        learnt, gained = self._first_loss - lowest, self._lowest[0] - lowest
        if learnt > LEARNT * abs(self._first_loss) and gained < GAINED * learnt:
            rises = [after - before > LOST * learnt for before, after in pairwise(self._losses)]
            if sum(rises) >= SHORT:
                self._warn("the loss swings by more than half of what the model had learnt")

    def _warn(self, what: str) -> None:
        self.warning = f"{what}: the steps are too large; {self._cure()}"
        log.warning("%s", self.warning)
