"""FedFix: a new model every Δt seconds, from the contributions that have arrived since the last one.

Y. Fraboni, R. Vidal, L. Kameni and M. Lorenzi, "A general theory for federated optimization with asynchronous and
heterogeneous clients updates", JMLR 24, 2023, section 4.4:

    d_i = ⌈τ_i / Δt⌉ p_i        eq. 40

A client that replies within an interval is sent the new model at the end of the interval, so that its cycle is
⌈T_i/Δt⌉ Δt for a task of T_i seconds. Eq. 40 has fixed task times. Where they are random, the mean cycle is E⌈T_i/Δt⌉
intervals, which isn't ⌈E T_i/Δt⌉, and in virtual time, where the law of T_i is known,

    d_i = E⌈T_i / Δt⌉ p_i,      E⌈T_i/Δt⌉ = Σ_{k ≥ 0} P(T_i > k Δt)

so that contributions add up to p_i for every client; with fixed times this is eq. 40. ``fedfix_periods = "of-mean"``
is eq. 40 as printed, with τ_i = E T_i. In real time τ_i is the observed mean.

An interval without arrivals leaves the model unchanged, and isn't counted as an aggregation (the paper counts it: its
N is T/Δt). With Δt ≥ max τ_i FedFix is exactly synchronous FedAvg.

If Δt is shorter than τ_i, d_i is a multiple of p_i. With the paper's server step of 1, contributions that arrive
together then move the model by a multiple of their mean, and the model oscillates or diverges; the log warns of an
interval that is shorter than all tasks. By default (``server_lr = 0``) the step is 1/Σ d_i: 1 if Δt ≥ max τ_i.

With ``fedfix_interval = "auto"`` Δt is the median of the clients' task times, the upper one of an even number: half
of the clients or more reply within one interval. It is chosen at the beginning of each interval, in virtual time by
the time scenario, in real time by the observed task times. In real time a client without a reply counts as the mean
of the others, and until the first reply an interval is 1 s.
"""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from strategies.core.config import PrivateAsyncConfig, StrategyConfig
from strategies.core.parameters import parameter
from strategies.events.strategy import AsynchronousStrategy
from strategies.flower.arrays import Layout, Vector
from strategies.timing.scheduler import Times

FEW = 2.0  # warn if the fastest client's task takes more than this many intervals


@dataclass(frozen=True)
class FedFixConfig(PrivateAsyncConfig):
    """Parameters of FedFix; its weights are time-based.

    Parameters
    ----------
    fedfix_interval : float or "auto"
        Δt, time between two aggregations; auto: the median of the (observed) task times
    fedfix_periods : str
        P_i of d_i = P_i p_i where task times are random: the expected number of intervals, or that of the mean time
    """

    fedfix_interval: float | Literal["auto"] = parameter(0.5, gt=0, unit="seconds")
    fedfix_periods: Literal["expected", "of-mean"] = parameter("expected")


def contribution_periods(times: Times, interval: float) -> Times:
    """Return P_i = ⌈τ_i / Δt⌉ (n,); a ratio up to 1e-9 (relative) above an integer counts as it (0.6 / 0.2 is 3)."""
    return np.maximum(np.ceil(times / interval * (1 - 1e-9)), 1.0)


def interval_of(given: float | Literal["auto"], times: Times) -> float:
    """Return Δt in seconds, as given, or by task times τ_i (n,) their median, the upper one if n is even."""
    return float(np.quantile(times, 0.5, method="higher")) if isinstance(given, str) else given


class FedFix(AsynchronousStrategy):
    """FedFix (Fraboni et al. 2023, eq. 40).

    New model: every `fedfix-interval` seconds, of what has arrived.
    Rule: W moves by Σ d_i Δ_i, d_i = p_i times the mean of ⌈τ_i/Δt⌉ over its tasks.
    Helps: as asynchronous FedAvg, with fewer, steadier models.
    """

    Config: ClassVar[type[StrategyConfig]] = FedFixConfig
    config: FedFixConfig
    unequal_weights: ClassVar[bool] = True

    # The interval of a run for which Δt was chosen by task times, and Δt.
    _chosen: tuple[object, float] = (None, 1.0)

    def begin(self, layout: Layout, model: Vector) -> None:
        """Forget the interval of the run before."""
        self._chosen = (None, 1.0)

    @property
    def interval(self) -> float:  # type: ignore[override]
        """Δt, seconds between two aggregations; chosen anew for each interval, and when clients come or go."""
        given, scheduler = self.config.fedfix_interval, self.session.run.scheduler
        if not isinstance(given, str):
            return given
        task_table = self.session.task_table
        present = (scheduler.origin, scheduler.ticks, task_table.changes)
        if self._chosen[0] != present and task_table.active_clients:
            times = scheduler.times(task_table.active_clients, task_table.members.values())
            self._chosen = (present, interval_of(given, times))
        return self._chosen[1]

    def predict_num_aggregations(self, times: Times, seconds: float) -> int:
        """Return how many of the intervals in so many seconds have an arrival, if each client's times are fixed."""
        interval = interval_of(self.config.fedfix_interval, times)
        with_arrival = np.zeros(math.ceil(seconds / interval * (1 - 1e-9)), dtype=bool)
        for period in np.unique(contribution_periods(times, interval)).astype(int).tolist():
            with_arrival[period - 1 :: period] = True
        return max(int(with_arrival.sum()), 1)

    def contribution_periods(self, times: Times) -> Times:
        """Return P_i (n,): intervals per task, or per cycle where clients aren't always available."""
        self._look_at_interval(times)
        by_mean = self.config.fedfix_periods == "of-mean"
        return self._intervals(times) if by_mean else self.expected_periods(times)

    def _intervals(self, times: Times) -> Times:
        if not self.session.scheduler.always:  # cycles of clients that come and go are means already
            return times / self.interval
        return contribution_periods(times, self.interval)

    def _look_at_interval(self, times: Times) -> None:
        """Warn once if even the fastest client's task takes several intervals, and the step isn't by d_i."""
        interval, fastest = self.config.fedfix_interval, float(times.min(initial=np.inf))
        if isinstance(interval, str) or not self.config.server_lr:
            return
        known = not self.session.scheduler.real_time or any(
            member.answers for member in self.session.task_table.active_clients
        )
        if known and FEW * interval < fastest < np.inf:
            self.session.run.warn_once(
                "fedfix_interval = %g s is short: even the fastest client works for %.3g s, so that a contribution "
                "weighs %.0f times or more what it does in a round, and with server_lr = %g the model may swing or "
                "diverge; server_lr = 0 suits, or an interval as long as most clients work, here %.3g s",
                interval,
                fastest,
                np.ceil(fastest / interval),
                self.config.server_lr,
                np.median(times[np.isfinite(times)]),
            )

    def expected_periods(self, times: Times) -> Times:
        """Return E⌈T_i / Δt⌉ (n,) in virtual time, ⌈τ_i / Δt⌉ in real time, which knows the mean τ_i alone."""
        interval = self.interval
        if not self.session.scheduler.always:
            return self._intervals(times)
        return self.session.scheduler.mean(
            lambda drawn: contribution_periods(drawn, interval),
            self.session.task_table.active_clients,
            self.session.task_table.members.values(),
        )
