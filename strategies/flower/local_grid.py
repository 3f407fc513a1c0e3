"""The base class of Grids without a network."""

import math
from collections.abc import Iterable
from typing import Any

from flwr.app import Message
from flwr.serverapp import Grid

from strategies.flower.exchange import arriving
from strategies.flower.grids import MEMORY
from strategies.flower.internals import Run, empty_run


class LocalGrid(Grid):
    """The base class of Grids without a network; a subclass pushes and pulls messages."""

    #: Name of the engine, which ``strategies.flower.grids.engine_of`` returns.
    engine = MEMORY

    #: Whether no further node will connect: the start of a run then doesn't wait for more nodes.
    all_connected: bool = True

    def set_run(self, run: Run) -> None:
        """Do nothing: there is only one run."""

    @property
    def run(self) -> Run:
        """The run's record, with nothing in it but its id."""
        return empty_run()

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        """Refuse: Flower has deprecated this in favour of ``Message(...)``."""
        raise NotImplementedError("use flwr.app.Message(...)")

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Push messages and return the replies that arrive within ``timeout`` seconds; None: wait for all."""
        found = arriving(self, messages, math.inf if timeout is None else timeout)
        return [reply for _, reply in found]
