"""A client of a run without rounds: what it has done so far, and whether it counts."""

from dataclasses import dataclass

from strategies.clients.roster import Client


@dataclass
class Member:
    """What is known of a client that takes part."""

    client: Client
    tasks: int = 0  # handed out so far
    misses: int = 0  # in a row
    dropped: bool = False
    contributions: int = 0
    weight: float = 0.0  # Σ d_i of its contributions
    seconds: float = 0.0  # Σ of its tasks' times, as observed
    answers: int = 0  # number of tasks that were observed
    latest: float = 0.0  # seconds of the last of them; not saved
    unfit: int = 0  # its answers in a row that couldn't be used
    task: str = ""  # message id of its last task
    waiting: int = 0  # its contributions that wait in the buffer
    since: int = 0  # aggregations that came before it, or while it was dropped
    gone: int = 0  # aggregations when it was dropped
    there: bool = True  # by its availability
    turning: bool = False  # whether the event queue has its next coming or going
    again: bool = False  # whether it is dropped, and may be asked again

    def drop(self, aggregations: int) -> None:
        """Let it count no longer."""
        self.dropped, self.gone = True, aggregations

    def took(self, seconds: float) -> None:
        """Take note of how long a task of its took."""
        self.latest = seconds
        self.seconds += seconds
        self.answers += 1

    def count_again(self, aggregations: int) -> None:
        """Forget its misses; what came while it was away isn't held against it."""
        if self.dropped:
            self.since += aggregations - self.gone
        self.misses, self.unfit, self.dropped, self.again = 0, 0, False, False
