"""Differential privacy of what clients send, by Flower's mods.

With S the clipping norm and z the noise multiplier, both for one client's whole data and whatever it did before:

    central   Δ_i is clipped to ‖Δ_i‖ ≤ S on the client, and again on the server; w̄ + Σ d_i Δ_i gets noise of
              deviation z S max d_i. All d_i are 1/n, so that a client moves the sum by at most S/n. Protects from
              those who see models, not from the server (H. B. McMahan et al., ICLR 2018, algorithm 1).
    local     Δ_i is clipped to S and gets noise of deviation 2 z S before it leaves the client: other data in
              place of the client's move Δ_i by at most 2 S. Nobody needs to be trusted.

T aggregations (local: T models sent) cost ``fedapp.data.message.gaussian_epsilon`` at δ = ``dp-delta``. Drawing only
some clients each round makes it less, which isn't counted on.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from flwr.app import ConfigRecord, Context, Error, Message, RecordDict
from flwr.clientapp.mod import LocalDpMod, fixedclipping_mod

from fedapp.config import ConfigError, RunConfig
from strategies import messages
from strategies.chatter import without_chatter

# Where Flower's mod looks for the norm.
_CLIPPING_NORM = "clipping_norm"

# Error code of a reply in place of an update that the mods can't take (Flower's own codes are below 100).
NO_UPDATE = 101

# Tag of the random stream of local noise in simulations, beside the seed, the client and the task.
_NOISE_STREAM = 2


def privately(request: Message, context: Context, reply: Message) -> Message:
    """Return the reply to a training request as the run config in the request lets it leave the client."""
    record: ConfigRecord = request.content[messages.CONFIG]  # type: ignore[assignment]
    if (kind := record.get("dp", "none")) == "none":
        return reply
    norm, noise, delta = (
        float(record[f"dp-{key}"])  # type: ignore[arg-type]
        for key in ("clipping-norm", "noise-multiplier", "delta")
    )
    # The local mod takes ε, and makes noise of deviation sensitivity √(2 ln(1.25/δ)) / ε of it.
    mod = fixedclipping_mod if kind == "central" else LocalDpMod(
        norm, 2 * norm, math.sqrt(2 * math.log(1.25 / delta)) / noise, delta
    )  # fmt: skip
    seed = [int(record[key]) for key in ("seed", messages.CLIENT, messages.TASK)]  # type: ignore[arg-type]
    # A mod takes what has one model and one config, so not the second model of the spectral method.
    seen = {
        messages.ARRAYS: request.content[messages.ARRAYS],
        messages.CONFIG: ConfigRecord({_CLIPPING_NORM: norm}),
    }
    view = Message(RecordDict(seen), reply_to=request)  # the one kind of message that a client can make
    with without_chatter(), _random_numbers([*seed, _NOISE_STREAM] if is_simulated(context) else None):
        try:
            reply = mod(view, context, lambda *_: reply)
        except ZeroDivisionError:  # Flower's mods divide by the norm
            return Message(Error(NO_UPDATE, "its update is zero, which can't be clipped"), reply_to=request)
    messages.metrics_of(reply).pop(messages.TRAIN_LOSS, None)  # it tells of the data too
    return reply


def is_simulated(context: Context) -> bool:
    """Tell a simulated client, whose noise comes from the seed, from a node with data of its own."""
    return "data-path" not in context.node_config


def check_privacy(config: RunConfig) -> None:
    """Raise ConfigError if a client would tell more of its data than its models."""
    if config.dp == "local" and config.client_weights == "adjacency" and not config.message_epsilon:
        raise ConfigError(
            "message-epsilon = 0: with dp = 'local' the direction of a client's data, by which adjacency weights and "
            "the spectral method place it in the graph, would be sent as it is; allowed is a number > 0"
        )
    if config.dp != "none" and config.client_evaluation:
        raise ConfigError(
            f"client-evaluation = true: with dp = {config.dp!r} clients' losses would be sent as they are; "
            "allowed is false"
        )


@contextmanager
def _random_numbers(seed: list[int] | None) -> Iterator[None]:
    """Let NumPy's global stream, which the mods draw from, be a stream of its own."""
    before = np.random.get_state()
    np.random.seed(None if seed is None else np.random.SeedSequence(seed).generate_state(4))
    try:
        yield
    finally:
        np.random.set_state(before)
