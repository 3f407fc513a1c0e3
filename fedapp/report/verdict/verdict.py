"""The verdict on settings: pairs of settings, costs, and the sentences about them."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Pair:
    """Two settings, compared on the seeds that both have.

    Attributes
    ----------
    better, other : str
        The settings, the one with the better mean first.
    seeds : int
        Number of seeds that both have.
    difference : float
        Mean advantage of ``better`` over the seeds, in units of the metric: above 0 it is the better one.
    deviation : float
        Standard deviation (n − 1) of the advantage over the seeds; NaN of one seed.
    p : float
        Two-sided p-value of the paired t-test, adjusted by Holm's method for all pairs of the verdict.
    level : float
        The level at which Holm's method compares the pair's own p-value, and of the interval.
    low, high : float
        Student's interval of the difference; NaN of one seed, and the difference itself if it is equal on all seeds.
    apart : bool
        Whether the test tells the two apart.
    needed : int, optional
        Seeds with which the test would tell a pair with the best setting apart with chance 80 %, if difference and
        deviation stay; None if it does already, of other pairs, of a tie, of one seed and beyond 1,000.
    needed_from, needed_to : int, optional
        The same with the deviations at the ends of the 95 % interval of the deviation.
    """

    better: str
    other: str
    seeds: int
    difference: float
    deviation: float
    p: float
    level: float
    low: float
    high: float
    apart: bool
    needed: int | None = None
    needed_from: int | None = None
    needed_to: int | None = None

    @property
    def is_tie(self) -> bool:
        """Whether the two are equal on every seed."""
        return self.difference == 0 and not self.deviation > 0


@dataclass(frozen=True)
class Cost:
    """What a setting takes to reach the target and keep it to the end, as means over the seeds that keep it.

    Attributes
    ----------
    time : float
        Seconds of the run's clock; NaN if no seed keeps the target, or if the runs have no times.
    bytes : float
        Bytes sent, up and down.
    server_bytes : float
        Most bytes that the server keeps between aggregations up to there; NaN of runs without that record.
    reached, seeds : int
        Seeds that keep the target, of all.
    earliest, latest : float
        The shortest and the longest time of a seed.
    evaluations : float
        Evaluations of a run up to where runs are compared, the mean over seeds.
    """

    setting: str
    time: float
    bytes: float
    server_bytes: float
    reached: int
    seeds: int
    earliest: float = math.nan
    latest: float = math.nan
    evaluations: float = math.nan


@dataclass(frozen=True)
class Verdict:
    """Which setting leads by a metric, by how much, what may spoil that, and what it costs.

    Attributes
    ----------
    metric : str
        The metric by which settings are judged.
    place : str
        Where runs are compared, such as ``at time 10``.
    leader : str
        The setting that the tests tell apart from every other one; empty if there is none.
    means : mapping of str to float
        The mean over seeds of each judged setting, the best first.
    pairs : tuple of Pair
        All pairs of judged settings.
    sentences : tuple of str
        At most three: which setting leads and by how much, how many seeds would do, what it costs.
    doubts : tuple of str
        A line for each thing that may spoil the verdict.
    target : float
        The value of the metric to which the costs are; NaN without costs.
    costs : tuple of Cost
        The costs of each judged setting.
    files : str
        The files that the numbers come from.
    """

    metric: str
    place: str = "at the end"
    leader: str = ""
    means: Mapping[str, float] = field(default_factory=dict)
    pairs: tuple[Pair, ...] = ()
    sentences: tuple[str, ...] = ()
    doubts: tuple[str, ...] = ()
    target: float = math.nan
    costs: tuple[Cost, ...] = ()
    files: str = ""

    @property
    def best(self) -> str:
        """The setting with the best mean, told apart from the others or not; empty without a judged setting."""
        return next(iter(self.means), "")

    def pair(self, one: str, other: str) -> Pair:
        """Return the pair of two settings.

        Raises
        ------
        KeyError
            If the two weren't compared.
        """
        for pair in self.pairs:
            if {pair.better, pair.other} == {one, other}:
                return pair
        raise KeyError(f"{one}, {other}")

    @property
    def lines(self) -> list[str]:
        """The verdict as lines of text: sentences, doubts, files."""
        return [
            *self.sentences,
            *(f"Caution: {doubt}" for doubt in self.doubts),
            *([f"Numbers: {self.files}"] if self.files else []),
        ]

    def __str__(self) -> str:
        """Return the lines."""
        return "\n".join(self.lines)
