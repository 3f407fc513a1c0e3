"""Asynchronous FedAvg: a new model at every arrival.

Fraboni et al. 2023, section 4.3:

    time-based (eq. 36)   d_i = (Σ_j 1/τ_j) τ_i p_i
    identical             d_i = 1

With one local step and equal p_i, time-based weights are Rescaled ASGD: A. Mahran, A. Maranjyan and P. Richtárik,
"Rescaled asynchronous SGD: optimal distributed optimization under data and system heterogeneity", arXiv 2605.13434,
2026. Its step size of worker i is in proportion to τ_i: γ η_g d_i here.
"""

from dataclasses import dataclass
from typing import ClassVar

from strategies.core.config import AsynchronousConfig, StrategyConfig
from strategies.methods.shared.arrivals import EveryArrival
from strategies.methods.shared.arrivals import contribution_periods as contribution_periods


@dataclass(frozen=True)
class AsyncFedAvgConfig(AsynchronousConfig):
    """Asynchronous FedAvg has no parameters of its own."""


class AsyncFedAvg(EveryArrival):
    """Asynchronous FedAvg (Fraboni et al. 2023, eq. 36; time-based with one local step: Mahran et al. 2026).

    The time-based d_i of all clients sum to C or more where p_i are equal (to less, if slow clients have little
    data), so that with η_g = 1, as in the paper, training diverges unless local steps are short. By default
    (``server_lr = 0``) η_g is 1/Σ d_i, 1/C with identical weights: one contribution of every client together moves
    the model as far as one synchronous round.

    Rule: W moves by d_i Δ_i; time-based, d_i is p_i times the arrivals of all during one task of i.
    Helps: where the slowest are far slower, and all must count by their data.
    """

    Config: ClassVar[type[StrategyConfig]] = AsyncFedAvgConfig
