"""The aggregation of a round's replies, in the order of the clients: their weighted sum, or their contributions."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, cast

from flwr.app import Message

from strategies.clients.roster import Client
from strategies.core.capabilities import Capabilities
from strategies.core.config import SynchronousConfig
from strategies.core.receiver import Receiver
from strategies.core.run_state import RunState
from strategies.core.server_step import ServerStep
from strategies.flower.arrays import ArraysMismatchError, Vector
from strategies.flower.errors import RunError
from strategies.rounds.in_one_pass import Added, InOnePass
from strategies.rounds.round import Round
from strategies.rounds.selection import Selection
from strategies.updates.aggregation import Gathered, WeightedSum, gathering
from strategies.updates.buffers import Untrained
from strategies.updates.chain import Check, Contribution, UnweighedError
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

    def in_one_pass(self, current: Round, check: Check, total: Gathered) -> InOnePass | None:
        """Return the ``InOnePass`` of a round; None if any part of the strategy looks at single updates."""
        plain = self.receiver.only_learns_norms and not self.server_step.optimizer.reads_squares
        if not plain or self.capabilities.sees_single_updates:
            return None
        return InOnePass(check, self.safeguards, current, total) if isinstance(total, WeightedSum) else None

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

    Where the weights are known, a reply is aggregated as soon as all clients before it have answered, and isn't kept.
    Otherwise the replies wait until the round is over.

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
        self._unweighed = False
        # Until enough norms are known, those of all replies are looked at before any reply counts.
        self._looks_first = guards.must_wait(len(run.clients), run.buffers)
        # An error that the SuperLink reports carries its own node id: replies go by the ids of their requests.
        self._positions = {request.message_id: place for place, request in enumerate(current.requests)}
        self._waiting: dict[int, Message] = {}  # by position
        self._next = 0  # the position of the reply that is aggregated next
        self._come = 0  # the position of the first reply that hasn't come
        self._at_once = aggregator.in_one_pass(current, self._check, self.total)
        self._batches = deque(self._at_once.batches if self._at_once is not None else ())
        streams = aggregator.capabilities.streams and not self._looks_first
        self.weights: Sequence[float] = []
        self._known = streams and current.weights is not None
        if self._known:
            self._weigh()

    def take(self, reply: Message) -> None:
        """Take a reply; a reply to none of the round's requests is passed over."""
        position = self._positions.get(reply.metadata.reply_to_message_id)
        if position is None or position < self._next:
            return
        self._waiting[position] = reply
        while self._come in self._waiting:
            self._come += 1
        if not self._known:
            return
        if self._at_once is None:
            while self._next < self._come:
                self._aggregate_next()
        elif self._batches and self._batches[0].stop <= self._come:
            self._note(self._at_once.add(self._batches.popleft(), self._waiting, self.weights))

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
        if self._at_once is not None and self._looks_first:
            self._note(self._at_once.add_all(self._waiting, self.weights))
        elif self._at_once is not None:
            for places in self._batches:
                self._note(self._at_once.add(places, self._waiting, self.weights))
        elif self._looks_first:
            for place, client in enumerate(current.clients):
                with suppress(ArraysMismatchError):
                    local = self._check(client, self._waiting.get(place), current.base_of(client))
                    aggregator.safeguards.see(local)
        while self._next < len(current.clients):
            self._aggregate_next()
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

    def _aggregate_next(self) -> None:
        """Add the next client's update to the sum, or note why its reply doesn't count."""
        aggregator, current = self._aggregator, self._current
        client, weight = current.clients[self._next], self.weights[self._next]
        reply = self._waiting.pop(self._next, None)
        self._next += 1
        try:
            local = self._check(client, reply, current.base_of(client))
        except ArraysMismatchError as error:
            self._leave_out(client, error, reply)
            if client.index not in current.lost:
                self.total.skip()
            return
        assert reply is not None
        self._links(local)
        asked = [*current.companions, *aggregator.selection.asks(client)]
        contribution = aggregator.receiver.contribution(local, reply, current.number - 1, 0, asked)
        if aggregator.capabilities.needs_all_updates:
            current.contributions.append(contribution)
        else:
            self.total.add(weight, aggregator.server_step.looked_at(aggregator.counted(contribution)))
        self.buffers.add(contribution.client.index, weight, contribution.untrained, contribution.counted_from)
        current.take_in(client, weight, reply, bounded=local.bounded)

    def _leave_out(self, client: Client, error: ArraysMismatchError, reply: Message | None) -> None:
        """Note why a client's reply doesn't count."""
        self._current.leave_out(client, str(error), reply)
        self._aggregator.run.last_reason = self._current.failures[client.index]
        self._unweighed = self._unweighed or isinstance(error, UnweighedError)

    def _note(self, added: Sequence[Added]) -> None:
        """Note what became of the next clients' replies, which were added to the sum at once."""
        aggregator, current = self._aggregator, self._current
        for each in added:
            client, weight = current.clients[each.place], self.weights[each.place]
            reply, model = self._waiting.pop(each.place, None), each.model
            if each.error is not None:
                self._leave_out(client, each.error, reply)
            elif model is not None and reply is not None:
                aggregator.run.any_moved = aggregator.run.any_moved or model.moved
                aggregator.receiver.look_at(
                    client, reply, [*current.companions, *aggregator.selection.asks(client)]
                )
                self.buffers.add(client.index, weight, model.untrained, model.counted_from)
                current.take_in(client, weight, reply, bounded=model.scale is not None)
        self._next = added[-1].place + 1 if added else self._next
