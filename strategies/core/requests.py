"""The requests to clients: the messages that ask them to train, and who has not answered yet."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.serverapp import Grid

from strategies.clients.roster import Client
from strategies.core.compressed_updates import CompressedUpdates
from strategies.core.run_state import RunState
from strategies.flower import messages
from strategies.flower.arrays import Vector
from strategies.flower.exchange import looks, pushed
from strategies.timing.load import Loads

Fields = Callable[[], Mapping[str, Any]]
Records = Callable[[Client], Mapping[str, messages.RecordType]]


class TrainingRequests:
    """The training requests of a run.

    Parameters
    ----------
    loads : Loads
        The work and the bytes of clients' tasks.
    local_rule, task_fields : callable
        Hooks of the method: fields of the message that local steps depend on, and others.
    outgoing : callable
        Hook of the method: the records for a client beside the model.
    compressed : CompressedUpdates, optional
        The compression that clients are asked for.
    """

    def __init__(
        self,
        run: RunState,
        loads: Loads,
        local_rule: Fields,
        task_fields: Fields,
        outgoing: Records,
        compressed: CompressedUpdates | None = None,
    ) -> None:
        self._run, self._loads = run, loads
        self._local_rule, self._task_fields, self._outgoing = local_rule, task_fields, outgoing
        self._compressed = compressed

    def note_model(self, arrays: ArrayRecord) -> None:
        """Note the bytes of the model in a request and in a reply."""
        size = messages.num_bytes(arrays)
        self._loads.model = size
        self._loads.up = size if self._compressed is None else self._compressed.size(arrays)

    def fields(self, client: Client, server_round: int, task: int, config: ConfigRecord) -> ConfigRecord:
        """Return the fields of a client's request: a copy of the loop's ``config`` and the strategy's own fields."""
        own = config.copy()
        own[messages.SERVER_ROUND] = server_round
        own[messages.CLIENT] = client.index
        own[messages.TASK] = task
        asked = {} if self._compressed is None else self._compressed.fields(self._run.run_id)
        for key, value in {**self._local_rule(), **asked, **self._task_fields()}.items():
            own[key] = value
        return own

    def request(
        self, client: Client, fields: ConfigRecord, arrays: ArrayRecord, beside: Mapping[str, Vector]
    ) -> Message:
        """Return a client's request: the model's arrays, and vectors (D,) beside them by record name."""
        records = {name: self._run.layout.to_record(vector) for name, vector in beside.items()}
        companions = {**self._outgoing(client), **records}
        if companions:
            size = sum(map(messages.record_bytes, companions.values()))
            self._run.beside_bytes = max(self._run.beside_bytes, size)
        return messages.request(
            messages.TRAIN,
            client.node_id,
            fields,
            ttl=self._run.timeout,
            arrays=arrays,
            companions=companions,
            keys=self._run.flower.keys,
        )

    def note_sent(self, client: Client, request: Message, part: float = 1.0) -> None:
        """Note the load of a client's task, where task times follow from loads; ``part``: share of its usual work."""
        if self._run.pace.weighs:
            self._loads.note(client.index, messages.total_bytes(request), part)


class PendingReplies:
    """Sends requests, yields the replies, and knows which clients haven't answered yet."""

    def __init__(self, run: RunState) -> None:
        self._run = run
        self._asked: dict[int, int] = {}  # indices of the clients that haven't answered, by node id

    def at_work(self) -> list[int]:
        """Return the indices of the clients that haven't answered; safe to call from another thread."""
        return list(self._asked.copy().values())

    def expect(self, clients: Mapping[int, int]) -> None:
        """Expect answers of these clients and of no others: indices by node id."""
        self._asked = dict(clients)

    def answered(self, node_id: int) -> int | None:
        """Note a node's answer; return its client's index, None if no answer of the node is expected."""
        return self._asked.pop(node_id, None)

    def awaited(
        self, grid: Grid, requests: Iterable[Message], arrived: Callable[[int], None] | None = None
    ) -> Iterator[Message]:
        """Push requests at once, and yield the replies as they come; ``arrived`` gets each client's index."""
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
