"""The state of a client in an asynchronous run: its tasks so far, and whether it is dropped."""

from dataclasses import dataclass

from strategies.clients.roster import Client


@dataclass
class ClientState:
    """The state of one client in an asynchronous run."""

    client: Client
    tasks: int = 0  # number of tasks dispatched so far
    misses: int = 0  # number of failed tasks in a row
    dropped: bool = False
    contributions: int = 0
    weight: float = 0.0  # Σ d_i of its contributions
    seconds: float = 0.0  # total of its observed task times
    answers: int = 0  # number of tasks that were observed
    latest: float = 0.0  # seconds of its last observed task; not saved
    invalid_replies: int = 0  # number of refused replies in a row
    lost: int = 0  # number of tasks in a row that were lost, as the client went away
    task: str = ""  # message id of the last task
    waiting: int = 0  # number of its contributions in the buffer
    since: int = 0  # number of aggregations before it joined, or while it was dropped
    dropped_at: int = 0  # number of aggregations when it was dropped
    is_available: bool = True  # whether the client is available
    turning: bool = False  # whether the event queue has its next change of availability
    again: bool = False  # whether the client is dropped, but may get a task again

    def __str__(self) -> str:
        return str(self.client)

    @property
    def index(self) -> int:
        """The client's index in the federation."""
        return self.client.index

    def drop(self, aggregations: int) -> None:
        """Drop the client: aggregations no longer count it."""
        self.dropped, self.dropped_at = True, aggregations

    def add_task_time(self, seconds: float) -> None:
        """Record the duration of one of the client's tasks, in seconds."""
        self.latest, self.lost = seconds, 0
        self.seconds += seconds
        self.answers += 1

    def count_again(self, aggregations: int) -> None:
        """Readmit the client: reset its misses, and don't count the aggregations while it was dropped."""
        if self.dropped:
            self.since += aggregations - self.dropped_at
        self.misses, self.invalid_replies, self.dropped, self.again = 0, 0, False, False
