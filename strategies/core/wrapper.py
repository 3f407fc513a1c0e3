"""Checks of a wrapper around a strategy, such as Flower's wrappers for differential privacy.

A wrapper has the loop: it asks the strategy for a round's requests, and passes the replies on to it. Two things go
wrong without a word that helps, with Flower's own strategies as well:

- a wrapper that leaves clipping to the clients sends them ``clipping_norm``, and adds noise for updates of that norm,
  whether or not a mod of the app clips: only a longer update tells;
- a round in which a client reports an error isn't passed on; if none is, the result has no arrays.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from flwr.app import Message
from numpy.typing import NDArray

from strategies.flower import messages
from strategies.updates.chain import Local

log = logging.getLogger("flwr.strategies")

# Of Flower's wrappers and mods: a field of requests, and a metric that only the adaptive mod adds.
CLIPPING_NORM = "clipping_norm"
NORM_BIT = "norm_bit"

# What rounding to an array's dtype makes of a length, at most: of the bound, and of the model's norm.
_SLACK, _EPSILON = 1e-3, float(np.finfo(np.float32).eps)


@dataclass(frozen=True)
class OuterLoop:
    """The words of the log for a loop that isn't the strategy's own: a wrapper's, or a subclass's ``start``.

    Attributes
    ----------
    who : str
        Names the loop, and begins a subclause.
    passing : str
        Names the loop where it passes replies on, or doesn't.
    why_none : str
        Why it may have passed no replies on.
    instead : str
        What to call instead.
    """

    who: str
    passing: str
    why_none: str
    instead: str

    @classmethod
    def around(cls, name: str, *, own_start: bool) -> "OuterLoop":
        """Return the loop around a strategy of this name; ``own_start``: its class has a ``start`` of its own."""
        if own_start:
            return cls(
                f"a loop of its own, such as the start() of {name},",
                f"the start() of {name}",
                "aggregate_train wasn't called",
                "super().start()",
            )
        return cls(
            "a wrapper around the strategy, such as one for privacy,",
            f"the wrapper around {name}",
            "Flower's wrappers do so if any client reports an error, which their lines above name",
            "the strategy's own start()",
        )


class Wrapped:
    """Observations of a wrapper, from the first round of a run on.

    Parameters
    ----------
    loop : OuterLoop
        The wrapper in the words of the log.
    """

    def __init__(self, loop: OuterLoop) -> None:
        self.loop = loop
        self.reset()

    def reset(self) -> None:
        """Forget the wrapper of an earlier run."""
        self._norm = 0.0  # S that clients are sent; 0: none
        self._asked = 0  # the round whose replies haven't been passed on; 0: none
        self._any_passed = False
        self._clips = False  # whether an update looks clipped
        self._said: set[str] = set()

    def asks(self, server_round: int, config: Mapping[str, Any]) -> None:
        """Note that the wrapper asks for a round's requests."""
        self._asked, norm = server_round, config.get(CLIPPING_NORM)
        self._norm = float(norm) if isinstance(norm, int | float) and norm > 0 else 0.0

    def passes_on(self) -> None:
        """Note that the wrapper has passed replies on."""
        self._asked, self._any_passed = 0, True

    def ends(self, server_round: int) -> None:
        """Warn if a round is over and the wrapper has passed no reply on."""
        if server_round and self._asked == server_round:
            log.warning(
                "round %d: %s passed no replies on, and the model stays as it is: %s%s",
                server_round,
                self.loop.passing,
                self.loop.why_none,
                "" if self._any_passed else "; until a round counts, the result has no arrays",
            )

    def look(self, local: Local, untrained_at: NDArray[np.intp], reply: Message) -> None:
        """Check the norm of a client's whole update, as it came, against the wrapper's clipping norm."""
        if not self._norm:
            return
        square = float(np.linalg.norm(local.model - local.base)) ** 2
        if local.untrained is not None:  # Flower's mods clip it with the others
            square += float(np.linalg.norm(local.untrained - local.base[untrained_at])) ** 2
        slack = _SLACK * self._norm + _EPSILON * float(np.linalg.norm(local.base))
        if square**0.5 > self._norm + slack:
            self._say_once(
                "%s = %g, and the update of client %s has norm %.4g: its app doesn't clip, and a wrapper's noise for "
                "that norm protects too little; Flower's mod is fixedclipping_mod",
                local.client.located,
                square**0.5,
            )
        self._clips = (
            self._clips or square**0.5 >= self._norm - slack or NORM_BIT in messages.metrics_of(reply)
        )

    def judge(self) -> None:
        """Warn after a round if no update was long enough to show whether clients clip."""
        if self._norm and not self._clips:
            self._say_once(
                "%s = %g, and no update was as long: whether clients clip can't be told. Where a wrapper leaves it "
                "to them, a mod of the app must, such as fixedclipping_mod; else its noise protects too little"
            )

    def _say_once(self, text: str, *values: object) -> None:
        if text not in self._said:
            self._said.add(text)
            log.warning(text, CLIPPING_NORM, self._norm, *values)
