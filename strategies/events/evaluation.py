"""Evaluations on clients in the background: in real time an asynchronous run goes on meanwhile."""

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from flwr.app import Message, MetricRecord

from strategies.clients.client_metrics import ByClient, of_clients
from strategies.clients.roster import index_by_node
from strategies.core.evaluator import Evaluator
from strategies.core.requests import PendingReplies
from strategies.core.run_state import RunState
from strategies.flower import messages
from strategies.flower.exchange import LONGEST_POLL, SHORTEST_POLL, MessageClient
from strategies.timing.availability import NEVER
from strategies.timing.scheduler import reply_timeout


class EvaluationUnderWay:
    """One evaluation in the background: complete when all clients have answered, or the timeout is over.

    A client's answer is waited for as long as a task's, given the mean time of the client's answers so far. A client
    that hasn't answered yet is given the mean time of the slowest client, so that a client that never answers doesn't
    hold up the next evaluation; in a run's last evaluation, and before the first answer of any client, it is given
    the timeout. An answer that comes later doesn't count, but its time enters the mean of its client.

    Parameters
    ----------
    message_client : MessageClient
        The messages of the run's loop, whose polls bring the answers.
    done : callable
        Called with the number of the model's aggregation, the replies, and the ids of the nodes that were given up.
    """

    def __init__(
        self, message_client: MessageClient, done: Callable[[int, list[Message], Sequence[int]], None]
    ) -> None:
        self.message_client = message_client
        self.done = done
        self.number = 0
        self._waiting: set[str] = set()
        self._replies: list[Message] = []
        self._began = 0.0
        self._at_the_end = False
        self._asked: dict[str, tuple[int, float]] = {}  # by message without an answer: which node, and when
        self._took: dict[int, tuple[float, int]] = {}  # by node: Σ seconds of its answers, and their number

    @property
    def due(self) -> float:
        """The time at which missing answers are given up, seconds of the run's clock."""
        if not self._took:
            return self._began + self.message_client.timeout
        typical = {node: seconds / number for node, (seconds, number) in self._took.items()}
        unknown = NEVER if self._at_the_end else max(typical.values())
        missing = (typical.get(self._asked[name][0], unknown) for name in self._waiting)
        return self._began + reply_timeout(max(missing, default=0.0), self.message_client.timeout)

    def begin(self, number: int, requests: Iterable[Message]) -> bool:
        """Ask clients to evaluate the model of an aggregation; return False if an earlier evaluation is under way."""
        now = self.message_client.clock.now()
        if self._waiting and now < self.due:
            return False
        self.end()
        self._forget_old(now - self.message_client.timeout)
        requests = list(requests)
        if not requests:
            return False
        self.number, self._began = number, now
        self._waiting = self.message_client.push(requests)
        nodes = {request.metadata.message_id: request.metadata.dst_node_id for request in requests}
        self._asked |= {name: (nodes[name], now) for name in self._waiting}
        self.message_client.listen(self._waiting, self._take)
        return True

    def _forget_old(self, before: float) -> None:
        """Forget the requests without an answer that were sent before a time."""
        old = [name for name, (_, when) in self._asked.items() if when < before]
        self.message_client.forget(old)
        for name in old:
            del self._asked[name]

    def wait(self, still: Callable[[Collection[int]], None]) -> None:
        """Wait for the answers; ``still`` gets the nodes whose answers are missing, at last none."""
        clock, self._at_the_end = self.message_client.clock, True
        while self._waiting and not self.message_client.should_stop():
            over = clock.now() >= self.due  # what came since the last look still counts
            self.message_client.poll(())
            if over:
                break
            still({self._asked[name][0] for name in self._waiting})
            if self._waiting:
                pause = min(max(0.1 * (clock.now() - self._began), SHORTEST_POLL), LONGEST_POLL)
                clock.wait_until(min(clock.now() + pause, self.due))
        still(())
        self.end()

    def end(self) -> None:
        """End the evaluation with the answers that have arrived."""
        overdue = self._waiting and self.message_client.clock.now() >= self.due
        late = [self._asked[name][0] for name in self._waiting] if overdue else []
        self._waiting, replies, self._replies, self._at_the_end = set(), self._replies, [], False
        if replies or late:
            self.done(self.number, replies, late)

    def _take(self, reply: Message) -> None:
        name = reply.metadata.reply_to_message_id
        node, when = self._asked.pop(name)
        if not reply.has_error():
            seconds, number = self._took.get(node, (0.0, 0))
            self._took[node] = seconds + self.message_client.clock.now() - when, number + 1
        if name not in self._waiting:
            return
        self._replies.append(reply)
        self._waiting.discard(name)
        if not self._waiting:
            self.end()


class RealTimeEvaluation:
    """Evaluates models on clients while a run goes on; their metrics are reported with the next model.

    Parameters
    ----------
    aggregate : callable
        What is made of the replies to the evaluation of an aggregation's model.
    """

    def __init__(
        self,
        run: RunState,
        evaluator: Evaluator,
        pending: PendingReplies,
        message_client: MessageClient,
        aggregate: Callable[[int, list[Message]], MetricRecord | None],
    ) -> None:
        self._run, self._evaluator, self._pending, self._aggregate = run, evaluator, pending, aggregate
        self._under_way = EvaluationUnderWay(message_client, self._done)
        self._told: dict[str, Any] = {}  # by clients that evaluated, since the last report
        self._by_client: dict[str, ByClient] = {}

    def collect(
        self, aggregation: int, requests: Sequence[Message], *, last: bool
    ) -> tuple[dict[str, Any], dict[str, ByClient]]:
        """Ask about the model of an aggregation; return what clients have told since the last time, and who.

        The answers are waited for only about the ``last`` model of a run.
        """
        if last:
            self._under_way.end()
        if self._under_way.begin(aggregation, requests) and self._run.best is not None:
            self._run.best.asked(aggregation, self._run.result.arrays)
        if last:
            self._wait({request.metadata.dst_node_id for request in requests})
        reported, self._told = self._told, {}
        by_client, self._by_client = self._by_client, {}
        if reported.get(messages.EVALUATED) == aggregation:
            del reported[messages.EVALUATED]
        return reported, by_client

    def _wait(self, asked: Collection[int]) -> None:
        """Wait for the answers of the nodes that were asked."""
        indices = index_by_node(self._run.clients)

        def still(nodes: Collection[int]) -> None:
            self._pending.expect({node: indices[node] for node in nodes if node in indices})

        still(asked)
        self._under_way.wait(still)

    def _done(self, number: int, replies: list[Message], late: Sequence[int]) -> None:
        self._evaluator.name_missing(number, late, len(late) + len(replies))
        if (averages := self._aggregate(number, replies)) is not None:
            self._run.result.evaluate_metrics_clientapp[number] = averages
            reported = {of_clients(key): value for key, value in averages.items()}
            self._told = reported | {messages.EVALUATED: number}
            self._by_client = self._evaluator.by_client(replies)
