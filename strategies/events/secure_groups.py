"""Aggregations without rounds of which the server learns the sum and no single update (``strategies.secure``).

A client that is done keeps its update. When the method wants an aggregation, the clients whose work waits are a
group: they mask their updates with each other, so that the server can unmask their sum alone. What a client counts is
known by then, with its staleness, and it is sent its weight before it masks. Stages take no virtual time.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from flwr.app import Message
from flwr.serverapp import Grid

from strategies.clients.client_state import ClientState
from strategies.core.config import SecureConfig
from strategies.core.masked_sum import MaskedSum, Missed, SumOptions, check_grid, reported_record
from strategies.core.receiver import Receiver
from strategies.core.requests import PendingReplies
from strategies.core.run_state import RunState
from strategies.events.tasks import Task
from strategies.flower import messages
from strategies.flower.arrays import ArraysMismatchError, Vector
from strategies.flower.errors import RunError
from strategies.flower.grids import Work
from strategies.secure.graph import FEWEST, terms_for
from strategies.secure.masking import Decoded, Quantizer, SecureSumError
from strategies.secure.mod import FROM_BEFORE
from strategies.updates.pipeline import LocalModel

AWAY = "it went away before its update was summed"
UNKNOWN = "doesn't say how many examples it has before it trains"


@dataclass
class Group:
    """What became of a group.

    Attributes
    ----------
    total : Vector, optional
        Σ d_i Δ_i (D,) over those in the sum; None if there is no sum.
    weights : dict of int to float
        The d_i of those in the sum, by client, scaled up by the weight of those that aren't.
    missed : dict of int to Missed
        Why the others aren't, by client.
    clipped : int
        How many of those in the sum had values out of range.
    metrics : dict of str to (float, float)
        The mean of each metric over those in the sum that have it, and how many they are.
    bytes_down, bytes_up : int
        Bytes of the stages.
    """

    total: Vector | None = None
    weights: dict[int, float] = field(default_factory=dict)
    missed: dict[int, Missed] = field(default_factory=dict)
    clipped: int = 0
    metrics: dict[str, tuple[float, float]] = field(default_factory=dict)
    bytes_down: int = 0
    bytes_up: int = 0


class SecureGroups:
    """Sums the updates that clients keep, group by group.

    Attributes
    ----------
    fewest : int
        The fewest clients of a group.
    """

    fewest = FEWEST

    def __init__(
        self, config: SecureConfig, run: RunState, pending: PendingReplies, receiver: Receiver
    ) -> None:
        self._config, self._run, self._pending, self._receiver = config, run, pending, receiver

    def check(self, size: int) -> None:
        """Raise ValueError if a group of so many clients has no graph with these keys."""
        terms_for(size, self._config.secure_neighbours, self._config.secure_threshold)

    def check_grid(self, grid: Grid) -> None:
        """Raise RunError, before a client trains, where an engine or a part of this run needs single updates."""
        run = self._run
        check_grid(grid, run, self._receiver)
        unknown = [client for client in run.clients if client.num_examples is None]
        if unknown and run.config.client_weights == "samples":
            who = f"client {unknown[0].display_name}"
            raise RunError(
                f"client_weights = 'samples' with secure_sums: {who} {UNKNOWN}; allowed is uniform"
            )

    def kept(self, task: Task, reply: Message | Work | None) -> LocalModel:
        """Return a model without values in place of that of a client which has trained, and keeps its update.

        Raises
        ------
        ArraysMismatchError
            If it doesn't keep one, or it isn't known how much it counts.
        """
        if reply is None:
            raise ArraysMismatchError(messages.NO_REPLY)
        assert isinstance(reply, Message)
        try:
            record = reported_record(reply)
        except SecureSumError as error:
            raise ArraysMismatchError(str(error)) from None
        member = task.member
        if record.get("task") != member.tasks:
            raise ArraysMismatchError(f"it doesn't keep the update of its task {member.tasks}")
        if self._run.config.client_weights == "samples" and member.client.num_examples is None:
            raise ArraysMismatchError(f"it {UNKNOWN}")
        return LocalModel(member.client, np.empty(0), np.empty(0))

    def sum(
        self,
        grid: Grid,
        number: int,
        members: Sequence[ClientState],
        weights: Sequence[float],
        versions: Mapping[int, int],
    ) -> Group:
        """Return the sum of a group's updates by their weights d_i, for the aggregation of this number.

        ``versions`` are those of the models that the clients were sent, by client index.

        A client that isn't there, or goes away in a stage, isn't in the sum if its masked update hadn't come. If too
        many go, there is no sum.
        """
        d = {member.client.index: weight for member, weight in zip(members, weights, strict=True)}
        largest = max(d.values(), default=0.0) or 1.0
        shares = {index: float(weight / largest) for index, weight in d.items()}
        away, group = Missed(AWAY, outcome=messages.LOST), Group()
        group.missed = {member.client.index: away for member in members if not member.is_available}
        try:
            options = SumOptions("aggregation", number, versions=versions)
            masked, found = self._masked(grid, options, members, shares, group)
        except SecureSumError as error:
            if not group.missed:
                self._run.last_failure = f"secure sum: {error}"
            failed = Missed(f"secure sum: {error}", outcome=messages.FAILED)
            for index in d:
                group.missed.setdefault(index, failed)
            return group
        kept = sum(d[each] for each in masked.summed)
        share = sum(d.values()) / kept if kept else 1.0  # exactly 1 if all are in the sum
        group.total = np.multiply(found.update, largest * share, out=found.update)
        group.weights = {each: d[each] * share for each in masked.summed}
        group.clipped, group.metrics = found.outside, masked.metrics(found)
        return group

    def _masked(
        self,
        grid: Grid,
        options: SumOptions,
        members: Sequence[ClientState],
        shares: Mapping[int, float],
        group: Group,
    ) -> tuple[MaskedSum, Decoded]:
        """Have the clients that are there mask their updates; note who isn't in the sum, and return it."""
        here, clip = [member for member in members if member.is_available], self._receiver.clip
        clients = [member.client for member in here]
        norm = 0.0 if clip is None else clip.norm
        quantizer = Quantizer.for_sum(self._config.secure_clipping, max(len(clients), 1), norm)
        masked = MaskedSum(self._run, self._pending, grid, clients, quantizer, options)
        own = {member.client.index: shares[member.client.index] for member in here}
        fields = {
            member.client.index: {"task": member.tasks, "weight": share, FROM_BEFORE: True}
            for member, share in zip(here, own.values(), strict=True)
        }
        try:
            masked.work(fields, lambda client, reply: None)
        finally:
            group.missed |= masked.missed
            group.bytes_down, group.bytes_up = masked.bytes_down, masked.bytes_up
        return masked, masked.result(own)
