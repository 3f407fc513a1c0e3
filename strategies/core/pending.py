"""Which clients have been asked for something and haven't answered yet."""

from collections.abc import Callable, Iterable, Iterator, Mapping

from flwr.app import Message
from flwr.serverapp import Grid

from strategies.core.run_state import RunState
from strategies.flower.exchange import looks, pushed


class PendingReplies:
    """Sends requests, yields their replies, and knows meanwhile who hasn't answered."""

    def __init__(self, run: RunState) -> None:
        self._run = run
        self._asked: dict[int, int] = {}  # clients whose answer is waited for, by node id

    def at_work(self) -> list[int]:
        """Return the clients, by index, whose answer is waited for; another thread may ask."""
        return list(self._asked.copy().values())

    def expect(self, clients: Mapping[int, int]) -> None:
        """Wait for the answers of these clients alone, indices by node id."""
        self._asked = dict(clients)

    def answered(self, node_id: int) -> int | None:
        """Take note of a node's answer; return its client's index, None if none was waited for."""
        return self._asked.pop(node_id, None)

    def awaited(
        self, grid: Grid, requests: Iterable[Message], arrived: Callable[[int], None] | None = None
    ) -> Iterator[Message]:
        """Push requests at once, and yield the replies as they come; ``arrived`` is told each client's index."""
        requests = list(requests)
        nodes = {request.metadata.dst_node_id for request in requests}
        self.expect({client.node_id: client.index for client in self._run.clients if client.node_id in nodes})
        return self._replies(grid, pushed(grid, requests), arrived)

    def _replies(
        self, grid: Grid, waiting: dict[str, int], arrived: Callable[[int], None] | None
    ) -> Iterator[Message]:
        try:
            for look in looks(grid, waiting, self._run.timeout, self._run.stopped):
                for node_id, reply in look:
                    index = self.answered(node_id)
                    if arrived is not None and index is not None:
                        arrived(index)
                    yield reply
        finally:
            self.expect({})
