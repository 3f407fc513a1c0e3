"""Which devices never counted in a run, and why: what a run on devices logs when it ends."""

import logging
from collections.abc import Iterator

from strategies.clients.client_statistics import OUTCOMES, ClientRecord, ClientStatistics
from strategies.clients.roster import Client, Roster
from strategies.flower import messages

log = logging.getLogger("flwr.strategies")

MOST_NAMED = 10  # devices that are named; of the others the number is

_WORDS = {messages.TOO_OLD: "too old"}  # for outcomes whose name isn't the word


def in_vain(roster: Roster, client_stats: ClientStatistics) -> Iterator[tuple[str, str]]:
    """Yield each device that could have counted in this run and never did, in words, and why.

    These are clients that were asked to train, by index; nodes that were refused; and registered nodes that were
    never connected.
    """
    account_of = dict(client_stats.items())
    for client in _clients(roster):
        account = account_of.get(client.index, ClientRecord())
        if account.tasks and not account.accepted:
            yield f"client {client.display_name}", _outcomes(account)
    for node_id, reason in sorted(roster.refused.items()):
        if account_of.get(roster.former.get(node_id, -1), ClientRecord()).accepted:
            continue  # it counted until it was refused, which the log says where it happened
        yield roster.record.shown(node_id), reason
    enrolled = {client.node_id for client in roster.enrolled}
    for node_id in sorted(roster.registered - enrolled - roster.refused.keys()):
        yield roster.record.shown(node_id), "it was never connected"


def log_never_counted(roster: Roster, client_stats: ClientStatistics) -> None:
    """Log a line for each device that never counted, and one line for all that ended no task."""
    found = list(in_vain(roster, client_stats))
    for who, why in found[:MOST_NAMED]:
        log.warning("%s never counted in this run: %s", who, why)
    if (more := len(found) - MOST_NAMED) > 0:
        log.warning("%d more devices never counted in this run", more)
    asked = {index for index, account in client_stats.items() if account.tasks}
    if idle := [client.node_id for client in _clients(roster) if client.index not in asked]:
        log.info(
            "%d devices ended no task in this run, as they weren't asked or were cut off: %s",
            len(idle),
            roster.named(idle),
        )


def _outcomes(account: ClientRecord) -> str:
    """Return the number of a client's tasks, and how many had each outcome, in words."""
    numbers = {_WORDS.get(outcome, outcome): getattr(account, outcome) for outcome in OUTCOMES}
    known = [f"{number} {word}" for word, number in numbers.items() if number]
    return f"{account.tasks} task{'s' * (account.tasks > 1)}, {', '.join(known) or 'none done'}"


def _clients(roster: Roster) -> list[Client]:
    return sorted(roster.enrolled, key=lambda client: client.index)
