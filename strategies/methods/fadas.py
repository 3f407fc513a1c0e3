"""FADAS: FedBuff with an adaptive server step, shorter if the stalest contribution of the buffer is late.

Y. Wang, S. Wang, S. Lu and J. Chen, "FADAS: towards federated adaptive asynchronous optimization", ICML 2024,
with delay-adaptive steps. When m contributions have arrived, Δ = (1/m) Σ Δ_i and

    m ← β₁ m + (1 − β₁) Δ,   v ← β₂ v + (1 − β₂) Δ²,   v̂ ← max(v̂, v)
    W ← W + η_g / max(1, δ_max / τ_c) · m / (√v̂ + τ)

with δ_max the largest staleness of a contribution in the buffer and τ_c the concurrency: the number of clients at
work. This is our reading of the paper's delay-adaptive steps: the paper's step size is η_g if δ_max ≤ τ_c, and
otherwise min(η_g, 1/δ_max), with a threshold τ_c to be chosen; 1/δ_max hardly ever shortens steps as small as these.
Staleness is counted in aggregations of m contributions each, so that with usual m it is below τ_c (for 100 clients
with F80 and m = 10, δ_max is at most 19), and the step size is η_g. With m = 1 the slowest clients exceed τ_c.

The step is the one of the server optimizer ``amsgrad``. Other optimizers may be chosen, except ``sgd``, with which
the method would be FedBuff: ``sgd`` selects ``amsgrad``. All contributions have equal weight, so that fast clients
count more in total.

A client receives the model and sends one back; the server keeps three vectors beside the model, 24 D bytes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from strategies.core.config import StrategyConfig
from strategies.flower.arrays import Vector
from strategies.methods.shared.arrivals import Buffered, BufferedConfig
from strategies.updates.pipeline import Contribution


@dataclass(frozen=True)
class FADASConfig(BufferedConfig):
    """Parameters of FADAS: ``buffer_size`` is m, ``server_lr`` η_g (0: 0.01), and τ_c is ``concurrency``."""

    server_optimizer: str = "amsgrad"


class FADAS(Buffered):
    """FADAS (Wang et al. 2024, algorithm 1).

    Rule: an AMSGrad step by the mean of the buffer, shorter if its stalest contribution is late.
    Kept: the optimizer's three vectors.
    Helps: where coordinates differ in scale, as in transformers; fast clients count more.
    """

    Config: ClassVar[type[StrategyConfig]] = FADASConfig
    config: FADASConfig
    default_aggregation_weights: ClassVar[str] = "identical"

    def resolve_config(self, config: StrategyConfig) -> StrategyConfig:
        """Return the config with ``amsgrad`` in place of ``sgd``, with which the method would be FedBuff."""
        return replace(config, server_optimizer="amsgrad") if config.server_optimizer == "sgd" else config

    def aggregate(
        self, model: Vector, contributions: Sequence[Contribution], weights: Sequence[float]
    ) -> Vector:
        """Return the next model; the step is divided by δ_max / τ_c where that is above 1."""
        updated_model = super().aggregate(model, contributions, weights)
        late = max(contribution.staleness for contribution in contributions) / self.max_concurrency
        return updated_model if late <= 1 else model + (updated_model - model) / late
