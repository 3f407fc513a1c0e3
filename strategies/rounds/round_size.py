"""How many clients a round asks, and how many valid replies close it."""

from collections.abc import Sequence
from math import inf

from strategies.core.run_state import RunState
from strategies.rounds.deadline import number_to_ask
from strategies.rounds.participation import Participation


class RoundSize:
    """The size of rounds that may close early.

    Parameters
    ----------
    over_select : float
        o: where L clients are needed, ⌈(1 + o) L⌉ are asked; 0: L are asked, and all are waited for.
    """

    def __init__(self, run: RunState, scheme: Participation, over_select: float) -> None:
        self._run, self._scheme, self._over_select = run, scheme, over_select

    def there(self) -> int:
        """Return how many clients are there now by their availability, at work or not."""
        pace, clients = self._run.pace, self._run.clients
        return len(clients) if pace.always else max(sum(pace.there(client) for client in clients), 1)

    def to_ask(self, there: int) -> int:
        """Return how many clients are asked when so many are there."""
        return number_to_ask(self._scheme.sample_size(there), self._over_select)

    def needed(self, there: int) -> float:
        """Return L, the replies that close a round when so many clients are there; infinity: all."""
        return self._scheme.sample_size(there) if self._over_select else inf

    def worth(self, weights: Sequence[float], there: int) -> list[int]:
        """Return for how many of L each reply counts: where a client may be drawn twice, d_i is counts / draws."""
        if self._scheme.scheme != "md":
            return [1] * len(weights)
        return [round(weight * self.to_ask(there)) for weight in weights]
