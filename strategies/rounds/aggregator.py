"""How a round's replies become one result: each is validated, weighed and added, in the order of the clients."""

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress

from flwr.app import Message

from strategies.flower import messages
from strategies.flower.arrays import ArraysMismatchError, sum_of_squares
from strategies.flower.errors import RunError
from strategies.rounds.round import Aggregate, Round
from strategies.rounds.session import RoundSession
from strategies.updates.aggregation import RobustRule, UpdateSum, WeightedSum, block_size
from strategies.updates.buffers import BufferAverage
from strategies.updates.pipeline import LocalModel, MissingWeightError

MOST_TOGETHER = 8  # updates of blocks that are summed together, where a pull has brought as many replies


class LeftOutError(ArraysMismatchError):
    """A user-defined ``aggregate_train`` has left out a reply that is no error."""


class RoundAggregation:
    """Aggregates the replies of one round, which come one by one in any order.

    Where the weights are known, replies are aggregated as soon as all clients before them have answered, and aren't
    kept. Otherwise the replies wait until the round is over.

    Parameters
    ----------
    session : RoundSession
        The run.
    cohort : Round
        The round.
    """

    def __init__(self, session: RoundSession, cohort: Round) -> None:
        self._session, self._cohort = session, cohort
        config, able = session.strategy.config, session.strategy.capabilities
        rule, squares = config.rule(), session.optimizer.reads_squares
        self._buffers = BufferAverage(session.run.buffers, robust=rule is not None)
        size, number = len(cohort.model), len(cohort.clients) - len(cohort.lost)
        self._total: UpdateSum
        if rule is None:
            self._total = WeightedSum(
                size,
                block_size(number, size),
                squares=squares,
                bound=config.update_norm_bound,
                private=config.dp == "central",
                each=cohort.each,
            )
        else:
            self._total = RobustRule(rule, config.update_norm_bound)
        self._check, self._transforms = session.receiver.check(), session.receiver.transforms()
        self._model_norm = math.sqrt(sum_of_squares(cohort.sent))
        self._unweighed = False
        # An error that the SuperLink reports carries its own node id: replies go by the ids of their requests.
        self._positions = {request.message_id: place for place, request in enumerate(cohort.requests)}
        self._waiting: dict[int, Message] = {}  # by position
        self._come = 0  # the position of the first reply that hasn't come
        # A block of updates that nothing reads is summed at once, so that the values of its replies are read once.
        reads_updates = able.sees_single_updates or squares or session.receiver.reads_models
        self._block = self._total if isinstance(self._total, WeightedSum) and not reads_updates else None
        self._batches = deque(_batches(cohort, 1 if self._block is None else self._block.block))
        # Until enough norms are known, those of all replies are measured before any reply counts.
        self._measures_first = session.safeguards.needs_more_norms(len(session.clients), session.run.buffers)
        self._measured: dict[int, LocalModel] = {}  # by position
        self._weights: Sequence[float] = []
        self._on_arrival = (
            able.aggregates_on_arrival and not self._measures_first and cohort.weights is not None
        )
        if self._on_arrival:
            self._weigh()

    def take(self, reply: Message, place: int | None = None) -> None:
        """Take a participant's reply, by its place or the id of its request; a reply to none is passed over."""
        position = self._positions.get(reply.metadata.reply_to_message_id) if place is None else place
        if position is None or not self._batches or position < self._batches[0].start:
            return
        self._waiting[position] = reply
        while self._come in self._waiting:
            self._come += 1
        if self._on_arrival and not self._session.pending.at_hand:
            for batches in self._complete(self._come):
                self._aggregate(batches)

    def result(self) -> Aggregate:
        """Aggregate the replies that have waited, note which clients' are missing, and return the result.

        Raises
        ------
        RunError
            If no client says how much it counts, or mods of the app let no client train.
        """
        session, cohort = self._session, self._cohort
        self._take_errors_left_out()
        if not self._on_arrival:
            self._weigh()
        if self._measures_first:
            self._measure()
        for batches in self._complete(len(cohort.clients)):
            self._aggregate(batches)
        if session.safeguards.active:
            self._buffers.bound(session.safeguards.buffers)
        if self._unweighed and len(cohort.failures) == len(cohort.clients):
            raise RunError(f"no client counts: {next(iter(cohort.failures.values()))}")
        session.check_mods(cohort)
        return Aggregate(self._weights, self._total, self._buffers)

    def _take_errors_left_out(self) -> None:
        """Take the clients' errors that a user-defined hook has left out, so that the reasons are known."""
        for name, reply in self._cohort.replies.items():
            place = self._positions.get(name)
            if place is not None and place not in self._waiting and reply.has_error():
                self._waiting[place] = reply

    def _check_left_out(self, place: int) -> None:
        """Raise LeftOutError if a user-defined hook has left out the reply of a client."""
        cohort = self._cohort
        if place not in self._waiting and cohort.requests[place].message_id in cohort.replies:
            raise LeftOutError(f"{self._session.run.name}.aggregate_train left its reply out")

    def _weigh(self) -> None:
        """Set the weights d_i of all participants."""
        cohort = self._cohort
        replies = [self._waiting.get(place) for place in range(len(cohort.clients))]
        self._weights = self._session.selection.weights_of(cohort, replies)
        cohort.weight_by_client = {
            client.index: d for client, d in zip(cohort.clients, self._weights, strict=True)
        }

    def _measure(self) -> None:
        """Let the safeguards see the norms and buffers of all valid replies."""
        for place, client in enumerate(self._cohort.clients):
            with suppress(ArraysMismatchError):
                local = self._check(client, self._waiting.get(place), self._cohort.base_of(client))
                self._session.safeguards.observe(local)
                if local.in_reply:
                    self._measured[place] = local

    def _complete(self, come: int) -> Iterator[list[range]]:
        """Take out the batches of the clients before a position; yield several small ones at once."""
        while self._batches and self._batches[0].stop <= come:
            together, most = [self._batches.popleft()], MOST_TOGETHER if self._block is not None else 0
            while self._batches and self._batches[0].stop <= min(come, together[0].start + most):
                together.append(self._batches.popleft())
            yield together

    def _aggregate(self, batches: Sequence[range]) -> None:
        """Validate, weigh and add the replies of some clients; note why a reply doesn't count.

        The values of blocks are checked, and their updates are measured, while they are summed. If an update then
        doesn't count, or is shortened, the blocks are summed again.
        """
        places = range(batches[0].start, batches[-1].stop)
        valid, faults = self._read(places)
        summed = len(valid)
        if self._block is not None:
            self._block.sum_blocks(self._weighted(batches, valid))
        for place in places:
            reply = self._waiting.pop(place, None)
            try:
                if place in faults:
                    raise faults[place]
                # ‖w̄‖ is known of the model that all were sent, not of one that a client was sent in its place.
                is_common = valid[place].base is self._cohort.sent
                self._check.check_values(valid[place], self._model_norm if is_common else None)
            except ArraysMismatchError as error:
                valid.pop(place, None)
                self._reject(place, error, reply)
            else:
                assert reply is not None
                self._add(place, valid[place], reply)
        if self._block is not None:
            if len(valid) < summed or not all(local.in_reply for local in valid.values()):
                self._block.sum_blocks(self._weighted(batches, valid))
            self._block.end()

    def _read(self, places: range) -> tuple[dict[int, LocalModel], dict[int, ArraysMismatchError]]:
        """Return the models of replies, whose values are still to be checked, and the faults of other replies."""
        models, faults = dict[int, LocalModel](), dict[int, ArraysMismatchError]()
        for place in places:
            if place in self._measured:
                models[place] = self._measured.pop(place)
                continue
            client = self._cohort.clients[place]
            try:
                self._check_left_out(place)
                models[place] = self._check.read(
                    client, self._waiting.get(place), self._cohort.base_of(client)
                )
            except ArraysMismatchError as error:
                faults[place] = error
        return models, faults

    def _weighted(
        self, batches: Sequence[range], models: Mapping[int, LocalModel]
    ) -> list[list[tuple[float, LocalModel]]]:
        return [
            [(self._weights[place], models[place]) for place in places if place in models]
            for places in batches
        ]

    def _add(self, place: int, local: LocalModel, reply: Message) -> None:
        """Put a valid model through the chain, and add its update unless that is in the sum of its block."""
        session, cohort, client, weight = self._session, self._cohort, local.client, self._weights[place]
        self._transforms(local)
        asked = [*cohort.extra_names, *session.selection.stragglers.request_fields(client)]
        if self._block is not None:
            session.receiver.check_reply_metadata(client, reply, asked)
            session.run.any_nonzero_update = session.run.any_nonzero_update or local.moves()
        else:
            contribution = session.receiver.contribution(local, reply, cohort.number - 1, 0, asked)
            if session.strategy.capabilities.needs_all_updates:
                cohort.contributions.append(contribution)
            else:
                counted = session.strategy.transform_update(contribution)
                self._total.add(weight, session.server_step.note_nonzero(counted))
        self._buffers.add(client.index, weight, local.buffer_values, local.counter_origin)
        cohort.accept_reply(client, weight, reply, bounded=local.bounded)

    def _reject(self, place: int, error: ArraysMismatchError, reply: Message | None) -> None:
        """Note why a client's reply doesn't count."""
        cohort, client = self._cohort, self._cohort.clients[place]
        outcome = messages.REFUSED if isinstance(error, LeftOutError) else None
        cohort.reject(client, str(error), reply, outcome)
        self._session.run.last_failure = cohort.failures[client.index]
        self._unweighed = self._unweighed or isinstance(error, MissingWeightError)
        if self._block is None and client.index not in cohort.lost:
            self._total.skip()


def _batches(cohort: Round, size: int) -> Iterator[range]:
    """Yield the positions of clients in batches of ``size``; lost tasks aren't counted."""
    begin, number = 0, 0
    for place, client in enumerate(cohort.clients):
        number += client.index not in cohort.lost
        if number == size or place == len(cohort.clients) - 1:
            yield range(begin, place + 1)
            begin, number = place + 1, 0
