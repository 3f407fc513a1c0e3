"""What a client may weigh in a time: bounds of its rate, and weights by its own time, with safeguards in real time.

Devices make their own times. A mean of observed times that one late answer raises would let each answer of a later
burst weigh as much, and a fast device would count more with identical weights, and raise the others' weights with
time-based ones. So with safeguards

    rate      a client's contributions count at most ``rate_bound`` times as often as the median of the others': they
              are paid from a bucket of ``CAPACITY`` that a contribution of the median client fills by so many. What
              comes beyond that is discarded.
    course    where fast clients count more by design, a client's contributions count unseen as often as the median
              of the others', from a bucket of ``UNSEEN`` that begins with one, and only if half as many contributions
              as there are others have counted since its last. What it sends more often counts while the client
              doesn't go against the course of the others, the mean direction of their last updates, its own left out.
              Its evidence is a sum over all its contributions of their cosine with that course less ``OPPOSED``, kept
              between ``LEAST`` and ``MOST`` (Page 1954's cumulative sum, of both signs), and must be 0 or more:
              single cosines are mostly noise near the end of a run. Where the server has no single updates (secure
              sums), ``rate_bound`` is halved instead.
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
from numpy.typing import NDArray

from strategies.flower.arrays import Vector

# Contributions that a client can make at once, beyond its rate. With exponential task times of equal means 3 of 1,000
# contributions are beyond the rate with 5 clients, and none of 1,000 with half-normal times.
CAPACITY = 8.0
UNSEEN = 3.0  # likewise, of the contributions that count unseen; a client begins with 1
HALVED = 0.5  # of the bound, where single updates can't be seen: one of five that are hostile then has 1/3
FEWEST = 3  # clients; with two, either may be the faulty one
# The mean cosine of a client's updates and the course below which the client is opposed. Measured where updates were
# mostly noise: -0.06 of an honest client five times as fast as the slowest, -0.1 to -0.4 of a reversed one.
OPPOSED = -0.1
# The evidence's bounds. A client that turns soon uses up the upper one, about three times the deviation of such a
# cosine. The lower one is ten times as much: a few updates that are noise don't clear a client that was opposed.
MOST, LEAST = 0.3, -3.0
LEADERS = 16  # clients whose last updates are the course: at most 64 D bytes


class Bucket:
    """What each client may still send: a bucket that a contribution of the others' median client fills.

    Parameters
    ----------
    capacity : float
        Contributions that fit in.
    first : float, optional
        Contributions that are in the bucket of a new client; by default it is full.
    """

    def __init__(self, capacity: float, first: float | None = None) -> None:
        self._capacity, self._first = capacity, capacity if first is None else first
        # By client index: what is in the bucket, and the others' median when it was filled.
        self.credit: dict[int, tuple[float, float]] = {}

    def pays(self, index: int, median: float, rate: float) -> bool:
        """Pay for a contribution of a client; return False if there is too little; ``median``: of the others."""
        credit, before = self.credit.get(index, (self._first, median))
        credit = min(credit + rate * max(median - before, 0.0), self._capacity)
        self.credit[index] = credit - (enough := credit >= 1), median
        return enough


class Course:
    """The direction of the others' last updates, and how far each client's updates have agreed with it."""

    def __init__(self) -> None:
        # By client index the last update (D,), with norm 1, the oldest first; and their sum (D,).
        self._last: dict[int, NDArray[np.float32]] = {}
        self._sum: Vector = np.zeros(())
        self._evidence: dict[int, float] = {}

    def follow(self, index: int, update: Vector) -> None:
        """Take a client's update (D,) into the course, in place of its last one."""
        self._forget(index)
        self._last[index] = (update / (float(np.linalg.norm(update)) or 1.0)).astype(np.float32)
        self._sum = self._sum + self._last[index]
        if len(self._last) > LEADERS:
            self._forget(next(iter(self._last)))

    def agrees(self, index: int, present: Mapping[int, object], update: Vector) -> bool:
        """Return whether a client goes the others' way, this update (D,) included; not before their way is known."""
        for gone in self._last.keys() - present.keys() - {index}:
            self._forget(gone)
        others = len(self._last.keys() - {index})
        if others + 1 < min(LEADERS, len(present) // 2 + 1):
            return False
        course = self._sum - self._last[index] if index in self._last else self._sum
        lengths = float(np.linalg.norm(course)) * float(np.linalg.norm(update))
        cosine = float(course @ update) / lengths if lengths else 0.0
        evidence = self._evidence.get(index, 0.0) + cosine - OPPOSED
        self._evidence[index] = min(max(evidence, LEAST), MOST)
        return self._evidence[index] >= 0

    def _forget(self, index: int) -> None:
        """Take a client's last update out of the course."""
        if index in self._last:
            self._sum = self._sum - self._last.pop(index)

    def state(self) -> dict[str, Any]:
        """Return the course for a checkpoint: unit updates (L, D), whose they are, and every client's evidence."""
        led = {"own-course": np.stack(list(self._last.values()))} if self._last else {}
        return {**led, "own-course-of": list(self._last), "own-evidence": list(self._evidence.items())}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the course of a checkpoint."""
        rows = np.array(state.get("own-course", ()), np.float32)
        self._last = dict(zip(map(int, state.get("own-course-of", ())), rows, strict=True))
        self._sum = rows.sum(axis=0, dtype=np.float64)
        self._evidence = {int(index): evidence for index, evidence in state.get("own-evidence", ())}


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
        self._all, self._unseen, self._leads = Bucket(CAPACITY), Bucket(UNSEEN, 1.0), Bucket(1.0)
        self._course = Course()
        # Contributions of all that were accepted here, and how many there were with each client's last one.
        self._accepted, self._accepted_at = 0, dict[int, int]()
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
        median, agrees = _median(self._unopposed, index, present), self._course.agrees(index, present, update)
        others = len(present.keys() - {index})
        # A client that was away has credit for several contributions, which would be most of one buffer.
        at_once = self._accepted - self._accepted_at.get(index, -others) < others // 2
        if at_once or not self._unseen.pays(index, median, 1.0):
            if not agrees:
                return False
        elif self._leads.pays(index, median, 1.0):  # so that fast clients don't lead the course alone
            self._course.follow(index, update)
        _count(self._unopposed, index, present)
        self._accepted += 1
        self._accepted_at[index] = self._accepted
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
        return {
            "own-intervals": self.intervals,
            "own-arrivals": list(self._arrivals.items()),
            "own-unopposed": list(self._unopposed.items()),
            "own-credit": [[index, *each] for index, each in self._all.credit.items()],
            "own-unseen": [[index, *each] for index, each in self._unseen.credit.items()],
            "own-leads": [[index, *each] for index, each in self._leads.credit.items()],
            "own-accepted": self._accepted,
            "own-accepted-at": list(self._accepted_at.items()),
            "own-paid": [[index, *each] for index, each in self._paid.items()],
            **self._course.state(),
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
        self._accepted = int(state.get("own-accepted", 0))
        self._accepted_at = {int(index): int(number) for index, number in state.get("own-accepted-at", ())}
        self._paid = {int(i): (last, left, int(since)) for i, last, left, since in state.get("own-paid", ())}
        self._course.restore(state)
