"""A run whose clients all fail from some point on until its end: it has failed, or diverged, though it has a model.

A run with rounds has failed if none of its last rounds had a valid reply: a tenth of all, three at least. One without
rounds, if no client counts any more when its time is over.
"""

import math
from collections.abc import Mapping
from typing import Any

from fedapp.server.record import Entry, Observer
from strategies import AsynchronousStrategy, FederatedStrategy
from strategies.flower import messages

LEAST, SHARE = 3, 0.1  # rounds, and of all


class Fruitless(Observer):
    """Counts the rounds in a row in which no reply was valid, but for those in which all were still at work."""

    def __init__(self, strategy: FederatedStrategy) -> None:
        self.strategy = strategy
        self.rounds = 0

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on counting; a checkpoint of an earlier version has no count."""
        self.rounds = int(state.get("rounds-without-reply", 0))

    def measure(self, entry: Entry) -> None:
        """Count a round."""
        told = entry.progress.metrics
        if (participants := told.get(messages.PARTICIPANTS)) is None:
            return
        if participants:
            self.rounds = 0
        elif told.get(messages.FAILURES) or told.get(messages.DROPPED_UPDATES):
            self.rounds += 1  # else all are at work on what counts in a later round

    def state(self) -> dict[str, Any]:
        """Return the count."""
        return {"rounds-without-reply": self.rounds}

    def judge(self) -> None:
        """Raise RunError with the last reason against a client's work, by the rule above."""
        strategy = self.strategy
        if isinstance(strategy, AsynchronousStrategy):
            ledger = strategy.ledger
            if ledger.members and not ledger.counting:
                raise strategy.run.given_up(
                    f"every client was dropped before the end, after {strategy.aggregations} aggregations"
                )
        elif self.rounds >= max(LEAST, math.ceil(SHARE * strategy.aggregations)):
            raise strategy.run.given_up(
                f"no reply was valid in the last {self.rounds} of {strategy.aggregations} rounds"
            )
