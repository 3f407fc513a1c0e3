"""How the server waits for nodes to connect."""

from collections.abc import Callable

from flwr.serverapp import Grid

from strategies.clock import WallClock
from strategies.flower.errors import RunError
from strategies.flower.exchange import never

NODE_POLL = 0.1  # seconds between two looks at who is connected


def wait_for_nodes(grid: Grid, number: int, timeout: float, stopped: Callable[[], bool] = never) -> list[int]:
    """Wait until at least ``number`` nodes (and one) are connected and no more come; return their ids.

    Raises
    ------
    RunError
        If they haven't come after ``timeout`` seconds.
    """
    clock, count = WallClock(), -1
    while True:
        node_ids = list(grid.get_node_ids())
        late = clock.now() > timeout
        if stopped() or (len(node_ids) >= max(number, 1) and (late or count == len(node_ids))):
            return node_ids
        count = len(node_ids)
        if late:
            raise RunError(f"{count} of {max(number, 1)} clients connected within {timeout:g} s")
        clock.wait_until(clock.now() + NODE_POLL)


def wait_while(missing: Callable[[], bool], timeout: float, stopped: Callable[[], bool] = never) -> None:
    """Look again and again, for ``timeout`` seconds at most, while somebody is ``missing``."""
    clock = WallClock()
    while missing() and not stopped() and clock.now() < timeout:
        clock.wait_until(clock.now() + NODE_POLL)
