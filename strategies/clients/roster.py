"""Who the clients are: the handshake that gives every node its place in the federation.

Node ids are random in each run. What makes a run reproducible is the client's index: the ``partition-id`` that the
node reports when it is asked to describe itself. A ClientApp answers with a handler such as ::

    @app.query("describe")
    def describe(message: Message, context: Context) -> Message:
        metrics = {"partition-id": context.node_config["partition-id"], "num-examples": len(load_data(context))}
        return Message(RecordDict({"metrics": MetricRecord(metrics)}), reply_to=message)

One that has no such handler still works: clients are then ordered by node id, and weighted by the
``num-examples`` of their training replies, as Flower's own strategies do. Whoever hasn't told yet how many it has
counts, where a method weighs those who are away, as the mean of the others; all count alike while none has.

A description is a claim. In a simulation it is believed; of devices, the registered node says who a client is: a
``partition-id`` counts only for a node that holds a part of common data, that is, beside ``num-partitions``, and
below the number that most nodes say. Nobody takes a place that another node has, or is waited for on a node's word.
A device may have a name, in a record ``device`` beside the metrics: it stands for the first that says it, on show.
"""

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from flwr.app import ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid

from strategies.clock import WallClock
from strategies.flower import messages
from strategies.flower.errors import RunError
from strategies.flower.exchange import exchange, never, wait_for_nodes, wait_while
from strategies.flower.grids import DEPLOYMENT, DescribingGrid, Description, engine_of
from strategies.flower.internals import APP_RAISED, MOD_FAILED, UNKNOWN

log = logging.getLogger("flwr.strategies")

# Partitions of common data that devices can hold: arrays by client are as long as the largest index.
MOST_PARTITIONS = 100_000

# Error codes of replies where the app raised something: it has no handler, or a mod in front of it fails.
APP_FAILED = (UNKNOWN, APP_RAISED, MOD_FAILED)
ABSENT = 0  # node id of a client of a resumed run that isn't there
NOT_ASKED = "it wasn't asked"
NO_HANDLER = "the app has no handler of it, which may be left out"


@dataclass(frozen=True)
class Client:
    """A client that takes part: its node, its index in the federation and what it said of itself.

    ``num_examples`` is None where the ClientApp doesn't answer ``query.describe``, until a reply tells; it is then
    what the last one told. ``name`` is what its operator calls the device: for the eye alone.
    """

    node_id: int
    index: int
    num_examples: float | None
    description: Description
    name: str = ""

    def __str__(self) -> str:
        return f"client {self.index}" + (f" ({self.name})" if self.name else "")

    @property
    def located(self) -> str:
        """Its index, and which device that is, for the log."""
        return f"{self.index} ({self.name}{', ' if self.name else ''}node {self.node_id})"

    @property
    def fields(self) -> dict[str, Any]:
        """Who it is, as ``extra`` of a line of the log."""
        return {"client": self.index, "device": self.name, "node": str(self.node_id)}

    described: bool = False  # whether it said of itself how many examples it has


# Partition, node id, number of examples, all metrics that were said, and the device's name.
_Described = tuple[int | None, int, float | None, Description, str]


class Roster:
    """The clients that are there, by index. A client whose description fails is left out and named in the log.

    Parameters
    ----------
    min_clients : int
        Nodes to wait for before the first handshake.
    min_nodes : int
        Nodes to wait for at every ``refresh``.
    timeout : float
        Seconds to wait for nodes, and then for their descriptions.
    stopped : callable
        True ends any wait.
    weight_key, config_key : str
        Names of the metric that says how much a client counts, and of the record of a request.
    """

    def __init__(
        self,
        min_clients: int = 1,
        timeout: float = 3600.0,
        stopped: Callable[[], bool] = never,
        weight_key: str = messages.NUM_EXAMPLES,
        config_key: str = messages.CONFIG,
        min_nodes: int = 0,
    ) -> None:
        self.weight_key = weight_key
        self._keys = (messages.ARRAYS, config_key)
        self.min_clients, self.min_nodes = min_clients, min_nodes
        self.timeout = timeout
        self.stopped = stopped
        self.reset()

    def reset(self) -> None:
        """Forget the clients of an earlier run."""
        self._places: dict[int, int] = {}  # index by node id, of those that know no place of their own
        self._told: dict[int, float] = {}  # sizes by node id, of those whose replies alone tell them
        self._rivals: dict[int, int] = {}  # node ids that claim the place of another node, and which it is
        self._owners: dict[str, int] = {}  # who was the first to say a name, by index
        self.devices = False  # whether nodes are devices, whose word is not taken
        self._by_node: dict[int, Client] = {}
        self._refused: set[int] = set()
        self._present: set[int] = set()
        self._clients: list[Client] | None = None  # those present, until that changes
        self._asked: dict[str, tuple[int, float]] = {}  # node and deadline, by message id
        self._clock = WallClock()

    @property
    def clients(self) -> list[Client]:
        """The clients whose nodes are connected, in the order of their index."""
        if self._clients is None:
            # By index: where a replaced node is back, the node that took its place stays.
            present = {c.index: c for node_id, c in self._by_node.items() if node_id in self._present}
            self._clients = sorted(present.values(), key=lambda client: client.index)
        return self._clients

    def refresh(self, grid: Grid, config: ConfigRecord) -> list[Client]:
        """Look who is connected, ask the new ones to describe themselves, and return the clients.

        Raises
        ------
        RunError
            If no client can take part: none came, or came back, within the timeout, or every description failed.
            Or if fewer nodes than are waited for are there by then.
        """
        starting = not self._by_node
        self.devices = engine_of(grid) == DEPLOYMENT
        if starting:
            wait_for_nodes(grid, self.min_clients, self.timeout, self.stopped)
        self._see(grid)
        if not starting and len(self._present) < self.min_nodes:
            log.warning(
                "%d clients are connected, the run waits for %d (min_available_nodes) for up to %g s",
                len(self._present),
                self.min_nodes,
                self.timeout,
            )
            wait_for_nodes(grid, self.min_nodes, self.timeout, self.stopped)
            self._see(grid)
        while not self.stopped() and (new := self._present - self._by_node.keys() - self._refused):
            self._describe(grid, sorted(new), config)
            self._refused |= new - self._by_node.keys()
            expected = max(
                (messages.whole(c.description.get(messages.NUM_PARTITIONS)) or 0 for c in self.clients),
                default=0,
            )
            # A simulation registers its nodes while the ServerApp is already running.
            if starting and expected > len(self._present) and not self.devices:
                wait_for_nodes(grid, expected, self.timeout, self.stopped)
            self._see(grid)
        if not starting and not self.clients and not self.stopped():
            log.warning("no client is connected, the run waits for one for up to %g s", self.timeout)
            wait_while(lambda: self._nobody(grid), self.timeout, self.stopped)
            if self._present - self._refused:
                return self.refresh(grid, config)
        if not self.clients and not self.stopped():
            raise RunError("no client can take part; the log names the reason for each")
        return self.clients

    def _nobody(self, grid: Grid) -> bool:
        """Tell whether nobody is there who may take part, after a new look."""
        self._see(grid)
        return not self._present - self._refused

    def look(self, grid: Grid, config: ConfigRecord) -> list[Client]:
        """Do as ``refresh`` without waiting: a new node is a client from the first look after its answer."""
        if not self._see(grid) and not self._asked:
            return self.clients
        now = self._clock.now()
        asked = {node_id for node_id, _ in self._asked.values()}
        new = sorted(self._present - self._by_node.keys() - self._refused - asked)
        requests = [self._request(node_id, config) for node_id in new]
        pushed = set(grid.push_messages(requests)) if requests else set()
        for request in requests:
            if request.metadata.message_id in pushed:
                self._asked[request.metadata.message_id] = request.metadata.dst_node_id, now + self.timeout
        replies: dict[int, Message] = {}
        for reply in grid.pull_messages(list(self._asked)) if self._asked else []:
            node_id, _ = self._asked.pop(reply.metadata.reply_to_message_id, (0, 0.0))
            if node_id:
                replies[node_id] = reply
        late = {message_id: node_id for message_id, (node_id, due) in self._asked.items() if due <= now}
        for message_id in late:
            del self._asked[message_id]
        if done := sorted([*replies, *late.values()]):
            self._take(done, replies)
            self._clients = None
            self._refused |= set(done) - self._by_node.keys()
        return self.clients

    def _see(self, grid: Grid) -> bool:
        """Note which nodes are connected; tell whether they are others than before."""
        present = set(grid.get_node_ids())
        changed = present != self._present
        if changed:
            self._present, self._clients = present, None
            self._refused &= present  # who goes and is back may do better: it is asked once more
            for rival in [node_id for node_id, owner in self._rivals.items() if owner not in present]:
                del self._rivals[rival]
                self._refused.discard(rival)  # it is asked once more
        return changed

    def _describe(self, grid: Grid, node_ids: list[int], config: ConfigRecord) -> None:
        if isinstance(grid, DescribingGrid):
            told = grid.descriptions(node_ids, config)
            self._place([self._described(node_id, said, "") for node_id, said in told.items()])
            self._clients = None
            if not (node_ids := [node_id for node_id in node_ids if node_id not in told]):
                return
        # In a simulation all run the same app: where one has no handler, the others aren't asked, as each would show
        # a traceback.
        asked = node_ids if self.devices or self._by_node else node_ids[:1]
        replies = exchange(grid, [self._request(n, config) for n in asked], self.timeout, self.stopped)
        if len(asked) < len(node_ids) and not any(_has_no_handler(reply) for reply in replies.values()):
            others = [self._request(n, config) for n in node_ids[1:]]
            replies |= exchange(grid, others, self.timeout, self.stopped)
            asked = node_ids
        if not self.stopped():
            self._take(node_ids, replies, set(node_ids) - set(asked))
            self._clients = None

    def _request(self, node_id: int, config: ConfigRecord) -> Message:
        return messages.request(messages.DESCRIBE, node_id, config, ttl=self.timeout, keys=self._keys)

    def _take(
        self, node_ids: list[int], replies: Mapping[int, Message], unasked: Collection[int] = ()
    ) -> None:
        """Make clients of the nodes whose answers will do; name the others in the log."""
        silent: dict[int, str] = {}  # why a node doesn't describe itself
        described: list[_Described] = []
        for node_id in node_ids:
            reply = replies.get(node_id)
            if node_id in unasked:
                continue
            if reply is None or (reply.has_error() and reply.error.code not in APP_FAILED):
                reason = "no answer" if reply is None else messages.reason_of(reply)
                _refuse(node_id, reason)
                continue
            if reply.has_error():
                silent[node_id] = NO_HANDLER if _has_no_handler(reply) else messages.reason_of(reply)
                continue
            metrics = messages.metrics_of(reply)
            try:
                described.append(self._described(node_id, metrics, messages.name_of(reply)))
            except ValueError as error:
                _refuse(node_id, error)
        self._place(described)
        self._place_silent(silent | dict.fromkeys(unasked, NOT_ASKED))

    def _described(self, node_id: int, metrics: Description, name: str) -> _Described:
        num_examples = messages.weight_of(metrics, self.weight_key)
        return self._partition_of(metrics), node_id, num_examples, metrics, name

    def _place_silent(self, reasons: Mapping[int, str]) -> None:
        """Make clients of nodes that don't describe themselves: after the others, by node id."""
        if not reasons:
            return
        log.warning(
            "%s: no answer to query.describe (%s): ordered by node id, which is random, and weighed by their replies",
            f"{len(reasons)} clients" if len(reasons) > 1 else f"node {next(iter(reasons))}",
            next(iter(reasons.values())),
        )
        for node_id in sorted(reasons):
            index = self._places.setdefault(node_id, self._free_index())
            self._by_node[node_id] = Client(node_id, index, self._told.get(node_id), MetricRecord())

    def _place(self, described: list[_Described]) -> None:
        """Make clients of nodes that describe themselves, each where it belongs."""
        if self.devices:
            described = list(self._within_bounds(described))
        taken = {client.index: client.node_id for client in self.clients}
        # Those without a partition id come last, so that they take nobody's place.
        order = sorted(described, key=lambda entry: (entry[0] is None, entry[0] or 0, entry[1]))
        for partition, node_id, num_examples, metrics, name in order:
            index = self._places.setdefault(node_id, self._free_index()) if partition is None else partition
            if index in taken:
                _refuse(node_id, f"client {index} is node {taken[index]} already")
                self._rivals[node_id] = taken[index]
                continue
            taken[index] = node_id
            shown, described_size = self._name(index, node_id, name), num_examples is not None
            size = num_examples if described_size else self._told.get(node_id)
            client = Client(node_id, index, size, metrics, shown, described=described_size)
            self._by_node[node_id] = client
            if client.name:
                log.info("client %s takes part", client.located, extra=client.fields)

    def _name(self, index: int, node_id: int, claim: str) -> str:
        """Return the name that a client is shown under: what it says, if no other has said it before."""
        if claim and (owner := self._owners.setdefault(claim, index)) != index:
            log.warning(
                "node %d says that it is %s, as client %d did: its id is shown", node_id, claim, owner
            )
            return ""
        return claim

    @property
    def names(self) -> dict[int, str]:
        """The devices' names, by the clients' index; a client that has changed its name has the last one."""
        return {index: name for name, index in list(self._owners.items())}

    def named(self, node_ids: Collection[int]) -> str:
        """Write which clients nodes are, or were, for the log: ten of them, and how many more."""
        known = [self._by_node[node_id] for node_id in node_ids if node_id in self._by_node]
        names = list(map(str, sorted(known, key=lambda client: client.index)))
        names += [f"node {node_id}" for node_id in node_ids if node_id not in self._by_node]
        return ", ".join(names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "")

    def _partition_of(self, metrics: Description) -> int | None:
        """Return the place that a description claims, if it may."""
        if self.devices and messages.NUM_PARTITIONS not in metrics:
            return None
        return messages.whole(metrics.get(messages.PARTITION_ID))

    def _within_bounds(self, described: Iterable[_Described]) -> Iterator[_Described]:
        """Leave out devices whose partition can't be, by the number of partitions that most nodes say."""
        entries = list(described)
        descriptions = [client.description for client in self.clients] + [entry[3] for entry in entries]
        said = Counter(
            number
            for description in descriptions
            if (number := messages.whole(description.get(messages.NUM_PARTITIONS))) is not None
        )
        most = min(min(said, key=lambda number: (-said[number], number), default=0), MOST_PARTITIONS)
        for entry in entries:
            partition, node_id = entry[:2]
            if partition is not None and partition >= most:
                _refuse(node_id, f"partition-id = {partition}: must be 0 to {most - 1}")
                continue
            yield entry

    def _free_index(self) -> int:
        indices = [*(client.index for client in self._by_node.values()), *self._places.values()]
        return max(indices, default=-1) + 1

    def keep_sizes(self, clients: Iterable[Client]) -> None:
        """Keep the sizes of clients that don't describe themselves, as their last replies tell them."""
        for client in clients:
            if client.num_examples is not None and not client.described and client.node_id in self._by_node:
                self._told[client.node_id], self._by_node[client.node_id] = client.num_examples, client
        self._clients = None

    def state(self) -> dict[str, Any]:
        """Return which node has which place and size, where descriptions don't say, and which names are taken."""
        named = {"device-names": list(self._owners.items())} if self._owners else {}
        told = {"told-sizes": list(self._told.items())} if self._told else {}
        return {"node-places": list(self._places.items()), **told, **named}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Give the nodes of an earlier run their places again, and their sizes."""
        self._places = {int(node_id): int(index) for node_id, index in state["node-places"]}
        self._told = {int(node_id): size for node_id, size in state.get("told-sizes", ())}
        self._owners = {str(name): int(index) for name, index in state.get("device-names", ())}


def sized_by(client: Client, metrics: MetricRecord, key: str = messages.NUM_EXAMPLES) -> Client:
    """Fill in the number of examples that a reply's metrics tell, where the handshake didn't."""
    if client.described:
        return client
    with suppress(ValueError):  # such a reply doesn't count: strategies/updates/chain.py
        if (said := messages.weight_of(metrics, key)) is not None:
            return replace(client, num_examples=said)
    return client


def sized_by_replies(
    clients: Sequence[Client], replies: Mapping[int, Message], key: str = messages.NUM_EXAMPLES
) -> list[Client]:
    """Do that for several clients; ``replies`` by node id."""
    sized = []
    for client in clients:
        reply = replies.get(client.node_id)
        sized.append(
            sized_by(client, messages.metrics_of(reply), key) if reply and reply.has_content() else client
        )
    return sized


def _refuse(node_id: int, reason: object) -> None:
    log.warning("node %d can't take part: %s", node_id, reason, extra={"node": str(node_id)})


def _has_no_handler(reply: Message) -> bool:
    return reply.has_error() and "No query function registered" in (reply.error.reason or "")
