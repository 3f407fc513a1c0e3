"""Federated averaging.

H. B. McMahan, E. Moore, D. Ramage, S. Hampson and B. A. y Arcas, "Communication-efficient learning of deep networks
from decentralized data", AISTATS 2017; as in Dhasade, Kremer & Renard, algorithm 1:

    client i, from w_i ← w̄_t:   w_i ← w_i − γ g_i(w_i)        τ times
    server:                      w̄_{t+1} = w̄_t + Σ_i p_i (w_i − w̄_t)

The sum Σ_i d_i Δ_i, with Δ_i = w_i − w̄_t and d_i = p_i if all clients take part, is computed in
``strategies.updates.aggregation.WeightedSum._accumulate``; ``strategies.rounds.aggregator.RoundAggregation`` gives it
the replies of a round. A vectorized engine computes the sum of each block of clients by itself, and
``WeightedSum.add_block`` adds these up.
"""

from dataclasses import dataclass
from typing import ClassVar

from strategies.core.config import StrategyConfig, SynchronousConfig
from strategies.rounds.strategy import SynchronousStrategy


@dataclass(frozen=True)
class FedAvgConfig(SynchronousConfig):
    """FedAvg has no parameters of its own."""


class FedAvg(SynchronousStrategy):
    """FedAvg (McMahan et al. 2017, algorithm 1).

    Rule: W moves by the mean of the updates, Σ d_i Δ_i.
    Helps: as the baseline; where clients are alike, or do little local work.
    """

    Config: ClassVar[type[StrategyConfig]] = FedAvgConfig
