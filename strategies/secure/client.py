"""A client's part in one secure sum: four stages, each a message, and its secrets between them.

Bell, Bonawitz, Gascón, Lepoint and Raykova 2020, algorithm 2, against a server that is curious, and keeps to it:

1. *keys*: two new key pairs, one to seal shares and one for the masks with each neighbour;
2. *shares*: of the seed of its own mask, and of its private key of masks, sealed for each neighbour;
3. *masked*: the update, plus its own mask, plus or minus the one with each neighbour that takes part;
4. *unmask*: of each neighbour that is still there a share of the seed, of each that has gone a share of the key.

A client never gives both shares of a neighbour, answers each stage once, and forgets its secrets with the last one.
"""

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np
from cryptography.fernet import InvalidToken

from strategies.flower.secure_aggregation import (
    create_shares,
    decrypt,
    encrypt,
    share_keys_plaintext_concat,
    share_keys_plaintext_separate,
)
from strategies.secure.masking import (
    SEED_BYTES,
    Ring,
    SecureSumError,
    commitment_to,
    new_key,
    own_mask,
    pairwise_mask,
    public_of,
    shared_key,
)

KEYS, SHARES, MASKED, UNMASK, OVER = "keys", "shares", "masked", "unmask", "over"


@dataclass(frozen=True)
class PublicKeys:
    """A client's public keys: for sealing shares, and for masks; 33 bytes each."""

    seal: bytes
    mask: bytes


@dataclass(frozen=True)
class SealedShares:
    """A client's shares, sealed for each neighbour, and the commitment to the seed of its own mask."""

    sealed: Mapping[int, bytes]
    commitment: bytes


@dataclass
class ClientSession:
    """The secrets of a client in one secure sum, and the stage that comes next.

    Clients are named by numbers that the server gives them.

    Attributes
    ----------
    client, threshold : int
        This client, and the number of shares that open a secret.
    stage : str
        The stage that comes next.
    seal_key, mask_key, seed : bytes
        The private keys, and the seed of the client's own mask.
    neighbours : dict of int to PublicKeys
        The neighbours' public keys.
    held : dict of int to (bytes, bytes)
        The shares of neighbours' seeds and of their keys of masks; empty if a neighbour dealt none that opens.
    model : int
        A digest of the model that the client was sent, for the update that it masked.
    """

    client: int
    threshold: int
    stage: str = SHARES
    seal_key: bytes = field(default_factory=new_key, repr=False)
    mask_key: bytes = field(default_factory=new_key, repr=False)
    seed: bytes = field(default_factory=lambda: os.urandom(SEED_BYTES), repr=False)
    neighbours: dict[int, PublicKeys] = field(default_factory=dict)
    held: dict[int, tuple[bytes, bytes]] = field(default_factory=dict, repr=False)
    model: int = 0

    def keys(self) -> PublicKeys:
        """Return the public keys."""
        return PublicKeys(public_of(self.seal_key), public_of(self.mask_key))

    def share(self, neighbours: Mapping[int, PublicKeys]) -> SealedShares:
        """Return the shares for each neighbour, the nth in ascending order the nth share.

        Raises
        ------
        SecureSumError
            If the threshold isn't above half of the neighbours, or is above their number, or if two clients have a
            key in common: the server's, perhaps.
        """
        self._enter(SHARES, MASKED)
        if len(neighbours) < self.threshold or self.threshold < 2:
            raise SecureSumError(f"{len(neighbours)} neighbours for a threshold of {self.threshold}")
        if self.threshold <= len(neighbours) // 2:
            raise SecureSumError(
                f"a threshold of {self.threshold} lets two halves of {len(neighbours)} open both secrets"
            )
        everyone = [self.keys(), *neighbours.values()]
        # By x alone: whoever knows the private key of a point knows that of the point with the other y.
        points = {key[1:33] for keys in everyone for key in (keys.seal, keys.mask)}
        if self.client in neighbours or len(points) < 2 * len(everyone):
            raise SecureSumError("two clients have a public key in common")
        self.neighbours = dict(sorted(neighbours.items()))
        secrets = (self.seed, self.mask_key)
        dealt = zip(*(create_shares(each, self.threshold, len(neighbours)) for each in secrets), strict=True)
        sealed = {
            each: encrypt(
                shared_key(self.seal_key, keys.seal), share_keys_plaintext_concat(self.client, each, *shares)
            )
            for (each, keys), shares in zip(self.neighbours.items(), dealt, strict=True)
        }
        return SealedShares(sealed, commitment_to(self.seed))

    def mask(self, sealed: Mapping[int, bytes], values: Ring) -> Ring:
        """Return the masked values (m,), given the shares of the neighbours that take part.

        Raises
        ------
        SecureSumError
            If those are fewer than the threshold, or one is no neighbour.
        """
        self.open(sealed)
        return self.masked(values)

    def open(self, sealed: Mapping[int, bytes]) -> None:
        """Open the shares of the neighbours that take part; see ``mask``."""
        self._enter(MASKED, MASKED)
        if len(sealed) < self.threshold:
            raise SecureSumError(f"{len(sealed)} neighbours take part for a threshold of {self.threshold}")
        for each, token in sealed.items():
            if each not in self.neighbours:
                raise SecureSumError(f"client {each} is no neighbour")
            key = shared_key(self.seal_key, self.neighbours[each].seal)
            self.held[each] = (b"", b"")  # none that can be opened: the server finds out who dealt no share
            with suppress(InvalidToken):
                source, to, seed_share, key_share = share_keys_plaintext_separate(decrypt(key, token))
                if (source, to) == (each, self.client):
                    self.held[each] = (seed_share, key_share)

    def masked(self, values: Ring) -> Ring:
        """Return the masked values (m,), once; see ``mask``."""
        self._enter(MASKED, UNMASK)
        total = values + own_mask(self.seed, len(values))
        for each in self.held:
            add = np.add if each > self.client else np.subtract
            shared = shared_key(self.mask_key, self.neighbours[each].mask)
            add(total, pairwise_mask(shared, len(values)), out=total)
        return total

    def reveal(self, here: Sequence[int], gone: Sequence[int]) -> dict[int, bytes]:
        """Return a share of the seed of each neighbour that is there, and of the key of each that has gone.

        Raises
        ------
        SecureSumError
            If it is asked for both of one neighbour, or for one that didn't take part.
        """
        self._enter(UNMASK, OVER)
        if (both := set(here) & set(gone)) or not {*here, *gone} <= self.held.keys():
            raise SecureSumError(
                f"asked for both shares of a client ({min(both)})" if both else "asked for others' shares"
            )
        shares = {each: self.held[each][0] for each in here} | {each: self.held[each][1] for each in gone}
        return {each: share for each, share in shares.items() if share}

    def _enter(self, stage: str, following: str) -> None:
        if self.stage != stage:
            raise SecureSumError(f"the stage {stage!r} doesn't follow: {self.stage!r} does")
        self.stage = following
