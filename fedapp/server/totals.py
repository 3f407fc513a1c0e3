"""What a run has cost so far: failures, bytes up and down, and where rounds close early what was late or wasted."""

from collections.abc import Mapping
from typing import Any

from fedapp.server.record import Entry, Observer
from strategies.flower import messages

# What sums are called, and what of an aggregation they add up.
_ALWAYS = {key: key for key in (messages.FAILURES, messages.BYTES_UP, messages.BYTES_DOWN)}
_CLOSING_EARLY = {
    "tasks-late": messages.LATE_UPDATES,
    "tasks-dropped": messages.DROPPED_UPDATES,
    messages.BYTES_WASTED: messages.BYTES_WASTED,
}


class Totals(Observer):
    """Puts sums over the run in place of what an aggregation alone had."""

    def __init__(self) -> None:
        self.totals = dict.fromkeys(_ALWAYS, 0)

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on adding up."""
        self.totals = dict(state["totals"])

    def measure(self, entry: Entry) -> None:
        """Add an aggregation's."""
        told = entry.progress.metrics
        for total, key in (_ALWAYS | _CLOSING_EARLY).items():
            if key in told or total in self.totals:
                self.totals[total] = self.totals.get(total, 0) + int(told.get(key, 0))
        entry.metrics.update(self.totals)

    def state(self) -> dict[str, Any]:
        """Return the sums."""
        return {"totals": dict(self.totals)}
