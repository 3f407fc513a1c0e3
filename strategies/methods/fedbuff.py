"""FedBuff: a new model when m contributions have arrived.

J. Nguyen, K. Malik, H. Zhan, A. Yousefpour, M. Rabbat, M. Malek and D. Huba, "Federated learning with buffered
asynchronous aggregation", AISTATS 2022; as in Fraboni et al. 2023, section 4.5:

    identical    d_i = s(δ)/m
    time-based   d_i = s(δ) p_i / (share of the aggregations that client i contributes to)

A stale contribution may have a smaller weight, by the factor s(δ) of its staleness δ: ``polynomial:0.5`` is the
paper's s(δ) = (1 + δ)^−½; by default s(δ) is 1.

How the share is known: ``strategies.methods.shared.buffer_schedule``.

With secure sums the m clients of a full buffer mask their updates with each other. Their weights d_i are known by
then, and the server has Σ d_i Δ_i alone (strategies/events/secure_groups.py).

The paper's server step is 1. By default (``server_lr = 0``) it is 1/Σ d_i with s(δ) = 1, m/C for identical weights:
one contribution of every client together then moves the model as far as a round. With m = C FedBuff is exactly
synchronous FedAvg, and the step is 1.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from strategies.core.config import PrivateAsyncConfig, SecureConfig, StrategyConfig
from strategies.methods.shared.arrivals import Buffered, BufferedConfig
from strategies.methods.shared.buffer_schedule import BufferSchedule
from strategies.methods.shared.staleness import discount_of, discount_parameter
from strategies.timing.scheduler import Times

log = logging.getLogger("flwr.strategies")


@dataclass(frozen=True)
class FedBuffConfig(BufferedConfig, PrivateAsyncConfig, SecureConfig):
    """Parameters of FedBuff.

    Parameters
    ----------
    staleness_discount : str
        s(δ), the factor of a contribution that is δ aggregations old: 1, (δ + 1)^−A, or 1 up to B and beyond it
        1/(A (δ − B) + 1)
    """

    staleness_discount: str = discount_parameter()


class FedBuff(Buffered):
    """FedBuff (Nguyen et al. 2022, algorithm 1; time-based: Fraboni et al. 2023, section 4.5).

    Rule: W moves by Σ d_i Δ_i, d_i = s(δ)/m, or time-based.
    Helps: where the slowest are far slower, and arrivals alone are too noisy or must not be seen.
    """

    Config: ClassVar[type[StrategyConfig]] = FedBuffConfig
    config: FedBuffConfig

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._is_fedavg = False

    def check(self, num_clients: int) -> None:
        """Refuse a buffer that would never fill, and log once where FedBuff is FedAvg."""
        super().check(num_clients)
        logged, self._is_fedavg = self._is_fedavg, self.m == num_clients > 1
        if self._is_fedavg and not logged:
            log.info(
                "buffer_size = %d is the number of clients: every model waits for all of them, and no work is stale, "
                "as in FedAvg",
                num_clients,
            )

    @property
    def discounts_staleness(self) -> bool:
        """Whether staleness changes the weight of a contribution: False if s(δ) = 1."""
        return not discount_of(self.config.staleness_discount).constant

    def discount(self, staleness: int) -> float:
        """Return s(δ), the factor of a contribution of staleness δ."""
        return discount_of(self.config.staleness_discount)(staleness)

    def contribution_periods(self, times: Times) -> Times:
        """Return P_i (n,), aggregations per contribution: expected if all task times are known, else observed."""
        expected = self._schedule.contribution_periods(
            self.session.scheduler, self.session.task_table.active_clients, self.m, self.session.total
        )
        return super().contribution_periods(times) if expected is None else expected

    def stateful_components(self) -> Sequence[Any]:
        """Return nothing; begin a new schedule of the buffer."""
        self._schedule = BufferSchedule()
        return ()
