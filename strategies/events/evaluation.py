"""An evaluation on clients that nobody waits for: in real time a run without rounds goes on meanwhile."""

from collections.abc import Callable, Iterable, Sequence

from flwr.app import Message

from strategies.flower.exchange import LONGEST_POLL, SHORTEST_POLL, Mail
from strategies.timing.availability import NEVER
from strategies.timing.scheduler import patience


class EvaluationUnderWay:
    """Asks clients to evaluate a model, and tells when all have answered or the time for it is over.

    An answer is waited for as long as a task's is, by what this client's usually take. Before its first it is by what
    those of the slowest do, so that one that never answers doesn't keep the next evaluation; at the end, after which
    none comes, and before anybody's first, as long as the timeout says. One that comes later doesn't count, but says
    how long this client takes.

    Parameters
    ----------
    mail : Mail
        The loop's, whose polls bring the answers.
    done : callable
        Told the aggregation that made the model, the replies that came, and the ids of the nodes that were given up.
    """

    def __init__(self, mail: Mail, done: Callable[[int, list[Message], Sequence[int]], None]) -> None:
        self.mail = mail
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
        """When what is missing is given up, in the mail's seconds."""
        if not self._took:
            return self._began + self.mail.timeout
        usual = {node: seconds / number for node, (seconds, number) in self._took.items()}
        unknown = NEVER if self._at_the_end else max(usual.values())
        missing = (usual.get(self._asked[name][0], unknown) for name in self._waiting)
        return self._began + patience(max(missing, default=0.0), self.mail.timeout)

    def begin(self, number: int, requests: Iterable[Message]) -> None:
        """Ask about the model of an aggregation, unless clients are still busy with an earlier one."""
        now = self.mail.clock.now()
        if self._waiting and now < self.due:
            return
        self.end()
        old = [name for name, (_, when) in self._asked.items() if when < now - self.mail.timeout]
        self.mail.forget(old)
        for name in old:
            del self._asked[name]
        requests = list(requests)
        if not requests:
            return
        self.number, self._began = number, now
        self._waiting = self.mail.push(requests)
        nodes = {request.metadata.message_id: request.metadata.dst_node_id for request in requests}
        self._asked |= {name: (nodes[name], now) for name in self._waiting}
        self.mail.listen(self._waiting, self._take)

    def wait(self, asked: dict[int, int]) -> None:
        """Wait for the answers; out of ``asked``, which is by node, goes whoever has answered, in the end all."""
        clock, self._at_the_end = self.mail.clock, True
        while self._waiting and not self.mail.stopped():
            over = clock.now() >= self.due  # what came since the last look still counts
            self.mail.poll(())
            if over:
                break
            missing = {self._asked[name][0] for name in self._waiting}
            for node in asked.keys() - missing:
                del asked[node]
            if self._waiting:
                pause = min(max(0.1 * (clock.now() - self._began), SHORTEST_POLL), LONGEST_POLL)
                clock.wait_until(min(clock.now() + pause, self.due))
        asked.clear()
        self.end()

    def end(self) -> None:
        """Make do with the answers that are there."""
        overdue = self._waiting and self.mail.clock.now() >= self.due
        late = [self._asked[name][0] for name in self._waiting] if overdue else []
        self._waiting, replies, self._replies, self._at_the_end = set(), self._replies, [], False
        if replies or late:
            self.done(self.number, replies, late)

    def _take(self, reply: Message) -> None:
        name = reply.metadata.reply_to_message_id
        node, when = self._asked.pop(name)
        if not reply.has_error():
            seconds, number = self._took.get(node, (0.0, 0))
            self._took[node] = seconds + self.mail.clock.now() - when, number + 1
        if name not in self._waiting:
            return
        self._replies.append(reply)
        self._waiting.discard(name)
        if not self._waiting:
            self.end()
