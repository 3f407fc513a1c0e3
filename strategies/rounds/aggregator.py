"""The aggregation of a round's replies, in the order of the clients: their weighted sum, or their contributions."""

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, cast

from flwr.app import Message

from strategies.core.capabilities import Capabilities
from strategies.core.config import SynchronousConfig
from strategies.core.receiver import Receiver
from strategies.core.run_state import RunState
from strategies.core.server_step import ServerStep
from strategies.flower.arrays import ArraysMismatchError, Vector, sum_of_squares
from strategies.flower.errors import RunError
from strategies.rounds.round import Round
from strategies.rounds.selection import Selection
from strategies.updates.aggregation import Gathered, WeightedSum, gathering
from strategies.updates.buffers import Untrained
from strategies.updates.chain import Contribution, Local, UnweighedError
from strategies.updates.safeguards import Safeguards
from strategies.updates.tree_noise import TreeNoise


class Aggregator:
    """Opens the aggregation of each round.

    Parameters
    ----------
    counted : callable
        Hook of the method: what of a contribution is weighted and summed.

    Attributes
    ----------
    tree : TreeNoise, optional
        Adds the noise of central differential privacy, where it is that of a tree.
    """

    def __init__(
        self,
        config: SynchronousConfig,
        run: RunState,
        receiver: Receiver,
        safeguards: Safeguards,
        server_step: ServerStep,
        selection: Selection,
        capabilities: Capabilities,
        counted: Callable[[Contribution], Vector],
    ) -> None:
        self.config, self.run, self.receiver, self.safeguards = config, run, receiver, safeguards
        self.server_step, self.selection, self.capabilities = server_step, selection, capabilities
        self.counted = counted
        self.tree: TreeNoise | None = None
        if config.dp == "central" and config.dp_mechanism == "tree":
            self.tree = TreeNoise(config.dp_restart, run.central_noise)
        self._refused: set[int] = set()

    def state(self) -> dict[str, Any]:
        """Return the tree's: a run that goes on begins anew with what is known of mods."""
        return {} if self.tree is None else self.tree.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the tree of a checkpoint."""
        if self.tree is not None:
            self.tree.restore(state)

    @property
    def sums_replies(self) -> bool:
        """Whether nothing reads a single update between its check and the sum, except for its norm."""
        reads_lengths = self.server_step.optimizer.reads_squares
        return not (reads_lengths or self.receiver.reads_models or self.capabilities.sees_single_updates)

    def check_mods(self, current: Round) -> None:
        """Raise RunError if mods of the app let no client train: such a run would never get anywhere."""
        self._refused |= current.by_mods
        self._refused -= current.outcomes.keys() - current.by_mods
        clients = self.run.clients
        if not clients or not {client.index for client in clients} <= self._refused:
            return
        text = f"a mod of the app lets no client train ({next(iter(current.failures.values()))})"
        if beside := self.receiver.beside(current.companions):
            other = self.capabilities.payload_off_hint
            text += f": beside the model each is sent {', '.join(beside)}; allowed are mods that let it pass"
            text += f", or {other}" if other else ""
        raise RunError(text)


class RoundAggregation:
    """Aggregates the replies of one round, which come one by one in any order.

    Where the weights are known, replies are aggregated as soon as all clients before them have answered, and aren't
    kept. Otherwise the replies wait until the round is over.

    Attributes
    ----------
    weights : sequence of float
        The weights d_i of the clients; known when the round is over.
    total : Gathered
        Σ d_i Δ_i over the valid replies, or what a robust rule makes of them.
    buffers : Untrained
        The values of the replies that aren't trained.
    """

    def __init__(self, aggregator: Aggregator, current: Round) -> None:
        run, config, guards = aggregator.run, aggregator.config, aggregator.safeguards
        rule = cast(SynchronousConfig, run.config).rule()  # an app may have set a keyword since
        self._aggregator, self._current = aggregator, current
        self.buffers = Untrained(run.buffers, robust=rule is not None)
        self.total: Gathered = gathering(
            rule,
            len(current.model),
            len(current.clients) - len(current.lost),
            squares=aggregator.server_step.optimizer.reads_squares,
            bound=config.update_norm_bound,
            private=config.dp == "central",
            each=current.each,
        )
        self._check, self._links = aggregator.receiver.check(), aggregator.receiver.links()
        self._norm = math.sqrt(sum_of_squares(current.model))
        self._unweighed = False
        # Until enough norms are known, those of all replies are looked at before any reply counts.
        self._looks_first = guards.must_wait(len(run.clients), run.buffers)
        # An error that the SuperLink reports carries its own node id: replies go by the ids of their requests.
        self._positions = {request.message_id: place for place, request in enumerate(current.requests)}
        self._waiting: dict[int, Message] = {}  # by position
        self._seen: dict[int, Local] = {}  # models that the safeguards have seen, by position
        self._come = 0  # the position of the first reply that hasn't come
        # The sum of a block whose updates nothing reads is made in one go: its replies are read only once.
        self._block = self.total if isinstance(self.total, WeightedSum) and aggregator.sums_replies else None
        self._batches = deque(_batches(current, 1 if self._block is None else self._block.block))
        streams = aggregator.capabilities.streams and not self._looks_first
        self.weights: Sequence[float] = []
        self._known = streams and current.weights is not None
        if self._known:
            self._weigh()

    def take(self, reply: Message) -> None:
        """Take a reply; a reply to none of the round's requests is passed over."""
        position = self._positions.get(reply.metadata.reply_to_message_id)
        if position is None or not self._batches or position < self._batches[0].start:
            return
        self._waiting[position] = reply
        while self._come in self._waiting:
            self._come += 1
        while self._known and self._batches and self._batches[0].stop <= self._come:
            self._aggregate(self._batches.popleft())

    def end(self) -> None:
        """Aggregate the replies that have waited, and note which clients' are missing.

        Raises
        ------
        RunError
            If no client says how much it counts, or mods of the app let no client train.
        """
        current, aggregator = self._current, self._aggregator
        if not self._known:
            self._weigh()
        if self._looks_first:
            self._look()
        while self._batches:
            self._aggregate(self._batches.popleft())
        if aggregator.safeguards.active:
            self.buffers.bound(aggregator.safeguards.buffers)
        if self._unweighed and len(current.failures) == len(current.clients):
            raise RunError(f"no client counts: {next(iter(current.failures.values()))}")
        aggregator.check_mods(current)

    def _weigh(self) -> None:
        current = self._current
        replies = [self._waiting.get(place) for place in range(len(current.clients))]
        self.weights = self._aggregator.selection.weights_of(current, replies)
        current.worth = {client.index: d for client, d in zip(current.clients, self.weights, strict=True)}

    def _look(self) -> None:
        """Let the safeguards see all valid updates before any of them counts."""
        for place, client in enumerate(self._current.clients):
            with suppress(ArraysMismatchError):
                local = self._check(client, self._waiting.get(place), self._current.base_of(client))
                self._aggregator.safeguards.see(local)
                if local.in_reply:
                    self._seen[place] = local

    def _aggregate(self, places: range) -> None:
        """Validate, weigh and add the next replies; note why a reply doesn't count."""
        valid, faults = dict[int, Local](), dict[int, ArraysMismatchError]()
        for place in places:
            try:
                valid[place] = self._read(place)
            except ArraysMismatchError as error:
                faults[place] = error
        summed = len(valid)
        if self._block is not None:  # values are checked, and updates measured, as they are summed
            self._block.sum_block(self._weighted(valid))
        for place in places:
            reply = self._waiting.pop(place, None)
            try:
                if place in faults:
                    raise faults[place]
                own = valid[place].base is self._current.model
                self._check.check_values(valid[place], self._norm if own else None)
            except ArraysMismatchError as error:
                valid.pop(place, None)
                self._leave_out(place, error, reply)
            else:
                assert reply is not None
                self._add(place, valid[place], reply)
        if self._block is not None:
            if len(valid) < summed or not all(local.in_reply for local in valid.values()):
                # Some updates don't count, or have been shortened since: the block is summed again.
                self._block.sum_block(self._weighted(valid))
            self._block.end()

    def _read(self, place: int) -> Local:
        """Return the model of a reply whose values are still to be checked."""
        client = self._current.clients[place]
        if place in self._seen:
            return self._seen.pop(place)
        return self._check.read(client, self._waiting.get(place), self._current.base_of(client))

    def _weighted(self, models: Mapping[int, Local]) -> list[tuple[float, Local]]:
        return [(self.weights[place], local) for place, local in models.items()]

    def _add(self, place: int, local: Local, reply: Message) -> None:
        """Put a valid model through the chain, and add its update to the sum unless that is of a block."""
        aggregator, current = self._aggregator, self._current
        client, weight = local.client, self.weights[place]
        self._links(local)
        asked = [*current.companions, *aggregator.selection.asks(client)]
        self.buffers.add(client.index, weight, local.untrained, local.counted_from)
        current.take_in(client, weight, reply, bounded=local.bounded)
        if self._block is not None:
            aggregator.receiver.look_at(client, reply, asked)
            aggregator.run.any_moved = aggregator.run.any_moved or local.moves()
            return
        contribution = aggregator.receiver.contribution(local, reply, current.number - 1, 0, asked)
        if aggregator.capabilities.needs_all_updates:
            current.contributions.append(contribution)
        else:
            self.total.add(weight, aggregator.server_step.looked_at(aggregator.counted(contribution)))

    def _leave_out(self, place: int, error: ArraysMismatchError, reply: Message | None) -> None:
        """Note why a client's reply doesn't count."""
        current, client = self._current, self._current.clients[place]
        current.leave_out(client, str(error), reply)
        self._aggregator.run.last_reason = current.failures[client.index]
        self._unweighed = self._unweighed or isinstance(error, UnweighedError)
        if self._block is None and client.index not in current.lost:
            self.total.skip()


def _batches(current: Round, size: int) -> Iterator[range]:
    """Yield the positions of clients in batches of ``size``; lost tasks aren't counted."""
    begin, number = 0, 0
    for place, client in enumerate(current.clients):
        number += client.index not in current.lost
        if number == size or place == len(current.clients) - 1:
            yield range(begin, place + 1)
            begin, number = place + 1, 0
