"""FedFix: a new model every Δt seconds, from what arrived since.

Fraboni et al. 2023, section 4.4:

    d_i = ⌈τ_i / Δt⌉ p_i        eq. 40

A client that returns inside an interval is handed the new model at its end, so that its cycle is ⌈τ_i/Δt⌉ Δt. An
interval in which nothing arrived leaves the model as it is. With Δt ≥ max τ_i it is synchronous FedAvg, exactly.

Where Δt is far shorter than all τ_i, each d_i is many times p_i, and contributions that come together move the model
by many times their mean: then it swings, or diverges. The log says so.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from strategies.core.config import OBSERVED, AsynchronousConfig, StrategyConfig
from strategies.core.parameters import parameter
from strategies.events.strategy import AsynchronousStrategy
from strategies.timing.scheduler import Times

FEW = 2.0  # intervals in which the fastest client is done, at least


@dataclass(frozen=True)
class FedFixConfig(AsynchronousConfig):
    """Parameters of FedFix; its weights are time-based.

    Parameters
    ----------
    fedfix_interval : float
        Δt, time between two aggregations; about as long as most tasks take, on devices, too
    """

    fedfix_interval: float = parameter(0.5, gt=0, unit="seconds")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.aggregation_weights not in ("time-based", OBSERVED):
            raise ValueError(
                f"aggregation_weights = {self.aggregation_weights!r}: fedfix has time-based weights, or observed ones"
            )


def periods(times: Times, interval: float) -> Times:
    """P_i = ⌈τ_i / Δt⌉, where a ratio within a relative 1e-9 above a whole number is that number (0.6 / 0.2 is 3)."""
    return np.maximum(np.ceil(times / interval * (1 - 1e-9)), 1.0)


class FedFix(AsynchronousStrategy):
    """FedFix (Fraboni et al. 2023, eq. 40).

    New model: every `fedfix-interval` seconds, of what has arrived.
    Rule: the model moves by Σ d_i Δ_i, d_i = ⌈τ_i/Δt⌉ p_i.
    Helps: as asynchronous FedAvg, with fewer, steadier models.
    """

    Config: ClassVar[type[StrategyConfig]] = FedFixConfig
    config: FedFixConfig

    @property
    def interval(self) -> float:  # type: ignore[override]
        """Δt."""
        return self.config.fedfix_interval

    def periods(self, times: Times) -> Times:
        """Count the intervals of a client's task, or of its cycle where it isn't always there."""
        self._look_at_interval(times)
        if not self.pace.always:
            return times / self.config.fedfix_interval
        return periods(times, self.config.fedfix_interval)

    def _look_at_interval(self, times: Times) -> None:
        """Say once that even the fastest client works for several intervals."""
        interval, fastest = self.config.fedfix_interval, float(times.min(initial=np.inf))
        known = not self.pace.real_time or any(member.answers for member in self.ledger.counting)
        if known and FEW * interval < fastest < np.inf:
            self.run.warn_once(
                "fedfix_interval = %g s is short: even the fastest client works for %.3g s, so that a contribution "
                "weighs %.0f times or more what it does in a round, and the model may swing or diverge; as long as "
                "most clients work, here %.3g s, is what suits",
                interval,
                fastest,
                np.ceil(fastest / interval),
                np.median(times[np.isfinite(times)]),
            )

    def expected_periods(self, times: Times) -> Times:
        """E⌈T_i / Δt⌉ in virtual time: eq. 40 takes task times as fixed, and is biased where they are drawn."""
        interval = self.config.fedfix_interval
        if not self.pace.always:
            return self.periods(times)  # by the drawn times, too
        return self.pace.mean(
            lambda drawn: periods(drawn, interval), self.ledger.counting, self.ledger.members.values()
        )
