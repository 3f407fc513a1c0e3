"""Replies of a round that are added to its sum in one pass, several at once (``WeightedSum.attempt``)."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from flwr.app import Message

from strategies.clients.roster import Client
from strategies.flower.arrays import ArraysMismatchError
from strategies.rounds.round import Round
from strategies.updates.aggregation import WeightedSum
from strategies.updates.chain import Check, ModelInReply
from strategies.updates.safeguards import Safeguards

SINGLE = 4  # bytes of a float
HELD = 64 << 20  # bytes of replies that wait for each other, at most, where one block of clients has fewer


@dataclass
class Added:
    """What became of a client's reply.

    Attributes
    ----------
    place : int
        The client's position in the round.
    model : ModelInReply, optional
        Its model, which is in the sum; its ``scale`` says whether it was shortened.
    error : ArraysMismatchError, optional
        Why it has none.
    """

    place: int
    model: ModelInReply | None = None
    error: ArraysMismatchError | None = None


class InOnePass:
    """Adds replies to a round's sum, in which nothing but the safeguards' bound of norms is between check and sum.

    Parameters
    ----------
    check : Check
        The check of replies.
    total : WeightedSum
        The round's sum.

    Attributes
    ----------
    batches : list of range
        The positions of the clients whose replies are added at once.
    """

    def __init__(self, check: Check, guards: Safeguards, current: Round, total: WeightedSum) -> None:
        self._check, self._guards, self._current, self._total = check, guards, current, total
        whole = total.block * max(check.layout.num_bytes, 1)
        self.batches = list(self._cut(total.block * max(HELD // whole, 1)))
        self._base_norm = _norm(current.model)
        floats = [dtype for dtype in check.layout.dtypes if dtype.kind == "f"]
        self._measures = guards.learns_norms or any(dtype.itemsize > SINGLE for dtype in floats)

    def _cut(self, at_once: int) -> Iterator[range]:
        """Yield the batches, of whole blocks of clients; lost tasks aren't in a block."""
        clients, begin, number = self._current.clients, 0, 0
        for place, client in enumerate(clients):
            number += client.index not in self._current.lost
            if number == at_once or place == len(clients) - 1:
                yield range(begin, place + 1)
                begin, number = place + 1, 0

    def add(self, places: range, replies: Mapping[int, Message], weights: Sequence[float]) -> list[Added]:
        """Add the replies of a batch."""
        added = self._attempted(places, replies, weights)
        if self._bound(added):
            self._attempt(added, weights)
        self._total.keep()
        return added

    def add_all(self, replies: Mapping[int, Message], weights: Sequence[float]) -> list[Added]:
        """Add all replies of a round, after the norms of all of them are known."""
        added = list[list[Added]]()
        for places in self.batches:
            added.append(self._attempted(places, replies, weights))
            self._total.keep()
            for each in added[-1]:
                if each.model is not None:
                    self._guards.see(each.model)
                    each.model.arrays = ()  # they may be copies
        together = [each for batch in added for each in batch]
        if self._bound(together):
            self._total.clear()
            for batch in added:
                for each in batch:
                    if each.model is not None:
                        again = self._check.in_reply(self._client(each), replies[each.place], each.model.base)
                        each.model.arrays = again.arrays
                self._attempt(batch, weights)
                self._total.keep()
        return together

    def _client(self, each: Added) -> Client:
        return self._current.clients[each.place]

    def _attempted(
        self, places: range, replies: Mapping[int, Message], weights: Sequence[float]
    ) -> list[Added]:
        """Add the models of the valid replies at ``places`` to the sum, none of them shortened."""
        added = [Added(place) for place in places]
        for each in added:
            try:
                client = self._client(each)
                base = self._current.base_of(client)
                each.model = self._check.in_reply(client, replies.get(each.place), base)
            except ArraysMismatchError as error:
                each.error = error
        if not self._attempt(added, weights, measure=self._measures):
            self._attempt(added, weights)
        if self._refuse(added, replies):
            self._attempt(added, weights)
        return added

    def _attempt(self, added: Sequence[Added], weights: Sequence[float], *, measure: bool = True) -> bool:
        present = [each for each in added if self._client(each).index not in self._current.lost]
        models = [None if each.model is None else (weights[each.place], each.model) for each in present]
        return self._total.attempt(self._check.layout.spans, models, measure=measure)

    def _refuse(self, added: Sequence[Added], replies: Mapping[int, Message]) -> bool:
        """Leave out the models whose values are invalid; return whether there are any."""
        any_refused = False
        for each in added:
            if (model := each.model) is None:
                continue
            own = model.base is self._current.model
            if self._check.surely_sound(model, self._base_norm if own else _norm(model.base)):
                continue
            try:
                self._check(self._client(each), replies[each.place], model.base)
            except ArraysMismatchError as error:
                each.model, each.error, any_refused = None, error, True
        return any_refused

    def _bound(self, added: Sequence[Added]) -> bool:
        """Set by how much models are shortened, in the order of the clients, and return whether any is."""
        if not self._guards.learns_norms:
            return False
        for each in added:
            if (model := each.model) is not None:
                bound, norm = self._guards.norms.bound(model.client, model.norm()), model.norm()
                model.scale = bound / norm if norm > bound else None
        return any(each.model is not None and each.model.scale is not None for each in added)


def _norm(base: np.ndarray) -> float:
    return math.sqrt(float(np.einsum("i,i->", base, base)))
