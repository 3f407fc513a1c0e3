"""The length of a run with ``num-server-rounds = 0``.

A synchronous strategy goes 40 rounds. An asynchronous strategy goes on for the virtual time of 40 rounds, each of the
duration of the slowest client's task, so that the methods can be compared with their defaults. The number of
aggregations is computed from the contributions that the clients send in this time. In real time the durations of
tasks aren't known, and all count as equally long. All clients count as available. Where a method drops stale work,
only ``fresh`` contributions count. How many contributions ``accept`` drops, or a method with a buffer, isn't known
beforehand, and all of them count. ``eval-every`` then counts the aggregations of a round's time.
"""

import heapq
import itertools
import logging
import math

import numpy as np
from numpy.typing import NDArray

from fedapp.config import RunConfig
from fedapp.config.run_keys import ROUNDS, scaled
from strategies import AsynchronousStrategy, Rennala, streams
from strategies.methods.shared.arrivals import Buffered
from strategies.timing.event_queue import EventQueue
from strategies.timing.time_scenario import TimeScenario, is_profile

log = logging.getLogger("flwr.fedapp")

# Largest number of clients whose schedule is simulated; of more clients, those that wait for a full buffer count as
# working.
MOST_PLAYED = 10_000


def with_length(
    config: RunConfig,
    strategy: AsynchronousStrategy,
    num_clients: int,
    times: NDArray[np.float64] | None = None,
) -> RunConfig:
    """Return the config with the number of aggregations in place of ``num-server-rounds = 0``, and log that number.

    ``times`` (C,) are the seconds of the clients' tasks, where they follow from what tasks weigh; until they are
    known, 0 stays.
    """
    if times is None:
        if config.clock != "wall" and is_profile(config.time_scenario):
            return config
        scenario = "F0" if config.clock == "wall" else config.time_scenario
        times = TimeScenario(scenario, num_clients, config.seed).means
    number = _aggregations(config, strategy, times)
    every = scaled(config.eval_every, number)
    log.info(
        "num-server-rounds = 0: %d aggregations, as long as %d rounds of all clients; evaluated every %d",
        number,
        ROUNDS,
        every,
    )
    return config.model_copy(update={"num_server_rounds": number, "eval_every": every})


def _aggregations(config: RunConfig, strategy: AsynchronousStrategy, times: NDArray[np.float64]) -> int:
    num_clients = len(times)
    if strategy.interval is not None and config.clock == "wall":
        return ROUNDS  # in real time the ratio of an interval to a round isn't known either
    if (foreseen := strategy.predict_num_aggregations(times, ROUNDS * float(times.max()))) is not None:
        return foreseen
    if strategy.interval is not None:
        return math.ceil(ROUNDS * float(times.max()) / strategy.interval)
    size = (
        strategy.m if isinstance(strategy, Buffered | Rennala) else getattr(strategy.config, "buffer_size", 1)
    )
    concurrency = strategy.config.concurrency
    able, waits = strategy.capabilities, isinstance(strategy, Buffered)
    if able.drops_stale and not waits:
        return _played_on(strategy, times, size, ROUNDS * times.max())
    if able.drops_stale or able.filters_contributions:
        log.warning(
            "num-server-rounds = 0: how much work %s throws away isn't known beforehand; it counts as if "
            "none were, so that the run is longer than %d rounds%s",
            type(strategy).__name__,
            ROUNDS,
            "" if waits else ": `fresh` in place of `accept` tells",
        )
    size = min(size, num_clients)
    if size > 1 and not concurrency and num_clients <= MOST_PLAYED:
        return _played(times, size, ROUNDS * times.max())
    contributions = ROUNDS * float((times.max() / times).sum())
    if concurrency:
        contributions *= min(1.0, concurrency / num_clients)
    return math.ceil(contributions / size)


def _played(times: NDArray[np.float64], size: int, end: float) -> int:
    """Return how often a buffer of ``size`` is full by time ``end``, where its clients wait until it is full."""
    queue: EventQueue = EventQueue()
    for client, time in enumerate(times):
        queue.push(float(time), client, client)
    for number in itertools.count():
        arrived = [queue.pop() for _ in range(size)]
        if (now := arrived[-1][0]) > end:
            return max(number, 1)
        for _, client in arrived:
            queue.push(now + float(times[client]), client, client)
    raise AssertionError


def _played_on(strategy: AsynchronousStrategy, times: NDArray[np.float64], size: int, end: float) -> int:
    """Return how often ``size`` fresh contributions have come by time ``end``, where clients work on."""
    seconds, rng = times.tolist(), streams.generator(strategy.config.seed, "length-of-a-run")
    idle = rng.permutation(len(seconds)).tolist()
    at_work = [idle.pop() for _ in range(min(strategy.config.concurrency or len(idle), len(idle)))]
    # By task: when it is done, its client, and the version of the model that it began from.
    queue = [(seconds[client], client, 0) for client in at_work]
    heapq.heapify(queue)
    number = waiting = 0
    while queue[0][0] <= end * (1 + 1e-9):
        now, client, version = queue[0]
        waiting += strategy.is_fresh_enough(number - version)
        if waiting == size:
            number, waiting = number + 1, 0
        if idle:  # the next task goes to any client that is free, this one included
            place = int(rng.integers(len(idle) + 1))
            if place < len(idle):
                idle[place], client = client, idle[place]
        heapq.heapreplace(queue, (now + seconds[client], client, number))
    return max(number, 1)
