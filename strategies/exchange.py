"""Send messages, wait for the replies: the one way in which a round talks to nodes."""

from collections.abc import Callable, Iterable, Iterator

from flwr.app import Message
from flwr.serverapp import Grid

from strategies.clock import WallClock

# A poll waits for a tenth of the time waited so far, within these bounds (seconds): a simulation's short round
# isn't rounded up to a coarse poll, a device's long one isn't polled hundreds of times a second.
SHORTEST_POLL = 0.005
LONGEST_POLL = 1.0


def never() -> bool:
    """Answer that nobody asked the run to stop."""
    return False


def exchange(
    grid: Grid, messages: Iterable[Message], timeout: float, stopped: Callable[[], bool] = never
) -> dict[int, Message]:
    """Push messages, at most one per node, and collect the replies.

    Parameters
    ----------
    timeout : float
        Seconds after which the missing replies are given up.
    stopped : callable
        Asked at every poll; True ends the wait at once.

    Returns
    -------
    dict of int to Message
        The replies by node id. A node that hasn't answered is missing; a second reply to a message is ignored.
    """
    return dict(arriving(grid, messages, timeout, stopped))


def arriving(
    grid: Grid, messages: Iterable[Message], timeout: float, stopped: Callable[[], bool] = never
) -> Iterator[tuple[int, Message]]:
    """Push messages and yield node ids and replies as they come: what is done with them needn't be held."""
    messages = list(messages)
    pushed = set(grid.push_messages(messages))
    # A message that the grid couldn't store has no id among those returned: its node counts as missing.
    nodes = {
        m.metadata.message_id: m.metadata.dst_node_id for m in messages if m.metadata.message_id in pushed
    }
    return _poll(grid, nodes, timeout, stopped)


def collect(
    grid: Grid, nodes: dict[str, int], timeout: float, stopped: Callable[[], bool] = never
) -> dict[int, Message]:
    """Wait for the replies to messages that were pushed; ``nodes`` names the node of each message id."""
    return dict(_poll(grid, dict(nodes), timeout, stopped))


def _poll(
    grid: Grid, nodes: dict[str, int], timeout: float, stopped: Callable[[], bool]
) -> Iterator[tuple[int, Message]]:
    clock = WallClock()
    expired = False
    while nodes and not expired and not stopped():
        expired = clock.now() >= timeout  # what came since the last poll still counts
        pulled = list(grid.pull_messages(list(nodes)))
        for reply in pulled:
            node_id = nodes.pop(reply.metadata.reply_to_message_id, None)
            if node_id is not None:
                yield node_id, reply
        if nodes and not pulled and not expired:
            wait = min(max(0.1 * clock.now(), SHORTEST_POLL), LONGEST_POLL)
            clock.wait_until(min(clock.now() + wait, timeout))
