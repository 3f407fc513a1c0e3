"""FADAS: FedBuff with an adaptive step of the server, shorter where the oldest of the buffer is late.

Y. Wang, S. Wang, S. Lu and J. Chen, "FADAS: towards federated adaptive asynchronous optimization", ICML 2024,
with steps that delays make shorter. When m contributions have arrived, Δ = (1/m) Σ Δ_i and

    m ← β₁ m + (1 − β₁) Δ,   v ← β₂ v + (1 − β₂) Δ²,   v̂ ← max(v̂, v)
    W ← W + η_g / max(1, δ_max / τ_c) · m / (√v̂ + τ)

with δ_max the staleness of the oldest contribution of the buffer and τ_c the concurrency: how many clients are at
work. This is our reading of its delay-adaptive steps: the paper's are η_g where δ_max ≤ τ_c, and otherwise
min(η_g, 1/δ_max), with a threshold τ_c to be chosen, and 1/δ_max hardly ever shortens a step as small as these.
Delays are counted in aggregations, each of m contributions, so that with the usual m none is later than τ_c (of 100
clients with F80 and m = 10, δ_max is at most 19): practically the step is η_g. With m = 1 the slowest are later.

The step is that of the server optimizer ``amsgrad``; another one may be asked for, and ``sgd``, with which it would
be FedBuff, stands for it. Contributions count the same, so that the fast count more often.

A client is sent the model and sends one; the server keeps three vectors beside it, 24 D bytes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from strategies.core.config import StrategyConfig
from strategies.flower.arrays import Vector
from strategies.methods.shared.arrivals import Buffered, BufferedConfig
from strategies.updates.chain import Contribution


@dataclass(frozen=True)
class FADASConfig(BufferedConfig):
    """Parameters of FADAS: ``buffer_size`` is m, ``server_lr`` η_g (0: 0.01), and τ_c is ``concurrency``."""

    server_optimizer: str = "amsgrad"


class FADAS(Buffered):
    """FADAS (Wang et al. 2024, algorithm 1).

    Rule: an AMSGrad step by the mean of the buffer, shorter where its oldest is late.
    Kept: the optimizer's three vectors.
    Helps: where coordinates differ in scale, as with transformers or rare classes; the fast count more.
    """

    Config: ClassVar[type[StrategyConfig]] = FADASConfig
    config: FADASConfig
    weighing: ClassVar[str] = "identical"

    def adapted(self, config: StrategyConfig) -> StrategyConfig:
        """The plain step is no method of its own here."""
        return replace(config, server_optimizer="amsgrad") if config.server_optimizer == "sgd" else config

    def aggregate(
        self, model: Vector, contributions: Sequence[Contribution], weights: Sequence[float]
    ) -> Vector:
        """Step, and go back what the oldest contribution is too late."""
        moved = super().aggregate(model, contributions, weights)
        late = max(contribution.staleness for contribution in contributions) / self.most_at_work
        return moved if late <= 1 else model + (moved - model) / late
