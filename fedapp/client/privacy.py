"""Differential privacy of what clients send.

With S the clipping norm and z the noise multiplier, both for one client's whole data and whatever it did before:

    central   Δ_i is clipped to ‖Δ_i‖ ≤ S on the client, and again on the server, by an adaptive norm there alone
              (``strategies.updates.clipping``); w̄ + Σ d_i Δ_i gets noise of deviation z S max d_i. All d_i are
              1/n, so that a client moves the sum by at most S/n. Protects from those who see models, not from the
              server (H. B. McMahan et al., ICLR 2018, algorithm 1).
              With dp-mechanism = distributed each client adds a part of the noise to its masked update, and the
              server sees the noisy sum alone (``strategies.secure.masking``): it protects from the server, too.
              Neighbours: the client's update, or zero in its place; n is the same, and known.
    local     Δ_i is clipped to S and gets noise of deviation 2 z S before it leaves the client: other data in
              place of the client's move Δ_i by at most 2 S. Nobody needs to be trusted.
              Neighbours: the client's data, or any other in their place.

So the same z gives the same ε in both, which means less in the first: of other data in place of the client's, which
move the sum by up to 2 S/n, central noise hides what z/2 does. A client's direction (``fedapp.data.direction``) has
the second kind of neighbours.

Δ_i is that of the arrays that are trained. What isn't (running statistics, and whole numbers such as their counts:
``strategies.updates.buffers.UNTRAINED``) is made of the data as well, has no length that S could be of, and would be
nonsense with noise. So it doesn't leave: it goes back as it came, takes no part in the norm and gets no noise, and
the global model keeps what the initial one has. A device trains with statistics of its batches, as ever; the global
model is evaluated with the initial ones.

T aggregations (local: T models sent) cost ``fedapp.gaussian_mechanism.gaussian_epsilon`` at δ = ``dp-delta``. Drawing
only some clients each round makes it less, which isn't counted on.
"""

from collections.abc import Sequence

from flwr.app import ArrayRecord, ConfigRecord, Context, Error, Message

from strategies import streams
from strategies.flower import messages
from strategies.flower.arrays import ArraysMismatchError, Layout, clip_update
from strategies.flower.simulated import is_simulated
from strategies.updates.buffers import UNTRAINED, untrained_names, untrained_positions

# Error code of a reply in place of an update that can't be clipped (Flower's own codes are below 100).
NO_UPDATE = 101

# The value of dp-noise with which noise comes from the operating system, also in a simulation.
SYSTEM = "system"


def privately(
    request: Message, context: Context, reply: Message, untrained: Sequence[str] = UNTRAINED
) -> Message:
    """Return the reply to a training request as the run config in the request lets it leave the client.

    ``untrained`` are patterns of the names of what isn't trained, beside whole numbers.
    """
    record: ConfigRecord = request.content[messages.CONFIG]  # type: ignore[assignment]
    if (kind := record.get("dp", "none")) == "none":
        return reply
    norm, noise = float(record["dp-clipping-norm"]), float(record["dp-noise-multiplier"])  # type: ignore[arg-type]
    sent, trained = messages.arrays_of(request), messages.arrays_of(reply)
    assert sent is not None and trained is not None  # noqa: PT018
    layout = Layout.of(sent)
    stays = {name: sent[name] for name in untrained_names(layout, untrained)}
    leaves = ArrayRecord({name: stays.get(name, array) for name, array in trained.items()})
    try:
        base, model = layout.to_vector(sent), layout.to_vector(leaves)
    except ArraysMismatchError as error:
        return Message(Error(NO_UPDATE, f"can't be clipped: {error}"), reply_to=request)
    if norm:  # an adaptive norm is the server's, which clips alone
        clip_update(model, base, norm)
    if kind == "local":
        ids = [int(record[key]) for key in (messages.CLIENT, messages.TASK)]  # type: ignore[arg-type]
        rng = (
            streams.generator(int(record["seed"]), "local-noise", *ids)  # type: ignore[arg-type]
            if noise_from_seed(record, context)
            else streams.unpredictable()
        )
        drawn = rng.normal(0.0, 2 * noise * norm, len(model))
        drawn[untrained_positions(layout, untrained)] = 0.0
        model += drawn
    arrays = layout.to_record(model)
    reply.content[messages.ARRAYS] = ArrayRecord({name: stays.get(name, arrays[name]) for name in arrays})
    messages.metrics_of(reply).pop(messages.TRAIN_LOSS, None)  # it tells of the data too
    return reply


def noise_from_seed(record: ConfigRecord, context: Context) -> bool:
    """Tell whether a client's noise comes from the run's seed: in a simulation, unless ``dp-noise`` is system.

    A client with data of its own never takes it from there.
    """
    own = "data-path" in context.node_config
    return record.get("dp-noise") != SYSTEM and is_simulated(context) and not own
