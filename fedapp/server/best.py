"""Whether the metrics that ``best-of`` and ``stop-at`` name can be measured, asked before a run starts."""

from collections.abc import Sequence

from fedapp.config import ConfigError, RunConfig
from fedapp.config.strategy_keys import strategy_class
from strategies import REGISTRY
from strategies.core.best_model import BestModel
from strategies.flower.higher_is_better import PERSONAL

# Losses that a run measures beside the model's on the test rows.
LOSSES = ("train-loss", "federated-loss", "surrogate-loss")

_OVER_CLIENTS = ("-mean", "-worst-tenth", "-best", "-std", "-jain")


def check_metrics(config: RunConfig, best: BestModel, measured: Sequence[str]) -> None:
    """Refuse a metric that no evaluation has; a strategy of the user's own may report others.

    Parameters
    ----------
    measured : sequence of str
        The metrics of the run beside the loss.

    Raises
    ------
    ConfigError
    """
    if strategy_class(config.strategy) not in REGISTRY.values():
        return
    known = ("loss", *measured)
    for metric in best.watched:
        own = metric.removeprefix("client-").removeprefix(PERSONAL)
        for ending in _OVER_CLIENTS:
            own = own.removesuffix(ending)
        if metric not in LOSSES and own not in known:
            key = f"best-of = {metric!r}" if metric == best.by else f"stop-at = {config.stop_at!r}"
            raise ConfigError(
                f"{key}: this run measures no {metric!r}; allowed are {', '.join((*known, *LOSSES))}, and of clients "
                f"such as client-{known[-1]}-mean"
            )
