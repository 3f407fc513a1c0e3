"""The metrics that ``best-of`` and ``stop-at`` name, checked before a run starts.

A run must measure them, and it must be known which of their values are better.
"""

import logging
from collections.abc import Sequence

from fedapp.config import ConfigError, RunConfig
from fedapp.config.strategy_keys import strategy_class
from fedapp.own import own_parts
from fedapp.report.files import measured_by, stated_directions
from strategies import REGISTRY
from strategies.core.best_model import BestModel
from strategies.core.config import BEST
from strategies.flower.higher_is_better import (
    PERSONAL,
    higher_is_better,
    measured_name,
    split_direction,
    unknown_direction,
)

log = logging.getLogger("flwr.fedapp")

TRAIN_LOSS = "train-loss"
# Of the clients' losses; without rounds alone.
OF_OBJECTIVES = ("federated-loss", "surrogate-loss")

_OVER_CLIENTS = ("-mean", "-worst-tenth", "-best", "-std", "-jain")
_NEED_DIRECTION = ("-worst-tenth", "-best", "-jain")

HOW_STATED = (
    "metrics = 'min:module:name' or 'max:module:name' states it, as does the function's attribute "
    "higher_is_better"
)


def directions_of(config: RunConfig) -> dict[str, bool | None]:
    """Return whether a higher value is better, of the metrics that ``metrics`` names; None if that isn't known."""
    stated = stated_directions(config.metrics)
    return {name: higher_is_better(name, stated) for name in measured_by(config.metrics)}


def directed_best_of(config: RunConfig) -> str:
    """Return ``best-of``, where its name doesn't say it with the direction that ``metrics`` states: ``min:NAME``.

    Raises
    ------
    ConfigError
        If evaluations are compared by a metric of the config whose direction isn't known.
    """
    stated, name = split_direction(config.best_of)
    known = directions_of(config)
    higher = known.get(measured_name(name)) if stated is None else stated
    if measured_name(name) not in known or stated is not None:
        return config.best_of
    if higher is None and (config.keep == BEST or config.patience):
        raise ConfigError(f"best-of = {name!r}: {unknown_direction(name)}; {HOW_STATED}")
    if higher is None or higher_is_better(name) is higher:
        return config.best_of
    return f"{'max' if higher else 'min'}:{name}"


def say_unknown_directions(config: RunConfig) -> None:
    """Log which metrics of the user's own have no direction, so that nothing is marked as their best or worst."""
    parts = {measured_by(part)[-1]: part for part in own_parts(config.flat()).get("metrics", [])}
    if unknown := [parts.get(name, name) for name, higher in directions_of(config).items() if higher is None]:
        log.info(
            "metrics = %r: it isn't known whether a lower or a higher value is better, so that no evaluation, client "
            "or run is marked as the best; %s",
            ",".join(unknown),
            HOW_STATED,
        )


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
        direction = higher_is_better(own, {**stated_directions(config.metrics), **best.stated})
        if metric.endswith(_NEED_DIRECTION) and own in known and direction is None:
            raise ConfigError(f"{key}: {unknown_direction(own)}; {HOW_STATED}")
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
