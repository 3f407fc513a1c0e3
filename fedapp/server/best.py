"""Whether the metrics that ``best-of`` and ``stop-at`` name can be measured, asked before a run starts."""

from collections.abc import Sequence

from fedapp.config import ConfigError, RunConfig
from fedapp.config.strategy_keys import strategy_class
from strategies import REGISTRY
from strategies.core.best_model import BestModel
from strategies.flower.higher_is_better import PERSONAL

TRAIN_LOSS = "train-loss"
# Of the clients' losses; without rounds alone.
OF_OBJECTIVES = ("federated-loss", "surrogate-loss")

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
    strategy = strategy_class(config.strategy)
    if strategy not in REGISTRY.values():
        return
    known = ("loss", *measured)
    losses = (TRAIN_LOSS, *(() if strategy.has_rounds else OF_OBJECTIVES))
    for metric in best.watched:
        own = metric.removeprefix("client-").removeprefix(PERSONAL)
        for ending in _OVER_CLIENTS:
            own = own.removesuffix(ending)
        key = f"best-of = {metric!r}" if metric == best.by else f"stop-at = {config.stop_at!r}"
        if metric not in losses and own not in known:
            raise ConfigError(
                f"{key}: this run measures no {metric!r}; allowed are {', '.join((*known, *losses))}, and of clients "
                f"such as client-{known[-1]}-mean"
            )
        by_server = metric in OF_OBJECTIVES or (metric.startswith("client-") and _by_server(config))
        if by_server and config.client_records in ("last", "never"):
            raise ConfigError(
                f"{key}: needs the clients' numbers of every evaluation, and client-records = "
                f"{config.client_records!r}; allowed are auto, always"
            )


def _by_server(config: RunConfig) -> bool:
    """Tell whether the server evaluates the model on each client's rows, and the clients don't."""
    personal = (
        strategy_class(config.strategy).capabilities.personal or config.fine_tune_epochs or config.personal
    )
    return not (personal or config.client_evaluation)
