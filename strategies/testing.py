"""A Grid in memory, for anybody's tests: real ClientApps run in this process, and the network can be made to fail.

    grid = MemoryGrid(client_app, [{"partition-id": i} for i in range(3)])
    grid.lose(1)                                          # its replies to training messages never come
    FedAvg().start(grid, initial_arrays, num_rounds=2, timeout=0.1)
    assert grid.asked(messages.TRAIN, 1) == [0, 1, 2]

Messages and replies are copied, as a network does, and replies that are there come in random order, fixed by a seed.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp

from strategies import streams
from strategies.clock import WallClock
from strategies.flower import messages
from strategies.flower.grids import asked_ids
from strategies.flower.internals import RUN_ID, be_the_server, copy_of, give_id, unavailable_reply
from strategies.flower.local_grid import LocalGrid
from strategies.flower.messages import answer_to
from strategies.flower.simulated import SimulatedContext


@dataclass
class Node:
    """A SuperNode, and what the network does to it.

    Attributes
    ----------
    joins_after : int
        Looks at the list of nodes before it shows up.
    transport : dict of str to str
        What becomes of messages of a type, or of a category such as ``train``: see ``MemoryGrid.lose``.
    delay : float
        Seconds until the reply to a message other than a query is there.
    """

    context: Context
    present: bool = True
    joins_after: int = 0
    transport: dict[str, str] = field(default_factory=dict)
    delay: float = 0.0

    @property
    def node_id(self) -> int:
        """Its id."""
        return int(self.context.node_id)


class MemoryGrid(LocalGrid):
    """A Grid whose nodes are in this process; a message is worked on when it is pushed.

    Parameters
    ----------
    app : callable
        What every node runs: a ClientApp, or a function that answers for one.
    node_configs : sequence of mapping
        The ``node_config`` of each node's context, such as ``{"partition-id": 0}``.
    node_ids : sequence of int, optional
        Their ids; drawn at random, as Flower does, where they aren't given.
    seed : int
        Fixes those, the ids of messages and the order of replies.

    Attributes
    ----------
    nodes : dict of int to Node
        By id; a test may add and take away.
    sent : list of Message
        Copies of all messages that the grid took.
    """

    def __init__(
        self,
        app: Callable[[Message, Context], Message],
        node_configs: Iterable[Mapping[str, Any]],
        node_ids: Iterable[int] | None = None,
        seed: int = 0,
    ) -> None:
        be_the_server()
        self.app = app
        self._clock = WallClock()
        self.random = streams.generator(seed, "memory-grid")
        configs = [dict(config) for config in node_configs]
        ids = [self._draw() >> 1 for _ in configs] if node_ids is None else list(node_ids)
        self.nodes: dict[int, Node] = {}
        for node_id, config in zip(ids, configs, strict=True):
            self.add(node_id, config)
        self.sent: list[Message] = []
        self._replies: dict[str, list[tuple[float, Message]]] = {}

    @property
    def contexts(self) -> dict[int, Context]:
        """The nodes' contexts, by node id."""
        return {node_id: node.context for node_id, node in self.nodes.items()}

    @property
    def apps_for_queries(self) -> list[ClientApp]:
        """The ClientApp, if all nodes run one: a test's Grid knows which queries it answers."""
        return [self.app] if isinstance(self.app, ClientApp) else []

    # ---- What a test does to it -----------------------------------------------------------------------------------

    def add(self, node_id: int, node_config: Mapping[str, Any]) -> Node:
        """Connect one more node."""
        self.nodes[node_id] = Node(SimulatedContext(RUN_ID, node_id, dict(node_config), RecordDict(), {}))
        return self.nodes[node_id]

    def node(self, partition: int) -> Node:
        """Return the (last) node that holds a partition."""
        return [n for n in self.nodes.values() if n.context.node_config.get("partition-id") == partition][-1]

    def lose(self, partition: int, how: str = "drop", category: str = "train") -> None:
        """Let the network spoil what goes between a node and the server.

        Parameters
        ----------
        how : str
            ``drop`` its replies, have them ``twice``, call it ``unavailable``, or messages to it ``unstorable``.
        category : str
            Of messages: ``train``, ``evaluate``, ``query``, or one type such as ``query.describe``.
        """
        self.node(partition).transport[category] = how

    def requests(self, message_type: str = messages.TRAIN, server_round: int | None = None) -> list[Message]:
        """Return the messages of a type (and round) that were sent."""
        return [
            message
            for message in self.sent
            if message.metadata.message_type == message_type
            and server_round
            in (None, message.content.config_records[messages.CONFIG].get(messages.SERVER_ROUND))
        ]

    def asked(self, message_type: str = messages.TRAIN, server_round: int | None = None) -> list[int]:
        """Return the partitions that were sent a message of a type (and round), in the order of sending."""
        contexts = [
            self.nodes[m.metadata.dst_node_id].context for m in self.requests(message_type, server_round)
        ]
        return [int(context.node_config["partition-id"]) for context in contexts]

    def under_way(self) -> dict[int, int]:
        """Return how many training replies wait to be pulled, by node id."""
        nodes = {m.metadata.message_id: m.metadata.dst_node_id for m in self.requests()}
        waiting = [nodes[message_id] for message_id in self._replies if message_id in nodes]
        return {node_id: waiting.count(node_id) for node_id in waiting}

    # ---- What Flower's Grid does ----------------------------------------------------------------------------------

    @property
    def all_connected(self) -> bool:  # type: ignore[override]
        """Return True if no node has yet to join."""
        return all(node.joins_after < 0 for node in self.nodes.values() if node.present)

    def get_node_ids(self) -> Iterable[int]:
        """Return the ids of the nodes that are there."""
        for node in self.nodes.values():
            node.joins_after -= 1
        return [node.node_id for node in self.nodes.values() if node.present and node.joins_after < 0]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Let the nodes work on messages; return the ids of those that could be stored."""
        ids = []
        for message in messages:
            give_id(message, f"{self._draw():016x}{self._draw():016x}")
            if message.metadata.reply_to_message_id or message.metadata.ttl <= 0:
                raise ValueError("a message from the server is no reply, and has a time to live")
            node = self.nodes[message.metadata.dst_node_id]
            category = message.metadata.message_type.partition(".")[0]
            how = node.transport.get(message.metadata.message_type, node.transport.get(category))
            if how == "unstorable":
                continue
            ids.append(message.metadata.message_id)
            self.sent.append(copy_of(message))
            if how == "drop":
                continue
            due = self._clock.now() + (node.delay if category != "query" else 0.0)
            self._replies[message.metadata.message_id] = [
                (due, reply) for reply in self._work(message, node, how)
            ]
        return ids

    def pull_messages(
        self, message_ids: Iterable[str] | None = None, *, reply_to_message_ids: Iterable[str] | None = None
    ) -> Iterable[Message]:
        """Return the replies that are there by now, in random order."""
        now, pulled = self._clock.now(), []
        ids = asked_ids(reply_to_message_ids, message_ids)
        for message_id in list(self._replies) if ids is None else ids:
            if any(due <= now for due, _ in self._replies.get(message_id, [])):
                pulled += [reply for _, reply in self._replies.pop(message_id)]
        return [pulled[place] for place in self.random.permutation(len(pulled))]

    def _work(self, message: Message, node: Node, how: str | None) -> list[Message]:
        if how == "unavailable":
            return [unavailable_reply(message.metadata)]
        try:
            reply = answer_to(message, self.app(copy_of(message), node.context))
        except Exception as error:  # as flwr/server/superlink/fleet/vce/vce_api.py does
            reply = Message(Error(code=0, reason=f"{type(error)}:<'{error}'>"), reply_to=message)
        return [copy_of(reply) for _ in range(2 if how == "twice" else 1)]

    def _draw(self) -> int:
        return int(self.random.integers(1 << 63))
