"""A loop around the strategy: Flower's ``Strategy.start``, a wrapper, or a subclass's ``start``.

Such a loop calls Flower's hooks ``configure_train`` and ``aggregate_train`` alone. The rounds are the same, but the
loop sends the requests and keeps the time, reads single updates, and evaluates and ends by itself: what can't work
there is refused here. A loop may also make requests of its own, and have their replies aggregated.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.serverapp import Grid

from strategies.clients.roster import clients_of_replies
from strategies.core.requests import check_local_noise
from strategies.flower import messages
from strategies.flower.errors import RunError
from strategies.rounds.first_model import why_it_needs_the_model
from strategies.rounds.round import Round
from strategies.rounds.session import RoundSession
from strategies.updates.compressors import NONE

log = logging.getLogger("flwr.strategies")


def check_outer_loop(session: RoundSession, config: ConfigRecord) -> None:
    """Raise RunError for the first setting of a run that can't work in a loop around the strategy."""
    who, instead = "a wrapper around the strategy, such as one for privacy,", "the strategy's own start()"
    if session.strategy.capabilities.own_start:
        who = f"a loop of its own, such as the start() of {session.run.name},"
        instead = "super().start()"
    check_local_noise(session.strategy.config, config)
    for refusal in _refusals(session, who):
        raise RunError(f"{refusal}; call {instead}")


def _refusals(session: RoundSession, who: str) -> Iterator[str]:
    """Yield what can't work in a loop; ``who`` names the loop, and begins a subclause."""
    config, run, strategy = session.strategy.config, session.run, session.strategy
    if why := strategy.capabilities.side_channel or config.why_not_wrappable:
        yield f"{run.name}: {why}, which {who} knows nothing of"
    if session.compressed is not None:
        yield f"compression = {config.compression!r}: {who} can't read compressed updates; allowed is none"
    if config.compression_down != NONE:
        yield (
            f"compression_down = {config.compression_down!r}: {who} takes the model for what clients were sent; "
            "allowed is none"
        )
    if run.flower.trained is not None:
        yield f"trained: {who} sends whole models; allowed is none"
    if run.best is not None:
        yield (
            f"keep = {config.keep!r}, stop_at = {config.stop_at!r}, patience = {config.patience}: {who} evaluates "
            "and ends by itself"
        )
    if not run.scheduler.always:
        yield (
            f"availability = {config.availability!r}, task_failure = {config.task_failure:g}: virtual time doesn't "
            f"pass in {who.removesuffix(',')}"
        )
    if config.secure_sums:
        yield f"secure_sums = True: {who} reads single updates"
    if config.closes_early:
        yield (
            f"round_deadline = {config.round_deadline:g}, over_select = {config.over_select:g}: {who} waits for all "
            "replies of a round before any counts"
        )


def follow(
    session: RoundSession, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
) -> None:
    """Prepare a round of a loop around the strategy, such as Flower's ``Strategy.start`` and its wrappers."""
    run, strategy = session.run, session.strategy
    check_outer_loop(session, config)
    run.grid, run.aggregations = grid, server_round - 1
    run.take_layout(arrays)
    session.requests.note_model(arrays)
    if session.used:
        return
    session.used = True
    run.attach_grid(grid)
    run.model = run.initial_model(arrays)
    strategy.begin(run.layout, run.model)
    if session.optimizer.averages:
        log.warning(
            "server_optimizer = %r: its result is the mean of the last two models, which a loop around the "
            "strategy doesn't make: it has the last one",
            strategy.config.server_optimizer,
        )


def cohort_of_replies(session: RoundSession, server_round: int, replies: Sequence[Message]) -> Round | None:
    """Return a round of the clients that sent replies to requests of another's; None if no reply has a model.

    Clients weigh by their replies, d_i with sum 1. Where ``configure_train`` wasn't called for the round, the model
    that they were sent is unknown: 0 stands for it, so that w̄ + Σ d_i (w_i − w̄) is Σ d_i w_i.

    Raises
    ------
    RunError
        If the method needs the model that clients were sent.
    """
    run, key = session.run, session.run.flower.arrayrecord_key
    models = [arrays for reply in replies if (arrays := messages.arrays_of(reply, key)) is not None]
    if not models:
        return None
    asked = session.cohort if session.cohort is not None and session.cohort.number == server_round else None
    if session.receiver.clip is not None:
        raise RunError(f"{run.name}: dp = 'central' counts on its own draw; no other clients may be asked")
    if asked is None and (reason := why_it_needs_the_model(session)):
        raise RunError(
            f"{run.name}: {reason}, so that aggregate_train needs the model that clients were sent: "
            "super().configure_train() is called before"
        )
    check_outer_loop(session, ConfigRecord())
    run.aggregations = server_round - 1
    if not session.used:
        run.take_layout(models[0])
        session.used, run.model = True, np.zeros(run.layout.size)
        session.strategy.begin(run.layout, run.model)
    model = np.zeros(run.layout.size) if asked is None else asked.model
    known = {client.node_id: client for client in run.clients}
    first = (
        max((client.index for client in run.clients), default=-1) + 1
    )  # strangers come after those that are known
    clients = [
        known.get(each.node_id, replace(each, index=first + each.index))
        for each in clients_of_replies(replies)
    ]
    cohort = session.open_cohort(server_round, run.layout.to_record(model), (clients, None))
    cohort.requests = [reply.metadata for reply in replies]
    return cohort
