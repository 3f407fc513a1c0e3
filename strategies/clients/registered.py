"""The record of registered nodes: which node of the SuperLink is which device, which partition it holds, its tags.

A SuperLink that authenticates SuperNodes gives every registered key one node id, which no other key can take. The
record says whose that is. It comes from whoever registered the keys, never from a device. By it a run addresses
devices: with ``participation = "tag:hospital"`` or ``"name:oslo,bern"`` its clients are these devices alone.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

# Partitions of common data that devices can hold: arrays by client are as long as the largest index.
MOST_PARTITIONS = 100_000
_LARGEST_NODE = 2**64 - 1

TAG = r"[a-z0-9][a-z0-9_.-]*"
_ENTRY = rf"[^\s:,]+:\d{{1,20}}(:\d{{1,5}})?(\+{TAG})*"
PATTERN = rf"({_ENTRY}(\s*,\s*{_ENTRY})*)?"
ALLOWED = (
    "NAME:NODE-ID:PARTITION+TAG+… of each device, such as 'oslo:4711:0+gpu, bern:4712:1'; without a partition for a "
    "device with data of its own"
)
BY_TAG, BY_NAME = "tag", "name"  # how participation addresses devices


@dataclass(frozen=True)
class RegisteredNode:
    """A registered node.

    Attributes
    ----------
    name : str
        The operator's name of the device.
    node_id : int
        The SuperLink's id of the node.
    partition : int, optional
        The partition that the device holds; None: it has data of its own.
    tags : tuple of str
        The operator's tags of the device.
    """

    name: str
    node_id: int
    partition: int | None = None
    tags: tuple[str, ...] = ()

    @classmethod
    def read(cls, entry: str) -> "RegisteredNode":
        """Read a node as the record names it; raise ValueError if its id is none."""
        name, _, rest = entry.partition(":")
        numbers, *tags = rest.split("+")
        number, *place = numbers.split(":")
        if not 0 < int(number) <= _LARGEST_NODE:
            raise ValueError(f"registered_nodes = {entry!r}: a node id must be 1 to {_LARGEST_NODE}")
        return cls(name, int(number), int(place[0]) if place else None, tuple(tags))

    @property
    def claims(self) -> list[tuple[str, str | int]]:
        """What no other node may have: its name, its id, and its partition if it has one."""
        own: list[tuple[str, str | int]] = [("name", self.name), ("node", self.node_id)]
        return own if self.partition is None else [*own, ("partition", self.partition)]

    def __str__(self) -> str:
        place = "" if self.partition is None else f":{self.partition}"
        return "+".join([f"{self.name}:{self.node_id}{place}", *self.tags])


class NodeRecord:
    """The registered nodes of a run.

    Parameters
    ----------
    text : str
        The nodes, such as ``oslo:4711:0, bern:4712:1``; "": none.

    Attributes
    ----------
    nodes : dict of int to RegisteredNode
        The nodes by id.

    Raises
    ------
    ValueError
        If the text isn't of that form, or names a device, a node or a partition twice.
    """

    def __init__(self, text: str = "") -> None:
        if not re.fullmatch(PATTERN, text):
            raise ValueError(f"registered_nodes = {text!r}: must be {ALLOWED}")
        self.nodes: dict[int, RegisteredNode] = {}
        known: dict[tuple[str, str | int], str] = {}
        for entry in filter(None, map(str.strip, text.split(","))):
            node = RegisteredNode.read(entry)
            for claim in node.claims:
                if claim in known:
                    both = f"{known[claim]!r} and {entry!r}"
                    raise ValueError(f"registered_nodes: {both}: names, node ids and partitions must differ")
                known[claim] = entry
            self.nodes[node.node_id] = node
        self._owners = {node.partition: node for node in self.nodes.values() if node.partition is not None}
        self._names = {node.name: node.node_id for node in self.nodes.values()}

    @property
    def partitions(self) -> Iterable[int]:
        """The partitions of registered nodes."""
        return self._owners.keys()

    def shown(self, node_id: int) -> str:
        """Return a node for a line of the log, with its device's name if that is registered."""
        known = self.nodes.get(node_id)
        return f"node {node_id}" + ("" if known is None else f" ({known.name})")

    def check(self, node_id: int, partition: int | None) -> None:
        """Raise ValueError if a node claims a partition that the record denies it; None: it claims none."""
        if partition is None or self.settles(node_id, partition):
            return
        if (own := self.nodes.get(node_id)) is not None:
            has = "has data of its own" if own.partition is None else f"holds partition {own.partition}"
            raise ValueError(
                f"it says partition-id = {partition}, and {own.name} {has} by registered_nodes: give its SuperNode "
                "the partition-id of the record, or mend the record"
            )
        if (owner := self._owners.get(partition)) is not None:
            raise ValueError(
                f"it says partition-id = {partition}, which is that of {owner.name}, node {owner.node_id}, by "
                "registered_nodes: give its SuperNode a partition-id of its own, or put the node on the record"
            )

    def settles(self, node_id: int, partition: int) -> bool:
        """Return True if the record says that a node holds a partition."""
        node = self.nodes.get(node_id)
        return node is not None and node.partition == partition

    def owns(self, node_id: int, name: str) -> bool:
        """Return True unless the record says that another node has this name."""
        return self._names.get(name, node_id) == node_id

    def addressed(self, participation: str) -> frozenset[int] | None:
        """Return the ids of the nodes that a participation scheme addresses; None if it addresses no devices.

        Of several tags a node has at least one.

        Raises
        ------
        ValueError
            If no registered device has one of the tags, or one of the names.
        """
        how, _, text = participation.partition(":")
        if not addresses(participation):
            return None
        has = {i: node.tags if how == BY_TAG else (node.name,) for i, node in self.nodes.items()}
        words, known = text.split(","), set[str]().union(*has.values())
        for word in words:
            if word not in known:
                allowed = ", ".join(sorted(known)) or f"none, as no device has a {how}"
                raise ValueError(
                    f"participation = {participation!r}: no registered device has the {how} {word!r}; allowed are "
                    f"{allowed}"
                )
        return frozenset(node_id for node_id, own in has.items() if set(own) & set(words))


def addresses(participation: str) -> bool:
    """Return True if a participation scheme addresses devices by tag or name."""
    how, colon, _ = participation.partition(":")
    return bool(colon) and how in (BY_TAG, BY_NAME)


def addressed_nodes(participation: str, record: NodeRecord, min_clients: int) -> frozenset[int] | None:
    """Return the ids of the nodes that may take part in a run; None: all may.

    Raises
    ------
    ValueError
        If a tag or a name isn't on the record, or fewer devices are addressed than the run waits for.
    """
    nodes = record.addressed(participation)
    if nodes is not None and len(nodes) < min_clients:
        raise ValueError(
            f"min_clients = {min_clients}: participation = {participation!r} addresses {len(nodes)} registered "
            f"devices; allowed is {len(nodes)} at most"
        )
    return nodes


class Registry(NamedTuple):
    """What a run knows of nodes before they describe themselves, and which of them may become clients.

    Attributes
    ----------
    record : NodeRecord
        The registered nodes.
    participation : str
        The participation scheme, which may address registered nodes: then no other one becomes a client.
    names_of_simulation : callable
        Returns the names of a simulation's clients, by index.
    """

    record: NodeRecord
    participation: str = "full"
    names_of_simulation: Callable[[], Mapping[int, str]] = dict


OPEN_REGISTRY = Registry(NodeRecord())  # all nodes may, and nothing is known of them
