"""The random streams of a run: the only place in the project that makes random generators.

A stream is named by the run's seed, a purpose and the ids that belong to it, and nothing else: a round's participants
are ``generator(seed, "participants", round)``, whatever was drawn before and whichever process draws them. So a run
needs no state of generators to be resumed, and one seed has one result on every engine.

The name is written out (``7/participants/3``), which no other seed, purpose or list of ids does, and hashed (BLAKE2b,
128 bits) into the stream's entropy: streams of different names have nothing to do with each other.
"""

import hashlib
import operator
import re
from typing import SupportsIndex

import numpy as np

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
    return np.random.Generator(np.random.PCG64(_entropy(seed, purpose, ids)))


def whole_number(seed: SupportsIndex, purpose: str, *ids: SupportsIndex) -> int:
    """Return a seed in [0, 2³¹) for a library that takes one in place of a generator."""
    return _entropy(seed, purpose, ids) >> 97


def unpredictable() -> np.random.Generator:
    """Return a stream that nobody can repeat, from the operating system: for noise that protects data."""
    return np.random.Generator(np.random.PCG64())


def _entropy(seed: SupportsIndex, purpose: str, ids: tuple[SupportsIndex, ...]) -> int:
    if not _PURPOSE.fullmatch(purpose):
        raise ValueError(f"purpose = {purpose!r}: must be lower-case letters, digits and hyphens")
    name = "/".join([str(operator.index(seed)), purpose, *(str(operator.index(number)) for number in ids)])
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=16).digest(), "big")
