"""What a client may weigh in a time: bounds of its rate, and weights by its own time, with safeguards in real time.

Devices make their own times. A mean of observed times that one late answer raises would let each answer of a later
burst weigh as much, and a fast device would count more with identical weights, and raise the others' weights with
time-based ones. So with safeguards

    rate      a client's contributions count at most ``rate_bound`` times as often as the median of the others': they
              are paid from a bucket of ``CAPACITY`` that a contribution of the median client fills by so many. What
              comes beyond that is discarded.
    course    where fast clients count more by design, a client's contributions count unseen as often as the median
              of the others', from a bucket of ``UNSEEN``. What it sends more often counts where it agrees with a mean
              of last updates, as many of each client: where their cosine is ``OPPOSED`` or more. Where the server has
              no single updates (secure sums), ``rate_bound`` is halved instead.
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

from strategies.flower.arrays import Vector

# Contributions that a client can make at once, beyond its rate. With exponential task times of equal means 3 of 1,000
# contributions are beyond the rate with 5 clients, and none of 1,000 with half-normal times.
CAPACITY = 8.0
UNSEEN = 3.0  # likewise, of the contributions that count unseen
HALVED = 0.5  # of the bound, where single updates can't be seen: one of five that are hostile then has 1/3
FEWEST = 3  # clients; with two, either may be the faulty one
OPPOSED = -0.05  # the cosine of an update and the course below which they are opposed
FOLLOWS = 4  # updates of each client over which the mean of the last updates goes


class Bucket:
    """What each client may still send: a bucket that a contribution of the others' median client fills.

    Parameters
    ----------
    capacity : float
        Contributions that fit in.
    """

    def __init__(self, capacity: float) -> None:
        self._capacity = capacity
        # By client index: what is in the bucket, and the others' median when it was filled.
        self.credit: dict[int, tuple[float, float]] = {}

    def pays(self, index: int, median: float, rate: float) -> bool:
        """Pay for a contribution of a client; return False if there is too little; ``median``: of the others."""
        credit, before = self.credit.get(index, (self._capacity, median))
        credit = min(credit + rate * max(median - before, 0.0), self._capacity)
        self.credit[index] = credit - (enough := credit >= 1), median
        return enough


def opposed(course: Vector, update: Vector) -> bool:
    """Return whether an update (D,) goes against the course (D,) by more than the noise of honest ones."""
    return float(course @ update) < OPPOSED * float(np.linalg.norm(course) * np.linalg.norm(update))


def _median(numbers: Mapping[int, float], index: int, present: Mapping[int, object]) -> float:
    """Return the median number of the clients other than one."""
    return float(np.median([numbers.get(each, 0.0) for each in present if each != index]))


def _count(numbers: dict[int, float], index: int, present: Mapping[int, object]) -> None:
    """Add 1 to a client's number; a client that joins begins with the median of the others'."""
    if len(present.keys() | {index}) >= FEWEST:
        numbers[index] = numbers.get(index, _median(numbers, index, present)) + 1


class OwnTime:
    """Counts each client's contributions, and what its next one is due."""

    def __init__(self) -> None:
        self.intervals = 0  # n, where time says when there is an aggregation
        self._arrivals: dict[int, float] = {}
        self._unopposed: dict[int, float] = {}  # contributions that weren't discarded here, nor by the method
        self._all, self._unseen, self._leads = Bucket(CAPACITY), Bucket(UNSEEN), Bucket(1.0)
        self._course: Vector | None = None  # (D,), a mean of last updates, equally many of each client
        self._followed = 0  # their number
        self._paid: dict[int, tuple[float, float, int]] = {}  # n_i, r_i, and when the client joined

    def note(self, index: int, present: Mapping[int, object]) -> None:
        """Note that a client has answered, with work that counts or not; ``present``: the clients that count."""
        _count(self._arrivals, index, present)

    def within(self, index: int, present: Mapping[int, object], rate_bound: float) -> bool:
        """Return whether a client's rate allows its contribution."""
        if not rate_bound or len(present.keys() | {index}) < FEWEST:
            return True
        return self._all.pays(index, _median(self._arrivals, index, present), rate_bound)

    def agrees(self, index: int, present: Mapping[int, object], update: Vector) -> bool:
        """Return whether an update (D,) counts: unseen by its client's rate, or because it goes the others' way."""
        if len(present.keys() | {index}) < FEWEST:
            return True
        median = _median(self._unopposed, index, present)
        known = len(self._leads.credit.keys() & present.keys()) >= min(FEWEST, len(present) // 2 + 1)
        if not self._unseen.pays(index, median, 1.0):
            if not known or self._course is None or opposed(self._course, update):
                return False
        elif self._leads.pays(index, median, 1.0):
            self._followed = min(self._followed + 1, FOLLOWS * len(present))
            if self._course is None:
                self._course = np.zeros(len(update))
            self._course += (update - self._course) / self._followed
        _count(self._unopposed, index, present)
        return True

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
        course = {} if self._course is None else {"own-course": self._course, "own-followed": self._followed}
        return {
            "own-intervals": self.intervals,
            "own-arrivals": list(self._arrivals.items()),
            "own-unopposed": list(self._unopposed.items()),
            "own-credit": [[index, *each] for index, each in self._all.credit.items()],
            "own-unseen": [[index, *each] for index, each in self._unseen.credit.items()],
            "own-leads": [[index, *each] for index, each in self._leads.credit.items()],
            "own-paid": [[index, *each] for index, each in self._paid.items()],
            **course,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the counts of a checkpoint."""
        self.intervals = int(state.get("own-intervals", 0))
        self._arrivals = {int(index): number for index, number in state.get("own-arrivals", ())}
        self._unopposed = {int(index): number for index, number in state.get("own-unopposed", ())}
        for bucket, name in (
            (self._all, "own-credit"),
            (self._unseen, "own-unseen"),
            (self._leads, "own-leads"),
        ):
            bucket.credit = {int(index): (credit, median) for index, credit, median in state.get(name, ())}
        self._paid = {int(i): (last, left, int(since)) for i, last, left, since in state.get("own-paid", ())}
        if (course := state.get("own-course")) is not None:
            self._course, self._followed = np.array(course, np.float64), int(state["own-followed"])
