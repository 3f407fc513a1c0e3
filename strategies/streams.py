"""The random streams of a run: the only place in the project that makes random generators.

A stream is named by the run's seed, a purpose and the ids that belong to it, and nothing else: a round's participants
are ``generator(seed, "participants", round)``, whatever was drawn before and whichever process draws them. So a run
needs no state of generators to be resumed, and one seed has one result on every engine.

The name is written out (``7/participants/3``), which no other seed, purpose or list of ids does, and hashed (BLAKE2b,
128 bits) into the stream's entropy: streams of different names have nothing to do with each other.
"""

import hashlib
import operator
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, SupportsIndex

import numpy as np
from numpy.random.bit_generator import ISeedSequence
from numpy.typing import NDArray

_PURPOSE = re.compile(r"[a-z][a-z0-9-]*")


def generator(seed: SupportsIndex, purpose: str, *ids: SupportsIndex) -> np.random.Generator:
    """Return the stream of a purpose, from its beginning.

    Parameters
    ----------
    seed : int
        The run's.
    purpose : str
        What is drawn, in lower case with hyphens; one place in the project draws for it.
    ids : int
        What tells this stream from others of the purpose: a round, a client, a client and its task.

    Raises
    ------
    ValueError, TypeError
        If the purpose isn't of that form, or the seed or an id is no whole number.
    """
    return np.random.Generator(np.random.PCG64(int.from_bytes(_digest(_name(seed, purpose), ids), "big")))


def generators(
    seed: SupportsIndex, purpose: str, ids: Iterable[Sequence[SupportsIndex]]
) -> Iterator[np.random.Generator]:
    """Yield what ``generator`` returns for each list of ids, in a fraction of the time.

    Most of ``generator``'s time is NumPy's seeding, which is done here for all lists at once.
    """
    start = _name(seed, purpose)
    for words in _seeded(b"".join(_digest(start, each) for each in ids)):
        yield np.random.Generator(np.random.PCG64(_Words(words)))  # type: ignore[arg-type]  # any ISeedSequence


def whole_number(seed: SupportsIndex, purpose: str, *ids: SupportsIndex) -> int:
    """Return a seed in [0, 2³¹) for a library that takes one in place of a generator."""
    return int.from_bytes(_digest(_name(seed, purpose), ids), "big") >> 97


def unpredictable() -> np.random.Generator:
    """Return a stream that nobody can repeat or predict: for noise that protects data."""
    return _Unpredictable()


class _Unpredictable(np.random.Generator):
    """Draws from the stream cipher ChaCha20 (RFC 8439) with a key of the operating system.

    NumPy's own generators aren't cryptographic: a few of their numbers tell all others. The project's draws are made
    here of the cipher's bytes; any other draw is refused.
    """

    def __init__(self) -> None:
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms

        super().__init__(np.random.PCG64(0))  # never drawn from
        self._encrypt = Cipher(algorithms.ChaCha20(os.urandom(32), bytes(16)), None).encryptor().update

    def __repr__(self) -> str:
        return "an unpredictable stream"

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("_") and name not in vars(_Unpredictable):
            raise NotImplementedError(f"an unpredictable stream has no draw {name!r}")
        return super().__getattribute__(name)

    def random(self, size: Any = None) -> Any:  # type: ignore[override]
        """Return multiples of 2⁻⁵³ in [0, 1)."""
        return _shaped((self._words(_number(size)) >> np.uint64(11)) * 2.0**-53, size)

    def normal(self, loc: float = 0.0, scale: float = 1.0, size: Any = None) -> Any:  # type: ignore[override]
        """Return draws of N(loc, scale²): a random sign times a quantile of the lower half."""
        from scipy.special import ndtri  # what draws no noise needn't load it

        words = self._words(_number(size))
        half = ((words >> np.uint64(11)) + 0.5) * 2.0**-54  # in (0, ½]
        signs = 1.0 - 2.0 * (words & np.uint64(1)).astype(np.float64)
        return _shaped(loc + scale * signs * ndtri(half), size)

    def integers(self, low: int, high: int | None = None, size: Any = None) -> Any:  # type: ignore[override]
        """Return whole numbers in [low, high), or [0, low), each as likely; there are 2⁶³ at most to choose from."""
        low, high = (0, low) if high is None else (low, high)
        unused = np.uint64(64 - max(int(high) - int(low) - 1, 1).bit_length())
        found = self._words(_number(size)) >> unused
        while len(again := np.flatnonzero(found >= np.uint64(high - low))):  # which would favour some numbers
            found[again] = self._words(len(again)) >> unused
        return _shaped(found.astype(np.int64) + low, size)

    def permutation(self, number: int) -> Any:  # type: ignore[override]
        """Return the numbers 0 to ``number`` − 1 in a random order."""
        keys = self._words(number)
        while len(np.unique(keys)) < number:
            keys = self._words(number)
        return np.argsort(keys)

    def _words(self, number: int) -> NDArray[np.uint64]:
        return np.frombuffer(self._encrypt(bytes(8 * number)), np.uint64).copy()


def _number(size: Any) -> int:
    return 1 if size is None else int(np.prod(size))


def _shaped(drawn: NDArray[Any], size: Any) -> Any:
    return drawn[0] if size is None else drawn.reshape(size)


def _name(seed: SupportsIndex, purpose: str) -> str:
    if not _PURPOSE.fullmatch(purpose):
        raise ValueError(f"purpose = {purpose!r}: must be lower-case letters, digits and hyphens")
    return f"{operator.index(seed)}/{purpose}"


def _digest(name: str, ids: Sequence[SupportsIndex]) -> bytes:
    whole = "/".join([name, *map(str, map(operator.index, ids))])
    return hashlib.blake2b(whole.encode(), digest_size=16).digest()


class _Words(ISeedSequence):
    """A seed sequence whose words (4,) for a PCG64 are computed already."""

    def __init__(self, words: NDArray[np.uint64]) -> None:
        self.words = words

    def generate_state(self, n_words: int, dtype: Any = np.uint32) -> NDArray[np.uint64]:
        assert (n_words, dtype) == (len(self.words), np.uint64)
        return self.words


def _seeded(digests: bytes) -> NDArray[np.uint64]:
    """Return ``SeedSequence(entropy).generate_state(4, np.uint64)`` of numbers of 16 bytes each, as (n, 4).

    NumPy's SeedSequence is M. E. O'Neill's seed_seq_fe with a pool of four words; NEP 19 keeps it as it is.
    """
    pool = list(
        np.frombuffer(digests, ">u4").reshape(-1, 4).astype(np.uint32).T[::-1]
    )  # the lowest word first
    mixed = _Hash(0x43B0D7E5, 0x931E8875)
    pool = [mixed(word) for word in pool]
    for source in range(4):
        for other in (place for place in range(4) if place != source):
            word = np.uint32(0xCA01F9DD) * pool[other] - np.uint32(0x4973F715) * mixed(pool[source])
            pool[other] = word ^ (word >> np.uint32(16))
    told = _Hash(0x8B51F9DD, 0x58F38DED)
    words = np.stack([told(word) for word in pool * 2], axis=1).astype(np.uint64)
    return words[:, ::2] | words[:, 1::2] << np.uint64(32)


class _Hash:
    """The hash that mixes words (n,), with other constants each time."""

    def __init__(self, constant: int, factor: int) -> None:
        self.constant, self.factor = constant, factor

    def __call__(self, words: NDArray[np.uint32]) -> NDArray[np.uint32]:
        words = words ^ np.uint32(self.constant)
        self.constant = self.constant * self.factor & 0xFFFFFFFF
        words *= np.uint32(self.constant)
        return words ^ (words >> np.uint32(16))
