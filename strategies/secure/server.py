"""The server's part in one secure sum: it passes keys and shares on, adds masked updates, and takes the masks off.

A client may go away before any stage. The sum is of those whose masked update came. Of each of them the server
recovers the seed of its own mask, and of each that had dealt its shares and then went away the private key of its
masks with its neighbours: never both of one client.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice

import numpy as np

from strategies.flower.secure_aggregation import combine_shares
from strategies.secure.client import PublicKeys, SealedShares
from strategies.secure.graph import core_of, graph_of
from strategies.secure.masking import (
    Ring,
    SecureSumError,
    check_public,
    commitment_to,
    own_mask,
    pairwise_mask,
    public_of,
    shared_key,
)

MOST_TRIES = 200  # draws of t shares, before it is given up that a liar is found among them
_INDEX = 4  # bytes before a share: its number, from 1


class ServerSession:
    """One secure sum, from the clients' keys to the sum.

    Parameters
    ----------
    clients : sequence of int
        The clients that are asked.
    neighbours, threshold : int
        k and t (``strategies.secure.graph.terms_for``).
    rng : np.random.Generator
        Draws the graph, and which shares are tried.
    least : int
        The fewest masked updates whose sum is opened.

    Attributes
    ----------
    asked : dict of int to tuple of int
        Each client's neighbours.
    liars : dict of int to list of int
        Clients whose shares of others, by number, don't fit the shares of the rest.
    """

    def __init__(
        self,
        clients: Sequence[int],
        neighbours: int,
        threshold: int,
        rng: np.random.Generator,
        least: int = 2,
    ) -> None:
        self.threshold, self._rng, self._least = threshold, rng, least
        self.asked = graph_of(clients, neighbours, rng)
        self.liars: dict[int, list[int]] = {}
        self._keys: dict[int, PublicKeys] = {}
        self._dealt: dict[int, SealedShares] = {}
        self._dealers: set[int] = set()
        self._total: Ring | None = None
        self.summed: list[int] = []  # the clients whose masked updates are in the sum
        self._revealed: dict[int, dict[int, bytes]] = {}  # by owner, and by the client that held the share

    # ---- Keys ----------------------------------------------------------------------------------------------------

    def take_keys(self, client: int, keys: PublicKeys) -> None:
        """Take a client's public keys; SecureSumError if one is none, or the other, or another client's."""
        check_public(keys.seal)
        check_public(keys.mask)
        if keys.seal == keys.mask:
            raise SecureSumError("its two public keys are one")
        for other, known in self._keys.items():
            if {keys.seal, keys.mask} & {known.seal, known.mask}:
                raise SecureSumError(f"its public key is client {other}'s")
        self._keys[client] = keys

    def keys_for(self) -> dict[int, dict[int, PublicKeys]]:
        """Return for each client that goes on the keys of its neighbours that go on."""
        core = self._enough(set(self._keys), "sent keys")
        self._keys = {each: keys for each, keys in self._keys.items() if each in core}
        return {each: {other: self._keys[other] for other in self._near(each, core)} for each in sorted(core)}

    # ---- Shares --------------------------------------------------------------------------------------------------

    def take_shares(self, client: int, dealt: SealedShares) -> None:
        """Take a client's sealed shares; SecureSumError if they aren't one for each of its neighbours."""
        if set(dealt.sealed) != set(self._near(client, self._keys)):
            raise SecureSumError("its shares aren't one for each of its neighbours")
        self._dealt[client] = dealt

    def shares_for(self) -> dict[int, dict[int, bytes]]:
        """Return for each client that goes on the sealed shares of its neighbours that go on."""
        self._dealers = self._enough(set(self._dealt), "dealt shares")
        return {
            each: {other: self._dealt[other].sealed[each] for other in self._near(each, self._dealers)}
            for each in sorted(self._dealers)
        }

    # ---- Masked updates ------------------------------------------------------------------------------------------

    def take_masked(self, client: int, values: Ring) -> None:
        """Add a client's masked values (m,) to the sum; ``values_of`` (secure/mod.py) has checked their size."""
        if self._total is None:
            self._total = np.zeros(len(values), dtype=np.uint32)
        self._total += values
        self.summed.append(client)

    def unmask_requests(self) -> dict[int, tuple[list[int], list[int]]]:
        """Return for each client in the sum its neighbours that are there, and those that have gone since."""
        here = set(self.summed)
        gone = self._dealers - here
        if len(here) < self._least:
            raise SecureSumError(f"{len(here)} masked updates came, and a sum is of {self._least} or more")
        return {
            each: (list(self._near(each, here)), list(self._near(each, gone))) for each in sorted(self.summed)
        }

    # ---- Unmasking -----------------------------------------------------------------------------------------------

    def take_revealed(self, client: int, shares: Mapping[int, bytes]) -> None:
        """Take a client's shares of its neighbours' secrets."""
        if not set(shares) <= set(self._near(client, self._dealers)):
            raise SecureSumError("its shares are of others than its neighbours")
        for owner, share in shares.items():
            self._revealed.setdefault(owner, {})[client] = share

    def total(self) -> Ring:
        """Return the sum (m,) of the values of the clients in ``summed``.

        Raises
        ------
        SecureSumError
            If too few shares of a client's secret came, or too few of them fit together.
        """
        assert self._total is not None
        total, size, here = self._total.copy(), len(self._total), set(self.summed)
        for each in sorted(here):
            seed = self._secret(each, self._dealt[each].commitment, commitment_to)
            total -= own_mask(seed, size)
        for each in sorted(self._dealers - here):
            if not (neighbours := self._near(each, here)):
                continue
            key = self._secret(each, self._keys[each].mask, public_of)
            for other in neighbours:  # take off what the neighbour has added
                take_off = np.subtract if each > other else np.add
                shared = shared_key(key, self._keys[other].mask)
                take_off(total, pairwise_mask(shared, size), out=total)
        return total

    def _secret(self, owner: int, known: bytes, image: Callable[[bytes], bytes]) -> bytes:
        """Recover a client's secret, whose image is known; note the neighbours whose shares don't fit the others'."""
        revealed = self._revealed.get(owner, {})
        if len(revealed) < self.threshold:
            raise SecureSumError(
                f"{len(revealed)} shares of client {owner}'s secret came, and {self.threshold} are needed: too many "
                "clients have gone, or it dealt none"
            )
        numbered = self._numbered(owner, revealed)
        for tries, chosen in enumerate(islice(self._draws(list(numbered)), MOST_TRIES)):
            shares = [numbered[each] for each in chosen]
            secret = _combined(shares)
            if secret is None or not _is_image(known, image, secret):
                continue
            wrong = revealed.keys() - numbered.keys()
            if tries:  # one of the first shares is wrong, others may be: each is tried with shares that fit
                rest = numbered.keys() - set(chosen)
                wrong |= {each for each in rest if _combined([*shares[1:], numbered[each]]) != secret}
            for each in sorted(wrong):
                self.liars.setdefault(each, []).append(owner)
            return secret
        raise SecureSumError(
            f"no {self.threshold} of {len(revealed)} shares of client {owner}'s secret fit together: it dealt them "
            "wrong, or too many neighbours give wrong ones"
        )

    def _numbered(self, owner: int, revealed: Mapping[int, bytes]) -> dict[int, bytes]:
        """Return the shares with the right number: a dealer numbers them by its neighbours in ascending order."""
        places = {each: place for place, each in enumerate(self._near(owner, self._keys), start=1)}
        return {
            each: share
            for each, share in sorted(revealed.items())
            if share[:_INDEX] == places[each].to_bytes(_INDEX, "little")
        }

    def _draws(self, holders: list[int]) -> Iterator[list[int]]:
        """Yield draws of t clients: the first ones, and then others at random."""
        if len(holders) < self.threshold:
            return
        yield holders[: self.threshold]
        while len(holders) > self.threshold:
            yield sorted(holders[place] for place in self._rng.permutation(len(holders))[: self.threshold])

    def _near(self, client: int, those: set[int] | Mapping[int, object]) -> list[int]:
        return [each for each in self.asked[client] if each in those]

    def _enough(self, present: set[int], did: str) -> set[int]:
        core = core_of(self.asked, present, self.threshold)
        if not core:
            raise SecureSumError(
                f"{len(present)} of {len(self.asked)} clients {did}, and a client needs {self.threshold} neighbours "
                "that did: too many have gone"
            )
        return core


def _combined(shares: Sequence[bytes]) -> bytes | None:
    """Return the secret of t shares, None if they don't fit together."""
    if len({len(share) for share in shares}) != 1:
        return None
    try:
        return combine_shares(list(shares))
    except ValueError:
        return None


def _is_image(known: bytes, image: Callable[[bytes], bytes], secret: bytes) -> bool:
    try:
        return image(secret) == known
    except SecureSumError:
        return False
