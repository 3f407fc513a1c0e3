"""Which node of the SuperLink is which device: ``nodes.json``, written when a key is registered.

Flower's command line lists nodes by number alone. A record is of a key, not of a device: a device that got a new key
has an earlier node, too, and that one stays on record. Tags are of a device, whatever keys it had.
"""

import hashlib
import json
import os
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from fedapp.deploy.plan import DeployError, Deployment, is_operators
from strategies.clients.registered import TAG

FILE = "nodes.json"


@dataclass(frozen=True)
class NodeRecord:
    """A registered key.

    Attributes
    ----------
    device : str
        Name of the device.
    node_id : str
        The SuperLink's number for it; decimal, for it can be above 2^63.
    key : str
        Fingerprint of the public key.
    registered : str
        When the key was registered, UTC.
    unregistered : str
        When the key was unregistered, UTC; empty before.
    """

    device: str
    node_id: str
    key: str
    registered: str
    unregistered: str = ""


@dataclass
class NodeRecords:
    """All nodes that a deployment's folder knows; every change is written at once."""

    path: Path
    nodes: list[NodeRecord] = field(default_factory=list)
    tags: dict[str, list[str]] = field(default_factory=dict)  # by device

    @classmethod
    def read(cls, out: Path) -> "NodeRecords":
        """Read the records in a deployment's folder; a folder without nodes.json has none.

        Raises
        ------
        DeployError
            If the file can't be read.
        """
        path = out / FILE
        try:
            content = json.loads(path.read_text("utf-8")) if path.exists() else {"nodes": []}
            nodes = [NodeRecord(**node) for node in content["nodes"]]
            return cls(path, nodes, {name: list(tags) for name, tags in content.get("tags", {}).items()})
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise DeployError(f"{path}: can't be read ({error})") from None

    def of_key(self, key: str) -> NodeRecord | None:
        """Return the node of a key, if it is on record."""
        return next((node for node in reversed(self.nodes) if node.key == key), None)

    def of_device(self, out: Path, name: str) -> NodeRecord | None:
        """Return the node of a device's present key.

        An operator's folder has no keys of devices; there it is the node of the last key that was registered.

        Raises
        ------
        DeployError
            If the device's public key can't be read.
        """
        if is_operators(out):
            return next((node for node in reversed(self.nodes) if node.device == name), None)
        return self.of_key(fingerprint(out / name / "device.pub"))

    def add(self, node: NodeRecord) -> None:
        """Add a record, in place of an earlier one of the same key."""
        self._write([*(other for other in self.nodes if other.key != node.key), node], self.tags)

    def tag(self, device: str, tags: Sequence[str]) -> None:
        """Give a device these tags, in place of its former ones.

        Raises
        ------
        DeployError
            If one of them isn't a tag, or the file can't be written.
        """
        for tag in tags:
            if not re.fullmatch(TAG, tag):
                raise DeployError(f"tag {tag!r}: must be a-z, 0-9, _, . and -, a letter or a digit first")
        others = {name: its for name, its in self.tags.items() if name != device}
        own = {device: sorted(set(tags))} if tags else {}
        self._write(self.nodes, others | own)

    def _write(self, nodes: list[NodeRecord], tags: dict[str, list[str]]) -> None:
        content = {"nodes": [asdict(node) for node in nodes], **({"tags": tags} if tags else {})}
        text = json.dumps(content, indent=2) + "\n"
        new = self.path.with_suffix(".new")
        try:
            new.write_text(text, "utf-8")
            os.replace(new, self.path)
        except OSError as error:
            raise DeployError(f"{self.path}: can't be written ({error.strerror})") from None
        self.nodes, self.tags = nodes, tags


def registered_nodes(out: Path, deployment: Deployment) -> str:
    """Return the run config's ``registered-nodes``: NAME:NODE[:PARTITION][+TAG…] of each device with a known node.

    Raises
    ------
    DeployError
        If the records can't be read.
    """
    records = NodeRecords.read(out)
    present = {node.device: node for node in records.nodes if not node.unregistered}
    told = []
    for device in deployment.devices:
        if (node := present.get(device.name)) is None:
            continue
        config = device.node_config
        partition = (
            f":{config['partition-id']}" if {"partition-id", "num-partitions"} <= config.keys() else ""
        )
        told.append(
            "+".join([f"{device.name}:{node.node_id}{partition}", *records.tags.get(device.name, [])])
        )
    return ", ".join(told)


def fingerprint(public_key: Path) -> str:
    """Return the fingerprint of a public key's file.

    Raises
    ------
    DeployError
        If the file can't be read.
    """
    try:
        return fingerprint_of(public_key.read_bytes())
    except OSError as error:
        raise DeployError(f"{public_key}: can't be read ({error.strerror})") from None


def fingerprint_of(public_key: bytes) -> str:
    """Return the fingerprint of a public key in OpenSSH's format."""
    words = public_key.split()
    return "SHA256:" + hashlib.sha256(b" ".join(words[:2])).hexdigest()  # a third word is a comment
