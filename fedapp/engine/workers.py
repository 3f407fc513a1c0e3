"""Workers on Ray: what the vectorized engine trains, divided over processes on one machine or many.

A worker is an actor with the CPUs, or the part of a GPU, that ``client-resources`` says. It holds the rows of the
clients that it has been given so far, which are read on its machine, and works on blocks of tasks: it returns their
sum, or the replies where a method looks at single updates. What clients keep between tasks stays in this process
and is sent with each task, so that nothing is lost with a worker, alone or with its machine: its blocks are done
again by others, and another worker is started in its place.

Blocks are those of the engine in one process (strategies/updates/sums.py), and so are the bits of the results.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from uuid import uuid4

import ray
from flwr.app import ConfigRecord, Context, Message
from ray.exceptions import RayError, RayTaskError

from fedapp import client_app, federation
from fedapp.client.request import config_of, device_of, record_of
from fedapp.config import ConfigError
from fedapp.config.options import SimulationConfig
from fedapp.engine.nodes import descriptions
from fedapp.engine.ray import sigterm_kept, without_announcements
from fedapp.engine.summing import SharedTerms, divided
from fedapp.engine.vectorized import VectorizedGrid
from fedapp.federation.rows import rows_as_needed
from fedapp.names import Way
from fedapp.training.trainer import Trainer
from strategies.flower import messages
from strategies.flower.errors import RunError
from strategies.flower.grids import Description, WorkRequest
from strategies.updates.sums import BlockSum, SumRequest, SumTasks

log = logging.getLogger("flwr.fedapp")

# Blocks that a worker of one CPU is given at once, so that it needn't wait for the next block.
AT_ONCE = 2

# Workers that may be lost in a row beyond the number of workers; after more, the run fails.
MOST_IN_A_ROW = 3

# Seconds that a run waits for a worker when none is left.
PATIENCE = 300.0


class RayWorker:
    """The Ray actor: the vectorized engine, for the blocks of tasks that it is sent."""

    def __init__(self, num_clients: int, threads: int, way: Way | None) -> None:
        trainer = Trainer(way, threads)
        self.grid = VectorizedGrid(client_app.app, num_clients, trainer, rows_as_needed)
        self._terms: tuple[str, SharedTerms] | None = None
        self._lock = threading.Lock()

    def place(self) -> str:
        """Return the id of the machine that this worker runs on."""
        return str(ray.get_runtime_context().get_node_id())

    def is_on_gpu(self, config: ConfigRecord) -> bool:
        """Return True if this worker trains on a GPU."""
        return device_of(config_of(config)).type != "cpu"

    def sums(self, name: str, request: SumRequest, tasks: SumTasks, frozen: "Frozen") -> BlockSum:
        """Return the sum of a block of the round with this name."""
        _offer(frozen)
        with self._lock:
            if self._terms is None or self._terms[0] != name:
                self._terms = name, SharedTerms(request, self.grid.contexts, self.grid.rows_of)
            terms, trainer = self._terms[1], self.grid.trainer
        return next(trainer.ahead(lambda own: terms.block(own, trainer), [tasks], alone=terms.on_gpu))

    def replies(
        self, pairs: Sequence[tuple[Message, Context]], frozen: "Frozen"
    ) -> list[tuple[Message, Context]]:
        """Return the replies to a block of requests, and their clients' contexts after the work."""
        _offer(frozen)
        with self._lock:
            return self.grid.work_on(pairs)


# The digest of the frozen arrays, and a reference to them in Ray's store, which a worker reads if its model has
# others. None: all arrays are sent.
Frozen = tuple[str, list[Any]] | None


def _offer(frozen: Frozen) -> None:
    if frozen is not None:
        digest, references = frozen
        federation.offer(digest, lambda: bytes(ray.get(references[0])))


@dataclass
class _Seat:
    """A worker's place among the others, with its share of the clients; a new worker takes a lost one's place."""

    number: int
    actor: Any
    ready: Any  # a reference to a result that the actor gives once it has started
    is_started: bool = False
    waiting: deque[int] = field(default_factory=deque)
    under_way: set[int] = field(default_factory=set)


@dataclass(frozen=True)
class Unit:
    """A block for a worker: its first client's node, the method of ``RayWorker``, and its arguments."""

    node_id: int
    method: str
    arguments: tuple[Any, ...]


class Workers:
    """Actors that work on units; units of a lost actor are done by others.

    Parameters
    ----------
    start : callable
        Starts an actor.
    number, num_clients : int
        Number of workers, and number of clients; the clients' ids are divided over the workers.
    at_once : int
        Units that a worker is given at once.
    """

    def __init__(self, start: Callable[[], Any], number: int, num_clients: int, at_once: int) -> None:
        self._at_once = at_once
        self._start, self._num_clients = start, num_clients
        self._in_a_row = 0  # workers lost since the last result
        self.seats = [self._seat(place) for place in range(number)]
        self.lost = 0

    def _seat(self, number: int) -> _Seat:
        actor = self._start()
        return _Seat(number, actor, actor.place.remote())

    def run(self, units: Sequence[Unit]) -> Iterator[Any]:
        """Yield the results of units, in their order.

        Raises
        ------
        RunError
            If no worker is there for five minutes, or too many are lost in a row.
        """
        for seat in self.seats:
            seat.waiting.clear()
            seat.under_way.clear()
        for place, unit in enumerate(units):
            at = (unit.node_id - 1) * len(self.seats) // max(self._num_clients, 1)
            self.seats[min(at, len(self.seats) - 1)].waiting.append(place)
        found: dict[int, Any] = {}
        references: dict[Any, tuple[_Seat, int]] = {}
        due, since = 0, time.monotonic()
        while due < len(units):
            self._hand_out(units, references)
            starting = {seat.ready: seat for seat in self.seats if not seat.is_started}
            done, _ = ray.wait([*references, *starting], timeout=1.0)
            for reference in done:
                if reference in starting:
                    self._begin(starting[reference])
                elif reference in references:
                    self._take(reference, references, found)
            if done:
                since = time.monotonic()
            elif time.monotonic() - since > PATIENCE and not references:
                raise RunError(
                    f"no worker has been there for {PATIENCE:.0f} seconds: Ray has no free CPUs or GPUs for one"
                )
            while due in found:
                yield found.pop(due)
                due += 1

    def _hand_out(self, units: Sequence[Unit], references: dict[Any, tuple[_Seat, int]]) -> None:
        """Give each worker that has started the next blocks of its share, then blocks of the longest other share."""
        for seat in self.seats:
            while seat.is_started and len(seat.under_way) < self._at_once:
                longest = max(self.seats, key=lambda other: (len(other.waiting), other is seat))
                if not (seat.waiting or longest.waiting):
                    return
                place = seat.waiting.popleft() if seat.waiting else longest.waiting.pop()
                unit = units[place]
                reference = getattr(seat.actor, unit.method).remote(*unit.arguments)
                references[reference] = seat, place
                seat.under_way.add(place)

    def _take(self, reference: Any, references: dict[Any, tuple[_Seat, int]], found: dict[int, Any]) -> None:
        seat, place = references.pop(reference)
        try:
            found[place] = ray.get(reference)
            self._in_a_row = 0
            seat.under_way.discard(place)
        except RayTaskError as error:
            raise (error.cause if isinstance(error.cause, Exception) else error) from None
        except RayError as error:
            for other in [key for key, (of, _) in references.items() if of is seat]:
                del references[other]
            self._replace(seat, error)

    def _begin(self, seat: _Seat) -> None:
        try:
            ray.get(seat.ready)
            seat.is_started = True
        except RayError as error:
            self._replace(seat, error)

    def _replace(self, seat: _Seat, error: RayError) -> None:
        """Start another worker in the place of a lost one; its blocks wait for any worker that is free."""
        self.lost, self._in_a_row = self.lost + 1, self._in_a_row + 1
        if self._in_a_row > len(self.seats) + MOST_IN_A_ROW:
            last = messages.last_line(str(error))
            raise RunError(f"{self._in_a_row} workers were lost, one after the other; the last one: {last}")
        log.warning("worker %d is lost: another is started, and its blocks are done again", seat.number)
        seat.waiting.extendleft(sorted(seat.under_way, reverse=True))
        seat.under_way.clear()
        ray.kill(seat.actor)
        seat.actor, seat.is_started = self._start(), False
        seat.ready = seat.actor.place.remote()

    def close(self) -> None:
        """End the workers."""
        for seat in self.seats:
            ray.kill(seat.actor)


class WorkersGrid(VectorizedGrid):
    """The vectorized engine whose workers train and evaluate, on GPUs if ``gpus`` is true."""

    def __init__(self, num_supernodes: int, workers: Workers, *, gpus: bool) -> None:
        super().__init__(client_app.app, num_supernodes, Trainer(workers=1))
        self.workers = workers
        self.gpus = gpus
        self._frozen: dict[str, Frozen] = {}

    def _frozen_of(self, config: ConfigRecord) -> Frozen:
        """Return the frozen arrays that a request names, put into Ray's store once."""
        digest = str(config.get(messages.FROZEN, ""))
        if (read := federation.offered(digest)) is None:
            return None
        if digest not in self._frozen:
            self._frozen = {digest: (digest, [ray.put(read())])}
        return self._frozen[digest]

    def descriptions(self, node_ids: Sequence[int], config: ConfigRecord) -> Mapping[int, Description]:
        """Return the descriptions of nodes: on this process's device if workers have GPUs, else on the CPU."""
        return descriptions(node_ids, config, self.contexts, None if self.gpus else federation.CPU)

    def sums(self, request: SumRequest) -> Iterator[BlockSum]:
        """Yield the sums of a round's blocks of clients."""
        name, shared = uuid4().hex, ray.put(replace(request, tasks=request.tasks[:0]))
        frozen = self._frozen_of(request.config)
        units = [
            Unit(tasks.nodes[0], "sums", (name, shared, tasks, frozen))
            for tasks in divided(request, on_gpu=self._on_gpu(request.config))
        ]
        return self.workers.run(units)

    def _on_gpu(self, config: ConfigRecord) -> bool:
        """Return True if workers train on GPUs; a worker is asked."""
        return self.gpus and bool(next(self.workers.run([Unit(1, "is_on_gpu", (config,))])))

    def can_work(self, request: WorkRequest) -> bool:
        """Return False: workers are sent messages."""
        return False

    def _train(self) -> None:
        self._send(messages.TRAIN)

    def _evaluate(self) -> None:
        self._send(messages.EVALUATE)

    def _send(self, kind: str) -> None:
        """Have workers answer requests at the head of the queue."""
        pairs = list(self._waiting(kind))
        groups = self._groups([request for request, _ in pairs])
        frozen = self._frozen_of(record_of(pairs[0][0])) if pairs else None
        units = [
            Unit(pairs[group[0]][1].node_id, "replies", ([pairs[i] for i in group], frozen))
            for group in groups
        ]
        for answered in self.workers.run(units):
            for reply, context in answered:
                self.contexts[context.node_id] = context
                self._replies[reply.metadata.reply_to_message_id] = reply


@contextmanager
def grid_of_workers(simulation: SimulationConfig, way: Way | None) -> Iterator[WorkersGrid]:
    """Start workers on Ray, in the cluster of ``RAY_ADDRESS`` or one of this machine, and end them.

    Raises
    ------
    ConfigError
        If Ray has no room for them.
    """
    without_announcements()
    begun = not ray.is_initialized()
    if begun:
        init = simulation.backend()["init_args"]
        with sigterm_kept():
            ray.init(**{"logging_level": "error", "include_dashboard": False, **init})
    try:
        cpus, gpus = simulation.client_resources_num_cpus, simulation.client_resources_num_gpus
        _check_room(simulation)
        actor = ray.remote(RayWorker).options(
            num_cpus=cpus, num_gpus=gpus, max_restarts=0, max_concurrency=max(cpus, AT_ONCE)
        )
        workers = Workers(
            lambda: actor.remote(simulation.num_supernodes, cpus, way),
            simulation.workers,
            simulation.num_supernodes,
            at_once=max(cpus + 1, AT_ONCE),
        )
        try:
            yield WorkersGrid(simulation.num_supernodes, workers, gpus=gpus > 0)
        finally:
            workers.close()
    finally:
        if begun:
            ray.shutdown()


def _check_room(simulation: SimulationConfig) -> None:
    there = ray.cluster_resources()
    asked = {"CPU": simulation.client_resources_num_cpus, "GPU": simulation.client_resources_num_gpus}
    for kind, each in asked.items():
        if each * simulation.workers > (has := there.get(kind, 0.0)) + 1e-9:
            raise ConfigError(
                f"workers = {simulation.workers}: with client-resources-num-{kind.lower()}s = {each:g} for each, "
                f"they need {each * simulation.workers:g} {kind}s; Ray has {has:g}"
            )
    machines = len({node["NodeID"] for node in ray.nodes() if node["Alive"]})
    log.info("workers: %d on Ray, on %d machine%s", simulation.workers, machines, "s" * (machines > 1))
