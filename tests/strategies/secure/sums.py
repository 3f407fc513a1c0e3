"""A secure sum between sessions in memory, whose clients go away where a test says so."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from strategies import streams
from strategies.secure.client import ClientSession
from strategies.secure.graph import terms_for
from strategies.secure.masking import Quantizer, Ring
from strategies.secure.server import ServerSession


@dataclass
class Sum:
    """A sum of n clients, client i of whom goes away before stage ``gone[i]`` (0: keys, … 3: unmask)."""

    server: ServerSession
    clients: Mapping[int, ClientSession]
    gone: Mapping[int, int] = field(default_factory=dict)
    masked: dict[int, Ring] = field(default_factory=dict)

    @classmethod
    def of(
        cls, number: int, gone: Mapping[int, int] | None = None, k: int = 0, t: int = 0, least: int = 2
    ) -> "Sum":
        terms = terms_for(number, k, t)
        server = ServerSession(range(number), *terms, streams.generator(number, "test"), least)
        return cls(server, {i: ClientSession(i, terms.threshold) for i in range(number)}, gone or {})

    def is_available(self, those: Collection[int], stage: int) -> list[int]:
        return [each for each in those if self.gone.get(each, 4) > stage]

    def until_masked(self, values: Sequence[Ring]) -> None:
        for each in self.is_available(self.clients, 0):
            self.server.take_keys(each, self.clients[each].keys())
        keys = self.server.keys_for()
        for each in self.is_available(keys, 1):
            self.server.take_shares(each, self.clients[each].share(keys[each]))
        sealed = self.server.shares_for()
        for each in self.is_available(sealed, 2):
            self.masked[each] = self.clients[each].mask(sealed[each], values[each])
            self.server.take_masked(each, self.masked[each])

    def total(self, values: Sequence[Ring], lies: Mapping[int, Collection[int]] | None = None) -> Ring:
        """Return the sum; ``lies``: of which clients a client gives a wrong share."""
        self.until_masked(values)
        asks = self.server.unmask_requests()
        for each in self.is_available(asks, 3):
            shares = self.clients[each].reveal(*asks[each])
            for owner in (lies or {}).get(each, ()):
                if owner in shares:
                    shares[owner] = shares[owner][:-1] + bytes([shares[owner][-1] ^ 1])
            self.server.take_revealed(each, shares)
        return self.server.total()


def encoded(updates: np.ndarray, weights: Sequence[float], quantizer: Quantizer) -> list[Ring]:
    rows = zip(updates, weights, strict=True)
    return [quantizer.encode(d, w, streams.generator(0, "round", i)) for i, (d, w) in enumerate(rows)]
