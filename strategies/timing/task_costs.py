"""The load of a client's task: its work, and the bytes of its two messages, which determine virtual task times."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from strategies.clients.roster import Client
from strategies.flower.errors import RunError


class TaskCost(NamedTuple):
    """Work of a task, in processed examples or operations, and bytes of its messages, down and up."""

    work: float
    down: int
    up: int


@dataclass
class TaskCosts:
    """The loads of a run's tasks.

    Attributes
    ----------
    work_of : callable, optional
        Returns the work of a client's task, which the server needs before the reply; by default the number of the
        client's examples.
    model, up : int
        Bytes of the model that is sent, and of a reply.
    """

    work_of: Callable[[Client], float] | None = None
    model: int = 0
    up: int = 0
    _extra_bytes: int = 0  # largest number of bytes sent beside the model so far
    _down: dict[int, int] = field(default_factory=dict)  # bytes of each client's last request
    # Fraction of the usual work that a client was asked for, if it is below 1.
    _fractions: dict[int, float] = field(default_factory=dict)

    def record(self, client: int, down: int, part: float = 1.0) -> None:
        """Record the bytes of a client's request, and how many times its usual work the task is."""
        self._extra_bytes = max(self._extra_bytes, down - self.model)
        self._down[client] = down
        self.ask(client, part)

    def ask(self, client: int, part: float) -> None:
        """Record how many times its usual work a client's task is."""
        self._fractions.pop(client, None)
        if part != 1:
            self._fractions[client] = part

    def part_of(self, client: int) -> float:
        """Return how many times its usual work a client's last task is."""
        return self._fractions.get(client, 1.0)

    def record_all(self, clients: Sequence[int], down: int, fractions: Sequence[float]) -> None:
        """Record the same number of bytes for several clients, and how many times its usual work each one does."""
        self._extra_bytes = max(self._extra_bytes, down - self.model)
        self._down.update(dict.fromkeys(clients, down))
        for client in clients if self._fractions else ():
            self._fractions.pop(client, None)
        self._fractions.update(
            (client, part) for client, part in zip(clients, fractions, strict=True) if part != 1
        )

    def of_last(self, client: Client) -> TaskCost:
        """Return the load of the last task that was dispatched to a client."""
        load = self.of(client, self._down.get(client.index))
        return load._replace(work=load.work * self.part_of(client.index))

    def of(self, client: Client, down: int | None = None) -> TaskCost:
        """Return the load of a client's task with ``down`` bytes; None: the largest request so far.

        Raises
        ------
        RunError
            If the work of the task is unknown.
        """
        down = self.model + self._extra_bytes if down is None else down
        if self.work_of is not None:
            return TaskCost(self.work_of(client), down, self.up)
        if client.num_examples is None:
            raise RunError(
                f"{client} doesn't say how many examples it has (query.describe), which the time of its tasks "
                "follows from; allowed are time scenarios of whole task times, such as F80"
            )
        return TaskCost(client.num_examples, down, self.up)

    def state(self) -> dict[str, Any]:
        """Return the state for a resumed run."""
        return {"bytes-beside": self._extra_bytes} if self._extra_bytes else {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore ``state``."""
        self._extra_bytes = int(state.get("bytes-beside", 0))
        self._down.clear()
