"""Who of the clients of a round is there, by their availability."""

import logging
from collections.abc import Callable, Sequence

from strategies.pace import NEVER, Pace
from strategies.roster import Client

log = logging.getLogger("flwr.strategies")


def present(pace: Pace, clients: Sequence[Client], wanted: Callable[[int], bool]) -> list[Client]:
    """Return those of the clients that are there; where none of the wanted is, the clock moves on until one comes.

    Nobody, if none ever comes, or not before the run's time is over: one line says so.
    """
    if pace.always:
        return list(clients)
    asked = [client for client in clients if wanted(client.index)]
    now = pace.now()
    comes = min((pace.comes(client, now) for client in asked), default=NEVER)
    if comes == NEVER:
        log.warning("no client is there any more, from %g s on: the run ends", now)
        return []
    if pace.over(comes):
        log.info("no client is there before %g s, when the run is over", comes)
        return []
    if comes > now:
        log.debug("no client is there from %g s to %g s", now, comes)
        pace.clock.wait_until(comes)
    return [client for client in clients if pace.there(client)]
