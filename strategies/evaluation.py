"""An evaluation on clients that nobody waits for: in real time a run without rounds goes on meanwhile."""

from collections.abc import Callable, Iterable

from flwr.app import Message

from strategies.exchange import Mail


class EvaluationUnderWay:
    """Asks clients to evaluate a model, and tells when all have answered or the time for it is over.

    Parameters
    ----------
    mail : Mail
        The loop's, whose polls bring the answers.
    done : callable
        Told the aggregation that made the model, and the replies that came.
    """

    def __init__(self, mail: Mail, done: Callable[[int, list[Message]], None]) -> None:
        self.mail = mail
        self.done = done
        self.number = 0
        self._waiting: set[str] = set()
        self._replies: list[Message] = []
        self._due = 0.0

    def begin(self, number: int, requests: Iterable[Message]) -> None:
        """Ask about the model of an aggregation, unless clients are still busy with an earlier one."""
        if self._waiting and self.mail.clock.now() < self._due:
            return
        self.end()
        requests = list(requests)
        if not requests:
            return
        self.number, self._due = number, self.mail.clock.now() + self.mail.timeout
        self._waiting = self.mail.push(requests)
        self.mail.listen(self._waiting, self._take)

    def end(self) -> None:
        """Make do with the answers that are there."""
        self.mail.forget(self._waiting)
        self._waiting, replies, self._replies = set(), self._replies, []
        if replies:
            self.done(self.number, replies)

    def _take(self, reply: Message) -> None:
        self._replies.append(reply)
        self._waiting.discard(reply.metadata.reply_to_message_id)
        if not self._waiting:
            self.end()
