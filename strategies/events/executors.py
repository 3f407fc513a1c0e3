"""How replies become contributions, and contributions the next model: by single updates, or by masked sums.

The event loop asks an executor alone, and doesn't know which one it has.
"""

import logging
import math
from collections.abc import Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from flwr.app import Message

from strategies.clients.client_statistics import ACCEPTED
from strategies.core.config import PrivateAsyncConfig, SecureConfig
from strategies.events.arrival_rule import ArrivalRule
from strategies.events.session import EventSession
from strategies.events.tasks import Task
from strategies.flower.arrays import Vector
from strategies.flower.grids import Work
from strategies.updates.buffers import BufferAverage
from strategies.updates.pipeline import Check, Contribution, LocalModel, Noise

if TYPE_CHECKING:
    from strategies.core.masked_sum import Missed

log = logging.getLogger("flwr.strategies")

TOO_FEW = "aggregation %d: %d contributions are fewer than the %d for %s, the model stays as it is"


class Combined(NamedTuple):
    """What an aggregation made of its contributions.

    Attributes
    ----------
    model : Vector, optional
        The next model (D,); None if the contributions are too few for a robust rule or a masked sum.
    contributions, weights : sequence
        The contributions that count, and their weights d_i.
    buffers : BufferAverage
        The average of the buffers of the clients that count.
    buffer_weight : float
        Σ d_i of these buffers.
    missed : mapping of int to Missed
        The clients that a masked sum leaves out, by index.
    """

    model: Vector | None
    contributions: Sequence[Contribution]
    weights: Sequence[float]
    buffers: BufferAverage
    buffer_weight: float
    missed: "Mapping[int, Missed]" = MappingProxyType({})


def add_central_noise(session: EventSession, total: Vector, weights: Sequence[float]) -> None:
    """Add central noise to Σ d_i Δ_i (D,), for the largest weight that any client may have in an aggregation.

    A client contributes once to an aggregation at most. Weights follow from times alone, not from updates.
    """
    config, clip, run = session.strategy.config, session.receiver.clip, session.run
    if not isinstance(config, PrivateAsyncConfig) or clip is None:
        return
    max_weight = max(*weights, *session.contribution_weights.current.weight.values())
    rng = run.central_noise(run.aggregations + 1)
    Noise(config.dp_noise_multiplier, clip.norm)(total, max_weight, rng)
    total[run.buffers_at] = 0.0


class ByUpdates:
    """The server sees single updates: it sums them, or takes them through the robust rule."""

    #: Whether a contribution is entered in client_stats when it arrives.
    counts_on_arrival = True
    _check: Check

    def __init__(self, session: EventSession) -> None:
        self._session = session
        if session.receiver.clip is not None:
            session.server_step.add_noise = partial(add_central_noise, session)

    def begin(self) -> None:
        """Begin a run."""
        self._check = self._session.receiver.check()

    def check_grid(self) -> None:
        """Do nothing: every grid brings single updates."""

    def receive(self, task: Task, reply: Message | Work | None) -> LocalModel:
        """Return the local model of a reply; raise ArraysMismatchError if it isn't valid."""
        run, client = self._session.run, task.member.client
        base = task.extra_vectors.get(run.flower.arrayrecord_key)  # what was sent in place of the model
        return self._check(client, reply, task.base if base is None else run.to_send(base)[1])

    def accepted(self, task: Task) -> None:
        """Do nothing: the update is in the contribution."""

    def combine(self, contributions: Sequence[Contribution], weights: Sequence[float]) -> Combined | None:
        """Return the next model of the contributions in client order, and their buffers; None: the run is stopped."""
        session, run = self._session, self._session.run
        buffers = BufferAverage(run.buffers)
        for contribution, weight in zip(contributions, weights, strict=True):
            buffers.add(
                contribution.client.index, weight, contribution.buffer_values, contribution.counter_origin
            )
        if session.safeguards.active:
            buffers.bound(session.safeguards.buffers)
        if session.robust is None:
            model: Vector | None = session.strategy.aggregate(run.model, contributions, weights)
            return Combined(model, contributions, weights, buffers, buffers.weight)
        model = self._moved_by(session.robust, contributions, weights)
        median = session.robust.buffer_average(run.buffers)
        return Combined(model, contributions, weights, median, buffers.weight)

    def _moved_by(
        self, robust: ArrivalRule, contributions: Sequence[Contribution], weights: Sequence[float]
    ) -> Vector | None:
        """Return the next model (D,), moved by the rule's result times Σ d_i; None if the updates are too few."""
        session, run, strategy = self._session, self._session.run, self._session.strategy
        members, note_nonzero = session.task_table.members, session.server_step.note_nonzero
        robust.take(
            {
                c.client.index: (note_nonzero(strategy.transform_update(c)), c.buffer_values)
                for c in contributions
            },
            lambda index: index in members and not members[index].dropped,
        )
        # A client whose work is in the buffer twice counts once.
        distinct = dict(zip((c.client.index for c in contributions), weights, strict=True))
        update, total = robust.result(max(weights)), sum(distinct.values())
        if update is None:
            values = run.aggregations + 1, len(robust), robust.rule.least, robust.rule.text
            if robust.window:  # until enough clients have answered
                run.warn_once(TOO_FEW, *values)
            else:
                log.warning(TOO_FEW, *values)
            return None
        total = 1.0 if math.isclose(total, 1.0, rel_tol=1e-9) else total  # m × 1/m
        return session.server_step.apply(run.model, strategy.server_update(total * update))


class ByMaskedSums:
    """Clients keep their updates; those of an aggregation mask them, and the server has their sum alone."""

    counts_on_arrival = False

    def __init__(self, session: EventSession) -> None:
        from strategies.events.secure_groups import SecureGroups  # loads libraries of cryptography

        config = session.strategy.config
        assert isinstance(config, SecureConfig)
        self._session = session
        self.groups = SecureGroups(config, session.run, session.pending, session.receiver)

    def begin(self) -> None:
        """Do nothing: what clients keep is known by the task table."""

    def check_grid(self) -> None:
        """Raise RunError, before a client trains, where an engine or a part of this run needs single updates."""
        self.groups.check_grid(self._session.grid)

    def receive(self, task: Task, reply: Message | Work | None) -> LocalModel:
        """Return a model without values in place of the one that the client keeps."""
        return self.groups.kept(task, reply)

    def accepted(self, task: Task) -> None:
        """Note a task whose update its client keeps until it is summed."""
        self._session.task_table.kept[task.member.client.index] = task

    def combine(self, contributions: Sequence[Contribution], weights: Sequence[float]) -> Combined | None:
        """Have the clients of an aggregation mask their updates; return the model moved by their sum.

        None if the run is stopped: the tasks are worked on again when it goes on.
        """
        session, run, task_table = self._session, self._session.run, self._session.task_table
        members = [task_table.members[contribution.client.index] for contribution in contributions]
        versions = {contribution.client.index: contribution.version for contribution in contributions}
        group = self.groups.sum(session.grid, run.aggregations + 1, members, weights, versions)
        if run.should_stop():
            return None
        since, now = task_table.interval_stats, run.scheduler.now()
        since.count_bytes(group.bytes_down, group.bytes_up)
        since.clipped += group.clipped
        for name, (mean, number) in group.metrics.items():
            since.add_values(name, [mean] * round(number))
        for member in members:
            del task_table.kept[member.client.index]
        for index in group.weights:
            task_table.members[index].misses = task_table.members[index].invalid_replies = 0
            session.client_stats[index].record(ACCEPTED)
            session.timeline.end(index, now, ACCEPTED)
        counted = [c for c in contributions if c.client.index in group.weights]
        d = list(group.weights.values())
        model = None
        if group.total is not None:
            add_central_noise(session, group.total, d)
            model = session.server_step.apply(run.model, session.strategy.server_update(group.total))
        return Combined(model, counted, d, BufferAverage(run.buffers), 0.0, group.missed)
