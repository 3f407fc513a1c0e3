"""Runs whose first replies make the model: Flower's ``start`` with an empty ``ArrayRecord`` as the initial model.

Clients then begin with models of their own, and the model of round 1 is the weighted mean of their replies. It is
computed as every round's model, w̄ + Σ d_i (w_i − w̄), from w̄ = 0.
"""

from collections.abc import Iterable

import numpy as np
from flwr.app import Message

from strategies.core.capabilities import fills_in
from strategies.flower import messages
from strategies.flower.errors import RunError
from strategies.rounds.round import Round
from strategies.rounds.session import RoundSession
from strategies.updates.compressors import NONE
from strategies.updates.server_optimizer import SGD


def why_it_needs_the_model(session: RoundSession) -> str:
    """Return why the replies alone don't make the next model; "" if they do."""
    strategy, config = session.strategy, session.strategy.config
    if type(session.optimizer) is not SGD or (config.server_lr or strategy.default_server_lr()) != 1:
        return "the server's step begins from the present model"
    if session.receiver.clip is not None or config.update_norm_bound or session.safeguards.active:
        return "updates are bounded"
    hooks = ("aggregate", "weigh", "transform_update", "server_update", "on_local_model", "extra_vectors")
    if found := next((name for name in hooks if fills_in(type(strategy), name)), ""):
        return f"{found} reads updates"
    return ""


def check_replies_make_it(session: RoundSession) -> None:
    """Raise RunError if a run can't begin without a model.

    Raises
    ------
    RunError
        If a part of the run needs the model that clients are sent.
    """
    config, reason = session.strategy.config, why_it_needs_the_model(session)
    compresses = config.compression_down != NONE or session.compressed is not None
    if not reason and (config.secure_sums or config.closes_early or compresses):
        reason = "secure_sums, compression, compression_down, round_deadline and over_select read the model"
    if reason:
        raise RunError(
            f"{session.run.name}: initial_arrays has no arrays, and {reason}: give the initial model"
        )


def take_first_model(session: RoundSession, cohort: Round, replies: Iterable[Message]) -> list[Message]:
    """Read the model's layout from the first valid reply, by client; return the replies."""
    replies, run = list(replies), session.run
    nodes = {client.node_id: client.index for client in cohort.clients}
    by_client = sorted(replies, key=lambda reply: nodes.get(reply.metadata.src_node_id, len(nodes)))
    found = (
        messages.model_of(reply, run.flower.arrayrecord_key) for reply in by_client if reply.has_content()
    )
    if (arrays := next(filter(None, found), None)) is not None:
        run.take_layout(arrays)
        run.model = cohort.model = cohort.sent = np.zeros(run.layout.size)
        session.requests.note_model(arrays)
        session.strategy.begin(run.layout, run.model)
    return replies
