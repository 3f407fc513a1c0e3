"""What a task draws at random, by what its model is for: each from a stream of its own.

batches, augmentation     a generator, of (seed, client, task)
randomness                the seed of what the model itself draws, such as dropout
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from strategies import streams

Generator = Callable[[int, int, int], np.random.Generator]


@dataclass(frozen=True)
class Draws:
    """The streams of a task."""

    batches: Generator
    augmentation: Generator
    randomness: Callable[[int, int, int], int]


#: Of the task whose result is sent.
SENT = Draws(
    lambda seed, *ids: streams.generator(seed, "batches", *ids),
    lambda seed, *ids: streams.generator(seed, "augmentation", *ids),
    lambda seed, *ids: streams.whole_number(seed, "local-randomness", *ids),
)
#: Of a client's own model.
PERSONAL = Draws(
    lambda seed, *ids: streams.generator(seed, "personal-batches", *ids),
    lambda seed, *ids: streams.generator(seed, "personal-augmentation", *ids),
    lambda seed, *ids: streams.whole_number(seed, "personal-randomness", *ids),
)
#: Of a model that is fitted to a client's rows before it is scored.
FINE_TUNING = Draws(
    lambda seed, *ids: streams.generator(seed, "fine-tuning-batches", *ids),
    lambda seed, *ids: streams.generator(seed, "fine-tuning-augmentation", *ids),
    lambda seed, *ids: streams.whole_number(seed, "fine-tuning-randomness", *ids),
)


def batches_of_many(seed: int, clients: Sequence[int], task: int) -> Iterator[np.random.Generator]:
    """Yield what ``SENT`` draws the batches of this task of each of the clients from."""
    return streams.generators(seed, "batches", [(client, task) for client in clients])
