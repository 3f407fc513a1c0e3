"""Keys for clients that fail, lie or keep a secret."""

from typing import Annotated, Literal

from fedapp.config.key import OWN, if_, key, where
from fedapp.config.values import Count, Inside, Keys, Moderate, NonNegative, Positive
from strategies.updates.aggregation import MEAN, RULES

GUARDED = if_(
    "safeguards = on, or auto with clock = wall", lambda setting: setting.strategy.safeguards.active
)
_BY_SIZE = if_(
    "client-weights = samples", lambda setting: setting.strategy.config.client_weights == "samples"
)
_PRIVATE = where("dp", "central", "local")


class ProtectionKeys(Keys):
    """Bounds, robust rules and differential privacy."""

    safeguards: Annotated[
        Literal["auto", "on", "off"],
        key("bounds on what one device can do to the model; auto: in real time, where clients are devices"),
    ]
    size_ratio_bound: Annotated[
        NonNegative,
        key(
            "a client's number of examples counts as at most so many times the median of all; 0: no bound",
            GUARDED & _BY_SIZE,
        ),
    ]
    examples_bound: Annotated[Count, key("it counts as at most this, too; 0: no bound", GUARDED & _BY_SIZE)]
    arrival_weight_bound: Annotated[
        NonNegative,
        key("most that one contribution weighs, where those of a round sum to 1; 0: no bound", OWN & GUARDED),
    ]
    norm_ratio_bound: Annotated[
        NonNegative,
        key(
            "an update is shortened to so many times the median of the clients' last norms; 0: none is",
            GUARDED & where("update-norm-bound", 0.0) & where("dp", "none", "local"),
        ),
    ]
    update_norm_bound: Annotated[
        NonNegative,
        key("a longer update is shortened to this, and none moves the model further; 0: no bound"),
    ]
    aggregation_rule: Annotated[
        Literal["mean", "median", "trimmed-mean", "krum", "multi-krum", "bulyan"],
        key(
            "how a round's updates become one: the weighted mean, or a rule for faulty (Byzantine) clients",
            OWN,
        ),
    ]
    faulty_clients: Annotated[
        Count,
        key(
            "f, clients a round that the rule tolerates, whatever they send",
            OWN & where("aggregation-rule", *(rule for rule in RULES if rule != MEAN)),
        ),
    ]
    dp: Annotated[
        Literal["none", "central", "local"],
        key("differential privacy, and who adds its noise: the server (central) or each client (local)"),
    ]
    dp_clipping_norm: Annotated[Positive, key("S, to which updates are clipped", _PRIVATE)]
    dp_noise_multiplier: Annotated[
        Moderate, key("z, the noise's standard deviation over its sensitivity", _PRIVATE)
    ]
    dp_delta: Annotated[Inside, key("δ of the ε spent so far, dp-epsilon", _PRIVATE)]
