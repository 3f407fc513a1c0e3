"""Who of the clients of a round is there, by their availability."""

import logging
from collections.abc import Callable, Sequence

from strategies.clients.roster import Client
from strategies.core.config import StrategyConfig
from strategies.flower.errors import RunError
from strategies.timing.availability import NEVER
from strategies.timing.scheduler import Scheduler

log = logging.getLogger("flwr.strategies")


def present(
    pace: Scheduler, clients: Sequence[Client], wanted: Callable[[int], bool], *, wait: bool
) -> list[Client]:
    """Return those of the clients that are there.

    Where none is that is ``wanted``, by its index, the clock moves on until one comes, if it may ``wait``. Nobody, if
    none ever comes, or not before the run's time is over: one line says so.
    """
    if pace.always:
        return list(clients)
    if wait and not _waited(pace, [client for client in clients if wanted(client.index)]):
        return []
    return [client for client in clients if pace.there(client)]


def _waited(pace: Scheduler, clients: Sequence[Client]) -> bool:
    """Move the clock on until one of the clients is there; tell whether one is."""
    now = pace.now()
    comes = min((pace.comes(client, now) for client in clients), default=NEVER)
    if comes == NEVER:
        log.warning("no client is there any more, from %g s on: the run ends", now)
    elif pace.over(comes):
        log.info("no client is there before %g s, when the run is over", comes)
    else:
        pace.clock.wait_until(comes)
        return True
    return False


def check_loop(pace: Scheduler, config: StrategyConfig) -> None:
    """Refuse a loop around a strategy, whose time doesn't pass, where clients come and go."""
    if not pace.always:
        raise RunError(
            f"availability = {config.availability!r}, task_failure = {config.task_failure:g}: time passes in the "
            "strategy's own start(), not in a loop around it, such as Flower's"
        )
