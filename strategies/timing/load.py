"""What a client's task weighs: its work, and the bytes of its two messages. Virtual time follows from these."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from strategies.clients.roster import Client
from strategies.flower.errors import RunError


class Load(NamedTuple):
    """Work of a task, in examples that it passes over or in operations, and bytes of its messages, down and up."""

    work: float
    down: int
    up: int


@dataclass
class Loads:
    """What the tasks of a run weigh.

    Attributes
    ----------
    work_of : callable, optional
        Returns the work of a client's task, which the server has to know before it replies; by default its number
        of examples, once.
    model, up : int
        Bytes of the model that is sent, and of a reply.
    """

    work_of: Callable[[Client], float] | None = None
    model: int = 0
    up: int = 0
    _beside: int = 0  # bytes beside the model, at most so far
    _down: dict[int, int] = field(default_factory=dict)  # of each client's last request
    # The part of its usual work that a client was asked for, where that is less than all of it.
    _parts: dict[int, float] = field(default_factory=dict)

    def note(self, client: int, down: int, part: float = 1.0) -> None:
        """Note the bytes that a client is sent, the model and what goes beside it, and the part of its work."""
        self._beside = max(self._beside, down - self.model)
        self._down[client] = down
        self._parts.pop(client, None)
        if part < 1:
            self._parts[client] = part

    def note_all(self, clients: Sequence[int], down: int, parts: Sequence[float]) -> None:
        """Note that of several clients, who are all sent as much."""
        self._beside = max(self._beside, down - self.model)
        self._down.update(dict.fromkeys(clients, down))
        for client in clients if self._parts else ():
            self._parts.pop(client, None)
        self._parts.update((client, part) for client, part in zip(clients, parts, strict=True) if part < 1)

    def known(self, more_than_the_model: bool) -> bool:
        """Tell whether it is known how many bytes clients are sent, which may be more than those of the model."""
        return not more_than_the_model or bool(self._down)

    def of_last(self, client: Client) -> Load:
        """Return what the last task that a client was sent weighs."""
        load = self.of(client, self._down.get(client.index))
        return load._replace(work=load.work * self._parts.get(client.index, 1.0))

    def of(self, client: Client, down: int | None = None) -> Load:
        """Return what a task of a client weighs that is sent so many bytes; None: as many as tasks were so far.

        Raises
        ------
        RunError
            If nobody knows its work.
        """
        down = self.model + self._beside if down is None else down
        if self.work_of is not None:
            return Load(self.work_of(client), down, self.up)
        if client.num_examples is None:
            raise RunError(
                f"{client} doesn't say how many examples it has (query.describe), which the time of its tasks "
                "follows from; allowed are time scenarios of whole task times, such as F80"
            )
        return Load(client.num_examples, down, self.up)

    def state(self) -> dict[str, Any]:
        """Return what a run goes on from."""
        return {"bytes-beside": self._beside} if self._beside else {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state``."""
        self._beside = int(state.get("bytes-beside", 0))
        self._down.clear()
