"""A robust rule without rounds: over a buffer, or over the last updates of the clients that answered last.

The contributions of a buffer are updates of different clients, and count as those of a round do. A method that makes
a model of every arrival has one update at a time, which no rule can judge alone. The rule then takes the last update
of each of the n clients that answered last, n = max(2f + 3, the number that the rule needs). At most f of them are
faulty, however often a faulty client answers, because each client has one update in the window. The model moves by
the rule's result where it would move by the arrival's update, with the method's weight and step.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from strategies.flower.arrays import Vector
from strategies.updates.aggregation import RobustRule, Rule
from strategies.updates.buffers import BufferAverage, Buffers


class ArrivalRule:
    """The updates that a robust rule takes, and its result.

    Parameters
    ----------
    rule : Rule
        The rule.
    window : int
        Number of clients whose last updates count; 0: the updates of each aggregation, and no others.
    bound : float
        S, upper bound of d_i ‖Δ_i‖; 0: no bound.
    """

    def __init__(self, rule: Rule, window: int = 0, bound: float = 0.0) -> None:
        self.rule, self.window, self._bound = rule, window, bound
        # By client index, the latest last: Δ_i (D,), and the buffers (B,) or None.
        self._latest: dict[int, tuple[Vector, Vector | None]] = {}

    def __len__(self) -> int:
        return len(self._latest)

    def take(
        self, arrived: Mapping[int, tuple[Vector, Vector | None]], counts: Callable[[int], bool]
    ) -> None:
        """Take the updates (D,) and the buffers (B,) of an aggregation, by client index.

        Only clients for which ``counts`` returns True have a part in the result.
        """
        if not self.window:
            self._latest = {}
        for index, values in arrived.items():
            self._latest.pop(index, None)
            self._latest[index] = values
        kept = [(index, values) for index, values in self._latest.items() if counts(index)]
        self._latest = dict(kept[-self.window :])

    def result(self, weight: float) -> Vector | None:
        """Return the rule's Δ (D,), given the weight d of every contribution; None if the updates are too few."""
        robust = RobustRule(self.rule, self._bound)
        for _, (update, _) in sorted(self._latest.items()):
            robust.add(weight, update)
        return robust.result([weight] * len(self._latest))

    def buffer_average(self, buffers: Buffers) -> BufferAverage:
        """Return the buffers of the same clients, whose median counts."""
        found = BufferAverage(buffers, robust=True)
        for index, (_, values) in self._latest.items():
            found.add(index, 1.0, values)
        return found

    @property
    def nbytes(self) -> int:
        """Bytes of the updates that are kept for later aggregations."""
        return sum(update.nbytes for update, _ in self._latest.values()) if self.window else 0

    def state(self) -> dict[str, Any]:
        """Return the window; {} if there is none."""
        if not self.window or not self._latest:
            return {}
        updates, buffers = zip(*self._latest.values(), strict=True)
        kept = {"window-of": list(self._latest), "window": np.array(updates)}
        return kept if buffers[0] is None else {**kept, "window-buffers": np.array(buffers)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the window."""
        of = state.get("window-of", ())
        updates = map(np.array, state.get("window", ()))
        buffers = state.get("window-buffers", [None] * len(of))
        self._latest = dict(zip(of, zip(updates, buffers, strict=True), strict=True))
