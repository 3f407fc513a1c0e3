"""The roster of clients: a handshake gives every node its index in the federation.

Node ids are random in each run. What makes a run reproducible is the client's index: the ``partition-id`` that the
node reports when it is asked to describe itself. A ClientApp answers with a handler such as ::

    @app.query("describe")
    def describe(message: Message, context: Context) -> Message:
        metrics = {"partition-id": context.node_config["partition-id"], "num-examples": len(load_data(context))}
        return Message(RecordDict({"metrics": MetricRecord(metrics)}), reply_to=message)

A ClientApp without such a handler still works, and isn't asked unless the strategy needs it or the server says
``describe=True``: its clients are ordered by node id, and weighted by the
``num-examples`` of their training replies, as in Flower's own strategies. A simulation that knows its app doesn't ask
them. Where a method weights absent clients, a client that hasn't reported its number of examples counts with the mean
of the other clients' numbers; all clients have equal weight while none has reported one.

A description is a claim. A simulation trusts the descriptions. On devices, the identity of a client is its
registered node: a ``partition-id`` is valid only for a node that holds a part of common data, that is, beside
``num-partitions``, and below the number that most nodes report. The record of registered nodes, where the server has
it (strategies/clients/registered.py), decides who holds a partition. If two nodes claim the same partition and the
record names neither, both are refused until one of them is gone. A device may have a name, in a record ``device``
beside the metrics: it is for display, and belongs to the node that has it on record, or else to the first client that
reports it.
"""

import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from flwr.app import ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid

from strategies.clients.by_index import INDEX, ByIndex
from strategies.clients.registered import MOST_PARTITIONS, OPEN_REGISTRY, Registry, addressed_nodes
from strategies.clock import WallClock
from strategies.flower import messages
from strategies.flower.errors import RunError
from strategies.flower.exchange import exchange, never, wait_for_nodes, wait_while
from strategies.flower.grids import (
    DEPLOYMENT,
    MEMORY,
    RAY,
    ChangingGrid,
    DescribingGrid,
    Description,
    addressed,
    engine_of,
    handles,
    mod_without_evaluation,
    nobody_handles,
)
from strategies.flower.internals import APP_RAISED, FINDS_NO_ARRAYS, MOD_FAILED, UNKNOWN

log = logging.getLogger("flwr.strategies")

# Error codes of replies where the ClientApp raised an exception: it has no handler, or one of its mods failed.
APP_FAILED = (UNKNOWN, APP_RAISED, MOD_FAILED)
ABSENT = 0  # node id of a client of a resumed run that isn't connected
NOT_ASKED = "it wasn't asked; describe=True asks it"
NO_HANDLER = "the app has no handler of it, which may be left out"

# Seconds until a device is asked again whose description failed for a reason that may pass, such as a ClientApp that
# was killed: the first pause, which doubles each time, and the longest.
PAUSE, LONGEST_PAUSE = 10.0, 600.0

_NO_NAMES: Mapping[int, str] = {}


@dataclass(frozen=True)
class Client:
    """A client of the run: its node, its index in the federation and its description of itself.

    ``num_examples`` is None where the ClientApp doesn't answer ``query.describe``, until a training reply reports the
    number; it is then the number in the last reply.
    """

    node_id: int
    index: int
    num_examples: float | None
    description: Description
    name: str = ""
    """The operator's name of the device, or the natural id of a simulated client; for display only."""

    def __str__(self) -> str:
        return f"client {self.index}" + (f" ({self.name})" if self.name else "")

    @property
    def display_name(self) -> str:
        """The client's index, name and node id, for the log."""
        return f"{self.index} ({self.name}{', ' if self.name else ''}node {self.node_id})"

    @property
    def fields(self) -> dict[str, Any]:
        """The client's index, name and node id, as ``extra`` fields of a log line."""
        return {"client": self.index, "device": self.name, "node": str(self.node_id)}

    described: bool = False  # whether its description reports its number of examples


class _Described(NamedTuple):
    """A node's description, with the partition that it may claim and the name that it reports."""

    partition: int | None
    node_id: int
    num_examples: float | None
    metrics: Description
    name: str


class _Retry(NamedTuple):
    """When a device is asked again to describe itself, and after which pause, in seconds."""

    due: float
    pause: float


class Roster:
    """The connected clients, by index. A client whose description is invalid is excluded and named in the log.

    A device that gives no description, without having refused to, is asked again after a while.

    Parameters
    ----------
    min_clients : int
        Nodes to wait for before the first handshake.
    min_nodes : int
        Nodes to wait for at every ``refresh``.
    timeout : float
        Seconds to wait for nodes, and then for their descriptions.
    should_stop : callable
        True ends any wait.
    keys : tuple of str
        Names of the metric that holds a client's weight, and of the config record of a request.
    registry : Registry
        What is known of nodes before they describe themselves; by default nothing, and all may become clients.
    describe : callable
        Returns True if all nodes are asked to describe themselves; otherwise only those of an app that is known to
        have a handler of it.

    Attributes
    ----------
    refused : dict of int to str
        The reason why a node can't take part, by node id, of all nodes that have been refused and not accepted since.
    without_evaluation : dict of int to str
        The reason why a node can't evaluate the model: a mod of its app refuses replies without arrays, by node id.
    former : dict of int to int
        Index, by node id, of the nodes that were clients before they were refused.
    """

    def __init__(
        self,
        min_clients: int = 1,
        timeout: float = 3600.0,
        should_stop: Callable[[], bool] = never,
        keys: tuple[str, str] = (messages.NUM_EXAMPLES, messages.CONFIG),
        min_nodes: int = 0,
        registry: Registry = OPEN_REGISTRY,
        describe: Callable[[], bool] = lambda: True,
    ) -> None:
        self.record, self.participation, self.names_of_simulation = registry
        self._addressed = addressed_nodes(self.participation, self.record, min_clients)
        (self._weight_key, self._config_key), self._describes = keys, describe
        self.min_clients, self.min_nodes = min_clients, min_nodes
        self.timeout = timeout
        self.should_stop = should_stop
        self._places: dict[int, int] = {}  # index by node id, of nodes that report no partition
        self._told: dict[int, float] = {}  # sizes by node id, of nodes that report them in replies only
        self._conflicting_nodes: dict[int, set[int]] = {}  # nodes that claim the same partition, by partition
        self.refused: dict[int, str] = {}
        self.without_evaluation: dict[int, str] = {}
        self.former: dict[int, int] = {}
        self._partitions = 0  # the number of partitions that most devices report
        self._owners: dict[str, int] = {}  # index of the first client that reported a name
        # The names of a simulation, and those of all clients; None: to be found anew.
        self._names: tuple[Mapping[int, str], dict[int, str]] | None = None
        self.devices = False  # whether nodes are devices, whose claims are checked
        self._by_node: dict[int, Client] = {}
        self._refused: set[int] = set()
        self._retries: dict[int, _Retry] = {}  # by node id
        self._alone_since: float | None = None  # when there was no client that could take part
        self._present: set[int] = set()
        self._version = 0  # of a Grid that says which nodes came and went
        self._strangers: set[int] = set()  # the connected nodes that aren't clients
        self._nodes_of: dict[int, list[int]] = {}  # nodes that have been clients, by index, in that order
        # The connected clients; None, or with indices whose client has changed: to be found anew.
        self._clients: ByIndex[Client] | None = None
        self._changed: set[int] = set()
        self._outdated = False  # whether nodes came or went since the clients were found
        self._highest: int | None = -1  # largest index of a client so far; None: to be found anew
        self._came: set[int] | None = None  # indices whose client changed since ``take_changed``; None: any
        self._asked: dict[str, tuple[int, float]] = {}  # node and deadline, by message id
        self._clock = WallClock()

    @property
    def clients(self) -> ByIndex[Client]:
        """The connected clients, by index; a new sequence when nodes come or go."""
        if self._clients is None or 4 * len(self._changed) > len(self._clients):
            # By index: if a replaced node reconnects, the node that replaced it stays.
            present = {c.index: c for node_id, c in self._by_node.items() if node_id in self._present}
            self._clients = ByIndex(present[index] for index in sorted(present))
            self._came = None
        elif self._changed or self._outdated:
            self._clients = self._clients.replaced({i: self._client_at(i) for i in self._changed})
            if self._came is not None:
                self._came |= self._changed
        self._changed, self._outdated = set(), False
        return self._clients

    def _client_at(self, index: int) -> Client | None:
        """Return the connected client of an index: the node that came last."""
        for node_id in reversed(self._nodes_of.get(index, ())):
            if node_id in self._present:
                return self._by_node[node_id]
        return None

    def take_changed(self) -> set[int] | None:
        """Return the indices whose client may have changed since the last call; None: that of any index."""
        changed, self._came = self._came, set()
        return changed

    @property
    def enrolled(self) -> list[Client]:
        """All nodes that have been clients in this run and weren't refused since."""
        return list(self._by_node.values())

    @property
    def registered(self) -> frozenset[int]:
        """The ids of the registered nodes that may take part."""
        return frozenset(self.record.nodes) if self._addressed is None else self._addressed

    def refresh(self, grid: Grid, config: ConfigRecord) -> ByIndex[Client]:
        """Look up the connected nodes, ask new nodes to describe themselves, and return the clients.

        Raises
        ------
        RunError
            If no client can take part: no node connected within the timeout, or every description is invalid; or if
            fewer nodes than the required number are connected by then, or in a simulation that has no more.
        """
        starting = not self._by_node
        grid = addressed(grid, self.participation, self._addressed)
        self.devices = engine_of(grid) == DEPLOYMENT
        if starting:
            self._wait_for_first(grid)
        self._see(grid)
        if not starting and len(self._present) < self.min_nodes:
            self._wait_for_more(grid)
        if self.clients:  # nobody waits for a device that has failed to describe itself before
            self._ask_and_pull(grid, self._unknown() & self._retries.keys(), config)
        while not self.should_stop() and (
            new := self._unknown() - (self._retries.keys() if self.clients else set())
        ):
            self._describe(grid, sorted(new), config)
            self._refused |= new.difference(self._by_node)
            expected = _partitions_by_most(client.description for client in self.clients)
            # A simulation registers its nodes while the ServerApp is already running.
            if starting and expected > len(self._present) and not self.devices:
                wait_for_nodes(grid, expected, self.timeout, self.should_stop)
            self._see(grid)
        if not self.clients and (self._retries or not starting) and self._waited_for_anyone(grid):
            return self.refresh(grid, config)
        if not self.clients and not self.should_stop():
            raise RunError("no client can take part; the log names the reason for each")
        self._alone_since = None
        return self.clients

    def _wait_for_more(self, grid: Grid) -> None:
        """Wait for ``min_nodes`` nodes in a run whose clients have left."""
        log.warning(
            "%d clients are connected, the run waits for %d (min_available_nodes) for up to %g s",
            len(self._present),
            self.min_nodes,
            self.timeout,
        )
        wait_for_nodes(grid, self.min_nodes, self.timeout, self.should_stop)
        self._see(grid)

    def _wait_for_first(self, grid: Grid) -> None:
        """Wait for ``min_clients`` nodes, unless the Grid has all its nodes from the start, and these are fewer."""
        may_come = engine_of(grid) in (DEPLOYMENT, RAY, MEMORY)
        if not may_come and (number := len(list(grid.get_node_ids()))) < self.min_clients:
            raise RunError(
                f"{self.min_clients} clients are needed (min_available_nodes, min_train_nodes, min_evaluate_nodes), "
                f"and the simulation has {number}"
            )
        wait_for_nodes(grid, self.min_clients, self.timeout, self.should_stop)

    def _waited_for_anyone(self, grid: Grid) -> bool:
        """Wait until any node is connected that may take part, or is asked again; return False if none comes."""

        def nobody() -> bool:
            self._see(grid)
            return not self._present - self._refused

        if not self.should_stop():
            now = self._clock.now()
            if self._alone_since is None:
                self._alone_since = now
            left = max(0.0, self._alone_since + self.timeout - now)
            why = "can take part yet" if self._present else "is connected"
            log.warning("no client %s, the run waits for one for up to %g s", why, left)
            wait_while(nobody, left, self.should_stop)
        return bool(self._present - self._refused) and not self.should_stop()

    def poll(self, grid: Grid, config: ConfigRecord) -> ByIndex[Client]:
        """Do as ``refresh``, but don't wait: a new node becomes a client at the first call after its reply."""
        grid = addressed(grid, self.participation, self._addressed)
        if not self._see(grid) and not self._asked:
            return self.clients
        self._ask_and_pull(grid, self._unknown(), config)
        return self.clients

    def _unknown(self) -> set[int]:
        """Return the connected nodes that are neither clients nor refused, and that haven't been asked."""
        return self._strangers - self._refused - {node_id for node_id, _ in self._asked.values()}

    def _ask_and_pull(self, grid: Grid, node_ids: Collection[int], config: ConfigRecord) -> None:
        """Ask nodes to describe themselves, and take in those whose replies have come, without waiting for any."""
        now = self._clock.now()
        if node_ids:
            self._ask(grid, sorted(node_ids), config, now + self.timeout)
        replies = self._pull_asked(grid)
        if done := sorted([*replies, *self._pop_late(now)]):
            self._take(done, replies)
            self._refused |= set(done).difference(self._by_node)

    def _pop_late(self, now: float) -> list[int]:
        """Return the nodes whose description isn't awaited any more, and forget the requests."""
        late = {message_id: node_id for message_id, (node_id, due) in self._asked.items() if due <= now}
        self._asked = {name: asked for name, asked in self._asked.items() if name not in late}
        return list(late.values())

    def _ask(self, grid: Grid, node_ids: Sequence[int], config: ConfigRecord, due: float) -> None:
        """Ask nodes to describe themselves, without waiting for replies; a simulation's app may have no handler."""
        if not self._asks(grid):
            self._place_unasked(grid, node_ids)
            return
        requests = [self._request(node_id, config) for node_id in node_ids]
        pushed = set(filter(None, grid.push_messages(requests)))
        sent = {each.metadata.message_id: (each.metadata.dst_node_id, due) for each in requests}
        self._asked |= {name: sent[name] for name in sent if name in pushed}

    def _pull_asked(self, grid: Grid) -> dict[int, Message]:
        """Return the replies that have come of nodes that were asked, by node id."""
        replies = {}
        for reply in grid.pull_messages(list(self._asked)) if self._asked else ():
            if (asked := self._asked.pop(reply.metadata.reply_to_message_id, None)) is not None:
                replies[asked[0]] = reply
        return replies

    def _see(self, grid: Grid) -> bool:
        """Look up the connected nodes; return True if they have changed, or some are to be asked again."""
        came, gone = self._came_and_gone(grid)
        now = self._clock.now()
        due = {
            node_id for node_id in self._refused & self._retries.keys() if self._retries[node_id].due <= now
        }
        self._refused -= due
        if changed := bool(came or gone):
            self._note_connections(came, gone)
            self._refused &= self._present  # a refused node that reconnects is asked once more
            for partition, conflicting_nodes in list(self._conflicting_nodes.items()):
                if len(conflicting_nodes & self._present) < 2:
                    del self._conflicting_nodes[partition]
                    self._refused -= conflicting_nodes  # the one that is left is asked once more
            if self.devices:
                self._refuse_conflicting_nodes([])
        return changed or bool(due)

    def _came_and_gone(self, grid: Grid) -> tuple[set[int], set[int]]:
        """Return the nodes that came, and those that went, since the last look."""
        changes = grid.node_changes(self._version) if isinstance(grid, ChangingGrid) else None
        if changes is not None:
            self._version = changes.version
            return set(changes.came) - self._present, self._present & set(changes.gone)
        if (present := set(grid.get_node_ids())) == self._present:
            return set(), set()
        return present - self._present, self._present - present

    def _note_connections(self, came: set[int], gone: set[int]) -> None:
        """Note that nodes came and went."""
        self._present -= gone
        self._present |= came
        self._strangers -= gone
        self._strangers |= came.difference(self._by_node)
        self._changed |= {self._by_node[node_id].index for node_id in (came | gone) & self._by_node.keys()}
        self._outdated = True

    def _describe(self, grid: Grid, node_ids: list[int], config: ConfigRecord) -> None:
        if isinstance(grid, DescribingGrid):
            reported = grid.descriptions(node_ids, config)
            self._place([self._described(node_id, metrics, "") for node_id, metrics in reported.items()])
            node_ids = [node_id for node_id in node_ids if node_id not in reported]
        if node_ids and not self._asks(grid):
            self._place_unasked(grid, node_ids)
        elif node_ids:
            self._ask_and_take(grid, node_ids, config)

    def _asks(self, grid: Grid) -> bool:
        """Return True if nodes are asked to describe themselves."""
        if not self._describes():
            return handles(grid, messages.DESCRIBE)
        return self.devices or not nobody_handles(grid, messages.DESCRIBE)

    def _ask_and_take(self, grid: Grid, node_ids: list[int], config: ConfigRecord) -> None:
        """Ask nodes to describe themselves, and make clients of them."""
        # In a simulation all nodes run the same app: if the first has no handler, the others aren't asked, because
        # each of them would log a traceback.
        asked = node_ids if self.devices or self._by_node else node_ids[:1]
        replies = self._exchange(grid, asked, config)
        if len(asked) < len(node_ids) and not any(map(_has_no_handler, replies.values())):
            replies |= self._exchange(grid, node_ids[1:], config)
            asked = node_ids
        if not self.should_stop():
            self._take(asked, replies, set(node_ids) - set(asked))

    def _exchange(self, grid: Grid, node_ids: Sequence[int], config: ConfigRecord) -> dict[int, Message]:
        """Ask nodes to describe themselves; return the replies, by node id."""
        requests = [self._request(node_id, config) for node_id in node_ids]
        return exchange(grid, requests, self.timeout, self.should_stop)

    def _request(self, node_id: int, config: ConfigRecord) -> Message:
        keys = messages.ARRAYS, self._config_key
        return messages.request(messages.DESCRIBE, node_id, config, ttl=self.timeout, keys=keys)

    def _take(
        self, node_ids: Iterable[int], replies: Mapping[int, Message], unasked: Collection[int] = ()
    ) -> None:
        """Make clients of the nodes with a valid description, or that can't give one; log why others take no part.

        Parameters
        ----------
        node_ids, unasked : collection of int
            The nodes that were asked for a description, and those that weren't.
        replies : mapping of int to Message
            The replies, by node id.
        """
        silent: dict[int, str] = {}  # reason, by node id, why a node sent no description
        described: list[_Described] = []
        for node_id in node_ids:
            reply = replies.get(node_id)
            if reply is None:
                self._refuse(node_id, "no answer", passes=True)
            elif not reply.has_error():
                try:
                    described.append(
                        self._described(node_id, messages.metrics_of(reply), messages.name_of(reply))
                    )
                except ValueError as error:
                    self._refuse(node_id, str(error))
            elif reply.error.code not in APP_FAILED:
                self._refuse(node_id, messages.reason_of(reply), passes=True)
            else:
                silent[node_id] = NO_HANDLER if _has_no_handler(reply) else messages.reason_of(reply)
                if FINDS_NO_ARRAYS in silent[node_id]:
                    self.without_evaluation[node_id] = silent[node_id].rstrip(".")
        self._place(described)
        self._place_silent(silent | dict.fromkeys(unasked, NOT_ASKED))

    def _described(self, node_id: int, metrics: Description, name: str) -> _Described:
        num_examples = messages.weight_of(metrics, self._weight_key)
        return _Described(self._partition_of(metrics), node_id, num_examples, metrics, name)

    def _place_unasked(self, grid: Grid, node_ids: Sequence[int]) -> None:
        """Make clients of nodes that aren't asked: nothing needs their descriptions, or their app has no handler."""
        if mod := mod_without_evaluation(grid):
            self.without_evaluation |= dict.fromkeys(node_ids, f"{mod} expects arrays in every message")
        lacks = not self.devices and nobody_handles(grid, messages.DESCRIBE)
        self._place_silent(dict.fromkeys(node_ids, NO_HANDLER if lacks else NOT_ASKED))

    def _place_silent(self, reasons: Mapping[int, str]) -> None:
        """Make clients of nodes without a description: their indices follow the others', by node id."""
        if not reasons:
            return
        expected = {*reasons.values()} <= ({NOT_ASKED} if self.devices else {NO_HANDLER, NOT_ASKED})
        log.log(
            logging.INFO if expected else logging.WARNING,
            "%s: no answer to query.describe (%s): ordered by node id, which is random, and weighed by their replies",
            f"{len(reasons)} clients" if len(reasons) > 1 else f"node {next(iter(reasons))}",
            next(iter(reasons.values())),
        )
        for node_id in sorted(reasons):
            known = self.record.nodes.get(node_id)
            index = self._place_of(node_id, None if known is None else known.partition)
            name = self._name(index, node_id, "")
            self._add(Client(node_id, index, self._told.get(node_id), MetricRecord(), name))

    def _place_of(self, node_id: int, partition: int | None) -> int:
        if partition is not None:
            return partition
        if node_id not in self._places:
            place = self._places[node_id] = self._free_index()
            self._highest = max(place, self._highest_index())
        return self._places[node_id]

    def _add(self, client: Client) -> None:
        """Make a node a client, whose index stays."""
        if client.node_id not in self._by_node:
            self._nodes_of.setdefault(client.index, []).append(client.node_id)
        self._by_node[client.node_id] = client
        self._names = None
        self._strangers.discard(client.node_id)
        self._changed.add(client.index)
        self._highest = max(client.index, self._highest_index())
        self.refused.pop(client.node_id, None)
        self._retries.pop(client.node_id, None)

    def _place(self, described: list[_Described]) -> None:
        """Make clients of nodes with a description, each at the index of its partition."""
        if self.devices:
            described = self._within_bounds(described)
            conflicting_nodes = self._refuse_conflicting_nodes(described)
            described = [entry for entry in described if entry.node_id not in conflicting_nodes]
        taken: dict[int, int] = {}  # node by index, of those that become clients here
        # Nodes without a partition id come last, so that they don't take the index of a partition.
        order = sorted(
            described, key=lambda each: (each.partition is None, each.partition or 0, each.node_id)
        )
        for partition, node_id, num_examples, metrics, name in order:
            index = self._place_of(node_id, partition)
            known = self._client_at(index)
            if (other := taken.get(index, ABSENT if known is None else known.node_id)) != ABSENT:
                self._refuse_taken(node_id, index, other)
                continue
            taken[index] = node_id
            size = self._told.get(node_id) if num_examples is None else num_examples
            shown = self._name(index, node_id, name)
            client = Client(node_id, index, size, metrics, shown, described=num_examples is not None)
            self._add(client)
            if client.name and self.devices:
                log.info("client %s takes part", client.display_name, extra=client.fields)

    def _refuse_taken(self, node_id: int, index: int, other: int) -> None:
        """Refuse a node whose index another node has."""
        hint = ": start the run with registered_nodes, which keeps a place for it" if self.devices else ""
        self._refuse(node_id, f"client {index} is node {other} already{hint}")
        self._conflicting_nodes.setdefault(index, {other}).add(node_id)

    def _refuse_conflicting_nodes(self, described: Sequence[_Described]) -> set[int]:
        """Refuse connected nodes that claim the same partition, of which the record says nothing; return the nodes.

        ``described``: nodes that aren't clients yet.
        """
        conflicts = self._conflicts(described)
        self._conflicting_nodes |= conflicts
        refused = {node_id for nodes in conflicts.values() for node_id in nodes} - self._refused
        for partition, nodes in conflicts.items():
            for node_id in sorted(nodes & refused):
                others = " and ".join(map(self.record.shown, sorted(nodes - {node_id})))
                self._refuse(
                    node_id,
                    f"{others} also says partition-id = {partition}, and nothing tells whose it is: end the "
                    "SuperNode that is wrong, or start the run with registered_nodes",
                )
        for node_id in refused & self._by_node.keys():
            index = self.former[node_id] = self._by_node.pop(node_id).index
            self._nodes_of[index].remove(node_id)
            self._strangers |= {node_id} & self._present
            self._clients = self._highest = None
        self._refused |= refused
        return refused

    def _conflicts(self, described: Sequence[_Described]) -> dict[int, set[int]]:
        """Return the partitions that several connected nodes claim and the record gives to none of them."""
        return {
            partition: nodes
            for partition, nodes in self._claims(described).items()
            if len(nodes) > 1 and not any(self.record.settles(node_id, partition) for node_id in nodes)
        }

    def _claims(self, described: Sequence[_Described]) -> dict[int, set[int]]:
        """Return the connected nodes that claim each partition: clients, nodes in conflict, and described ones."""
        claims = [(client.index, node_id) for node_id, client in self._by_node.items()]
        for partition, nodes in self._conflicting_nodes.items():
            claims += [(partition, node_id) for node_id in nodes]
        # The index of a node that reports no partition is no claim.
        claims = [(partition, node_id) for partition, node_id in claims if node_id not in self._places]
        claims += [(entry.partition, entry.node_id) for entry in described if entry.partition is not None]
        by_partition: defaultdict[int, set[int]] = defaultdict(set)
        for partition, node_id in claims:
            by_partition[partition] |= {node_id} & self._present
        return by_partition

    def _name(self, index: int, node_id: int, claim: str) -> str:
        """Return the name to display: that of the record, or the one it reports, unless it is another client's.

        In a simulation it is the name that the simulation knows.
        """
        if not self.devices and (known := self.names_of_simulation().get(index)):
            return known
        if (node := self.record.nodes.get(node_id)) is not None:
            self._owners[node.name] = index
            return node.name
        if self.record.nodes and not self.record.owns(node_id, claim):
            log.warning(
                "node %d claims the name %s, which registered_nodes assigns to another node: its id is shown",
                node_id,
                claim,
            )
            return ""
        if claim and (owner := self._owners.setdefault(claim, index)) != index:
            log.warning(
                "node %d says that it is %s, as client %d did: its id is shown", node_id, claim, owner
            )
            return ""
        return claim

    @property
    def names(self) -> dict[int, str]:
        """The names of the clients, by client index; a device that changed its name has the last one."""
        known = _NO_NAMES if self.devices else self.names_of_simulation()
        if self._names is None or self._names[0] is not known:  # it is asked for at every aggregation
            named = {index: name for name, index in list(self._owners.items())}
            self._names = known, {**named, **known}
        return self._names[1]

    def _refuse(self, node_id: int, reason: str, *, passes: bool = False) -> None:
        """Note and log why a node can't take part; a device is asked again where the reason may pass."""
        self.refused[node_id] = reason
        former = self._retries.pop(node_id, None)
        if passes and self.devices:
            pause = PAUSE if former is None else min(2 * former.pause, LONGEST_PAUSE)
            self._retries[node_id] = _Retry(self._clock.now() + pause, pause)
            reason += f"; it is asked again in {pause:g} s"
        log.warning(
            "%s can't take part: %s", self.record.shown(node_id), reason, extra={"node": str(node_id)}
        )

    def named(self, node_ids: Collection[int]) -> str:
        """Return the names of these nodes' clients for the log: the first ten, and the number of the others."""
        known = [self._by_node[node_id] for node_id in node_ids if node_id in self._by_node]
        names = list(map(str, sorted(known, key=lambda client: client.index)))
        names += [self.record.shown(node_id) for node_id in node_ids if node_id not in self._by_node]
        return ", ".join(names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "")

    def _partition_of(self, metrics: Description) -> int | None:
        """Return the partition that a description claims, None if the node may not claim one.

        Raises
        ------
        ValueError
            In a simulation, if arrays by client would get far longer than there are clients.
        """
        if self.devices and messages.NUM_PARTITIONS not in metrics:
            return None
        partition = messages.whole_number(metrics.get(messages.PARTITION_ID))
        most = max(MOST_PARTITIONS, len(self._present))
        if not self.devices and partition is not None and partition >= most:
            raise ValueError(f"partition-id = {partition}: must be 0 to {most - 1}")
        return partition

    def _within_bounds(self, described: Sequence[_Described]) -> list[_Described]:
        """Return the nodes whose partition is below the number that most nodes report; refuse the others."""
        descriptions = [client.description for client in self.clients] + [each.metrics for each in described]
        most = self._partitions = min(_partitions_by_most(descriptions), MOST_PARTITIONS)
        within = []
        for entry in described:
            partition, node_id = entry.partition, entry.node_id
            try:
                self.record.check(node_id, partition)
            except ValueError as error:
                self._refuse(node_id, str(error))
                continue
            if partition is None or partition < most or self.record.settles(node_id, partition):
                within.append(entry)
            else:
                self._refuse(node_id, f"partition-id = {partition}: must be 0 to {most - 1}")
        return within

    def _free_index(self) -> int:
        return max([self._highest_index(), *self.record.partitions, self._partitions - 1]) + 1

    def _highest_index(self) -> int:
        """Return the largest index that a node has, or had before it went; -1: there is none."""
        if self._highest is None:
            indices = [*map(INDEX, self._by_node.values()), *self._places.values()]
            self._highest = max(indices, default=-1)
        return self._highest

    def keep_sizes(self, clients: Iterable[Client]) -> None:
        """Keep the sizes that clients without a description report in their last replies."""
        for client in clients:
            if client.num_examples is not None and not client.described and client.node_id in self._by_node:
                self._told[client.node_id], self._by_node[client.node_id] = client.num_examples, client
        self._clients = None

    def state(self) -> dict[str, Any]:
        """Return index and size of each node whose description doesn't hold them, and the owner of each name."""
        named = {"device-names": list(self._owners.items())} if self._owners else {}
        reported = {"told-sizes": list(self._told.items())} if self._told else {}
        return {"node-places": list(self._places.items()), **reported, **named}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the indices, sizes and names of an earlier run's nodes."""
        self._places = {int(node_id): int(index) for node_id, index in state["node-places"]}
        self._highest = None
        self._told = {int(node_id): size for node_id, size in state.get("told-sizes", ())}
        self._owners = {str(name): int(index) for name, index in state.get("device-names", ())}
        self._names = None


def sized(client: Client, num_examples: float | None) -> Client:
    """Return the client with a number of examples, unless its own is known."""
    return client if client.num_examples is not None else replace(client, num_examples=num_examples)


def sized_by(client: Client, metrics: MetricRecord, key: str) -> Client:
    """Return the client with the number of examples from a reply's metrics, unless its description reports one."""
    if client.described:
        return client
    with suppress(ValueError):  # strategies/updates/pipeline.py refuses a reply with an invalid size
        if (said := messages.weight_of(metrics, key, or_zero=True)) is not None:
            return replace(client, num_examples=said)
    return client


def sized_by_replies(clients: Sequence[Client], replies: Mapping[int, Message], key: str) -> list[Client]:
    """Apply ``sized_by`` to several clients; ``replies`` are by node id."""
    metrics = {
        node_id: messages.metrics_of(reply) for node_id, reply in replies.items() if reply.has_content()
    }
    return [sized_by(client, metrics.get(client.node_id, MetricRecord()), key) for client in clients]


def by_reason(clients: Iterable[Client], reasons: Mapping[int, str]) -> dict[str, list[Client]]:
    """Return clients by the reason why their work doesn't count; ``reasons``: by client index."""
    found: dict[str, list[Client]] = {reason: [] for reason in reasons.values()}
    for client in clients if reasons else ():
        if client.index in reasons:
            found[reasons[client.index]].append(client)
    return found


def index_by_node(clients: Iterable[Client]) -> dict[int, int]:
    """Return the indices of clients, by node id."""
    return {client.node_id: client.index for client in clients}


def display_names(clients: Iterable[Client]) -> str:
    """Return the display names of clients for the log."""
    return ", ".join(client.display_name for client in clients)


def clients_of_replies(replies: Sequence[Message]) -> list[Client]:
    """Return a client for each reply, in this order, where a run knows none: of a loop with requests of its own."""
    nodes = [reply.metadata.src_node_id for reply in replies]
    if len(set(nodes)) < len(nodes):  # as in tests, whose replies come from nowhere
        nodes = list(range(len(nodes)))
    return [Client(node, place, None, MetricRecord()) for place, node in enumerate(nodes)]


def _partitions_by_most(descriptions: Iterable[Description]) -> int:
    """Return the number of partitions that most nodes report, the smaller one of two; 0 if none does."""
    said = Counter(
        number
        for description in descriptions
        if (number := messages.whole_number(description.get(messages.NUM_PARTITIONS))) is not None
    )
    return min(said, key=lambda number: (-said[number], number), default=0)


def _has_no_handler(reply: Message) -> bool:
    return reply.has_error() and "No query function registered" in (reply.error.reason or "")
