"""What a client may weigh in a time: bounds of its rate, and weights by its own time, with safeguards in real time.

Devices make their own times. A mean of observed times that one late answer raises would let each answer of a later
burst weigh as much, and a fast device would count more with identical weights, and raise the others' weights with
time-based ones. So with safeguards

    rate      a client's contributions count at most ``rate_bound`` times as often as the median of the others', and
              half as often where fast clients count more by design: they are paid from a bucket of ``CAPACITY`` that
              a contribution of the median client fills by so many. What comes beyond that is discarded.
    weight    d_i = p_i (n − n_i) + r_i, where time-based or observed weights are asked for, and with a robust rule
              over arrivals. n counts the aggregations, this one included (the intervals, if time says when they
              are), n_i is n at the client's last contribution, or when it joined, and r_i what the last bound left.
    bound     η_g d_i ≤ 1: no contribution moves the model further than a round of FedAvg does. r_i is at most 1/η_g.

Σ d_i over a client's contributions is p_i n, whatever the rates are: a late answer has its due once, and an answer of
a burst next to nothing. Our addition; Fraboni et al. 2023 weigh by mean task times (eq. 36).
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

# Contributions that a client can make at once, beyond its rate. With exponential task times of equal means 3 of 1,000
# contributions are beyond the rate with 5 clients, and none of 1,000 with half-normal times.
CAPACITY = 8.0
FAVOURED = (
    0.5  # of the bound where fast clients count more by design: one of five that are hostile then has 1/3
)
FEWEST = 3  # clients; with two, either may be the faulty one


class OwnTime:
    """Counts each client's contributions, and what its next one is due."""

    def __init__(self) -> None:
        self.intervals = 0  # n, where time says when there is an aggregation
        self._arrivals: dict[int, float] = {}
        self._credit: dict[
            int, tuple[float, float]
        ] = {}  # the bucket, and the others' median when it was filled
        self._paid: dict[int, tuple[float, float, int]] = {}  # n_i, r_i, and when the client joined

    def within(self, index: int, present: Mapping[int, object], rate_bound: float) -> bool:
        """Note that a client contributes, and return whether its rate allows it; ``present``: the clients that count.

        A client that joins begins with the median of the others' numbers.
        """
        others = [self._arrivals.get(each, 0.0) for each in present if each != index]
        if not rate_bound or len(others) + 1 < FEWEST:
            return True
        median = float(np.median(others))
        self._arrivals.setdefault(index, median)
        credit, before = self._credit.get(index, (CAPACITY, median))
        credit = min(credit + rate_bound * max(median - before, 0.0), CAPACITY)
        allowed = credit >= 1
        self._credit[index] = credit - allowed, median
        self._arrivals[index] += 1
        return allowed

    def due(self, index: int, p: float, number: int, joined: int) -> float:
        """Return what a client's contribution is due, p_i (n − n_i) + r_i; ``joined``: n when it (re)joined."""
        last, left, since = self._paid.get(index, (float(joined), 0.0, joined))
        if since != joined:  # it was dropped since
            last, left = float(max(last, joined)), 0.0
        return p * max(number - last, 0.0) + left

    def pay(self, index: int, number: int, joined: int, left: float) -> None:
        """Note that a client has contributed to aggregation n, and what is left of its due."""
        self._paid[index] = float(number), left, joined

    def state(self) -> dict[str, Any]:
        """Return the counts for a checkpoint."""
        return {
            "own-intervals": self.intervals,
            "own-arrivals": [[index, *pair] for index, pair in self._numbers().items()],
            "own-paid": [[index, *each] for index, each in self._paid.items()],
        }

    def _numbers(self) -> dict[int, tuple[float, float, float]]:
        return {i: (number, *self._credit.get(i, (CAPACITY, 0.0))) for i, number in self._arrivals.items()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the counts of a checkpoint."""
        self.intervals = int(state.get("own-intervals", 0))
        for index, number, credit, median in state.get("own-arrivals", ()):
            self._arrivals[int(index)], self._credit[int(index)] = number, (credit, median)
        self._paid = {int(i): (last, left, int(since)) for i, last, left, since in state.get("own-paid", ())}
