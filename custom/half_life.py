"""An example of a strategy of one's own: a new model at every tick, and long tasks count less.

`strategy="custom.half_life:HalfLife" strategy-config="half-life=2.0"` runs it, everywhere; `half-life` is a key as it
is a field of its Config. `fedapp keys --strategy custom.half_life:HalfLife` lists its keys. But for `flwr run`, which
passes on no key that doesn't stand in pyproject.toml, `half-life=2.0` by itself does, too.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from strategies import AsynchronousConfig, AsynchronousStrategy, StrategyConfig, parameter


@dataclass(frozen=True)
class HalfLifeConfig(AsynchronousConfig):
    """Parameters of `HalfLife`.

    Parameters
    ----------
    half_life : float
        Seconds of task time by which a contribution's weight halves.
    tick : float
        Seconds between two aggregations.
    """

    half_life: float = parameter(1.0, gt=0)
    tick: float = parameter(0.5, gt=0)


class HalfLife(AsynchronousStrategy):
    """d_i = p_i 2^(−τ_i / half-life), every ``tick`` seconds."""

    Config: ClassVar[type[StrategyConfig]] = HalfLifeConfig
    config: HalfLifeConfig

    @property
    def interval(self) -> float:  # type: ignore[override]
        """Seconds between two aggregations."""
        return self.config.tick

    def contribution_periods(self, times: np.ndarray) -> np.ndarray:
        """Return what p_i is multiplied by."""
        return np.asarray(2.0 ** (-times / self.config.half_life))

    def expected_periods(self, times: np.ndarray) -> np.ndarray:
        """Return how many ticks a task really takes, so that the objective minimised can be told."""
        return np.ceil(times / self.config.tick)
