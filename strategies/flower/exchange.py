"""Communication with nodes: wait for nodes, send messages, and wait for the replies."""

from collections.abc import Callable, Iterable, Iterator, Sequence

from flwr.app import Message
from flwr.serverapp import Grid

from strategies.clock import WallClock
from strategies.flower.errors import RunError
from strategies.flower.grids import Work, WorkingGrid, WorkRequest

# The time between two polls is a tenth of the time waited so far, within these bounds (seconds): the short round of a
# simulation isn't delayed by a coarse poll, and a long round on devices isn't polled hundreds of times a second.
SHORTEST_POLL = 0.005
LONGEST_POLL = 1.0


def never() -> bool:
    """Return False: the default of ``should_stop``, for a run that isn't stopped early."""
    return False


def exchange(
    grid: Grid, messages: Iterable[Message], timeout: float, should_stop: Callable[[], bool] = never
) -> dict[int, Message]:
    """Push messages, at most one per node, and collect the replies.

    Parameters
    ----------
    timeout : float
        Seconds after which missing replies are no longer awaited.
    should_stop : callable
        Called at every poll; True ends the wait at once.

    Returns
    -------
    dict of int to Message
        The replies by node id. A node that hasn't answered is missing; a second reply to a message is ignored.
    """
    return dict(arriving(grid, messages, timeout, should_stop))


def arriving(
    grid: Grid, messages: Iterable[Message], timeout: float, should_stop: Callable[[], bool] = never
) -> Iterator[tuple[int, Message]]:
    """Push messages and yield node ids and replies as they arrive, so that the caller needn't hold all replies."""
    nodes = pushed(grid, messages)
    return (pair for poll in poll_replies(grid, nodes, timeout, should_stop) for pair in poll)


def pushed(grid: Grid, messages: Iterable[Message]) -> dict[str, int]:
    """Push messages; return the node ids of the messages that the grid could store, by message id."""
    messages = list(messages)
    stored = set(filter(None, grid.push_messages(messages)))  # None, or "", for a message that is refused
    return {
        m.metadata.message_id: m.metadata.dst_node_id for m in messages if m.metadata.message_id in stored
    }


def poll_replies(
    grid: Grid,
    waiting: dict[str, int],
    timeout: float | Callable[[], float],
    should_stop: Callable[[], bool] = never,
) -> Iterator[list[tuple[int, Message]]]:
    """Poll for the replies to messages, by message id, until all have arrived or the timeout has passed.

    A timeout that follows from the replies is a callable, which is asked at every poll.
    Yield the replies of each poll, maybe none, as pairs of the value in ``waiting`` and the reply; the message is
    then removed from ``waiting``. A second reply to a message is ignored. A caller may stop iterating at any time:
    every reply that was pulled has been yielded.
    """
    clock, expired = WallClock(), False
    limit = timeout if callable(timeout) else lambda: timeout
    while waiting and not expired and not should_stop():
        expired = clock.now() >= limit()  # replies since the last poll still count
        pulled = list(grid.pull_messages(list(waiting)))
        yield [
            (waiting.pop(name), reply)
            for reply in pulled
            if (name := reply.metadata.reply_to_message_id) in waiting
        ]
        if not pulled and not expired:
            wait = min(max(0.1 * clock.now(), SHORTEST_POLL), LONGEST_POLL)
            clock.wait_until(min(clock.now() + wait, limit()))


class MessageClient:
    """The messages of an asynchronous loop: sends messages one by one, and polls for replies by message id.

    Tasks may also be dispatched to a Grid that needs no messages for them (strategies/flower/grids.py).

    Parameters
    ----------
    timeout : float
        Real seconds to wait for a single reply.
    should_stop : callable
        True ends any wait.
    """

    def __init__(self, grid: Grid, timeout: float, should_stop: Callable[[], bool] = never) -> None:
        self.grid = grid
        self.timeout = timeout
        self.should_stop = should_stop
        self.clock = WallClock()
        self._listeners: dict[str, Callable[[Message], None]] = {}
        self._handed: dict[str, WorkingGrid] = {}  # by task

    def hand_out(self, grid: WorkingGrid, request: WorkRequest) -> Sequence[str]:
        """Dispatch tasks without messages; return an id for each task, which ``wait`` accepts, too."""
        ids = grid.hand_out(request)
        self._handed |= dict.fromkeys(ids, grid)
        return ids

    def push(self, messages: Iterable[Message]) -> set[str]:
        """Send messages; return the ids of the messages that the grid could store."""
        return set(filter(None, self.grid.push_messages(messages)))

    def poll(self, message_ids: Iterable[str]) -> list[Message]:
        """Return the replies that have arrived; replies with a listener are passed to the listener instead."""
        returned = []
        for reply in list(self.grid.pull_messages([*message_ids, *self._listeners])):
            listener = self._listeners.pop(reply.metadata.reply_to_message_id, None)
            if listener is None:
                returned.append(reply)
            else:
                listener(reply)
        return returned

    def listen(self, message_ids: Iterable[str], listener: Callable[[Message], None]) -> None:
        """Register a listener, which ``poll`` calls with each reply to these messages."""
        self._listeners |= dict.fromkeys(message_ids, listener)

    def forget(self, message_ids: Iterable[str]) -> None:
        """Remove the listeners of these messages."""
        for message_id in message_ids:
            self._listeners.pop(message_id, None)

    def wait(self, message_id: str) -> Message | Work | None:
        """Wait for the reply to one message, or for the result of a task; None if it doesn't arrive."""
        while message_id in self._handed and not self.should_stop():
            if (work := self._handed[message_id].work(message_id)) is not None:
                del self._handed[message_id]
                return work
        polls = poll_replies(self.grid, {message_id: 0}, self.timeout, self.should_stop)
        return next((reply for poll in polls for _, reply in poll), None)


NODE_POLL = 0.1  # seconds between two polls for connected nodes


def wait_for_nodes(
    grid: Grid, number: int, timeout: float, should_stop: Callable[[], bool] = never
) -> list[int]:
    """Wait until at least ``number`` nodes, and at least one, are connected and no more connect; return their ids.

    Raises
    ------
    RunError
        If fewer nodes are connected after ``timeout`` seconds.
    """
    clock, count = WallClock(), -1
    while True:
        node_ids = list(grid.get_node_ids())
        late = clock.now() > timeout
        settled = late or count == len(node_ids) or getattr(grid, "all_connected", False)  # a LocalGrid's
        if should_stop() or (len(node_ids) >= max(number, 1) and settled):
            return node_ids
        count = len(node_ids)
        if late:
            raise RunError(f"{count} of {max(number, 1)} clients connected within {timeout:g} s")
        clock.wait_until(clock.now() + NODE_POLL)


def wait_while(missing: Callable[[], bool], timeout: float, should_stop: Callable[[], bool]) -> None:
    """Poll ``missing`` until it returns False, for ``timeout`` seconds at most."""
    clock = WallClock()
    while missing() and not should_stop() and clock.now() < timeout:
        clock.wait_until(clock.now() + NODE_POLL)
