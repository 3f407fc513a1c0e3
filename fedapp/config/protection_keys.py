"""Keys for clients that fail, lie or keep a secret."""

from typing import Annotated, Literal

from fedapp.config.key import OWN, key, where
from fedapp.config.values import Count, Inside, Keys, NonNegative, Positive
from strategies.aggregation import MEAN, RULES

_PRIVATE = where("dp", "central", "local")


class ProtectionKeys(Keys):
    """Bounds, robust rules and differential privacy."""

    update_norm_bound: Annotated[NonNegative, key("a longer update is shortened to this; 0: none is")]
    aggregation_rule: Annotated[
        Literal["mean", "median", "trimmed-mean", "krum", "multi-krum", "bulyan"],
        key("how a round's updates are put together", OWN),
    ]
    faulty_clients: Annotated[
        Count,
        key(
            "f, clients a round that a robust rule bears",
            OWN & where("aggregation-rule", *(rule for rule in RULES if rule != MEAN)),
        ),
    ]
    dp: Annotated[Literal["none", "central", "local"], key("differential privacy, and who makes its noise")]
    dp_clipping_norm: Annotated[Positive, key("S, to which updates are clipped", _PRIVATE)]
    dp_noise_multiplier: Annotated[Positive, key("z, the noise's deviation over its sensitivity", _PRIVATE)]
    dp_delta: Annotated[Inside, key("δ at which the ε spent is told", _PRIVATE)]
