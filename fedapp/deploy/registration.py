"""Devices' keys at the SuperLink: made known, replaced, and given up.

Flower 1.41 says "already in use" both of a key that is in use and of one that was unregistered, which it refuses for
ever.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from fedapp.deploy import key_request, keys
from fedapp.deploy.flower import ask
from fedapp.deploy.nodes import NodeRecord, NodeRecords, fingerprint
from fedapp.deploy.plan import DeployError, Deployment

State = Literal["registered", "new key", "already registered", "known", "refused"]
_IN_USE = "Public key already in use"
_NEVER = "its key was unregistered and can never return"


@dataclass(frozen=True)
class Registration:
    """What became of a device's key.

    Attributes
    ----------
    device : str
    state : str
        ``known``: the SuperLink has the key, but its number, and whether it was unregistered, aren't known.
    node_id : str
        Its number at the SuperLink, empty where it isn't known.
    line : str
        The state, and what to do next, as one line.
    """

    device: str
    state: State
    node_id: str
    line: str

    @property
    def refused(self) -> bool:
        """Whether the SuperLink will never let this device in with its key."""
        return self.state == "refused"


def listed_nodes(out: Path) -> dict[str, dict[str, Any]]:
    """Return what the SuperLink says of every node, by its number; those that were unregistered, too."""
    return {node["node-id"]: node for node in ask(out, "supernode", "list")["nodes"]}


def is_gone(said: Mapping[str, Any]) -> bool:
    """Tell from what the SuperLink says of a node whether it was unregistered."""
    return bool(said["status"] == "unregistered")


def register(out: Path, deployment: Deployment, *, new_keys: bool = False) -> Iterator[Registration]:
    """Make the devices' public keys known to the SuperLink, one after the other.

    Parameters
    ----------
    out, deployment
        The deployment, and its folder.
    new_keys : bool
        Give a new key to each device whose key was unregistered, unless the device made its key itself.

    Yields
    ------
    Registration
        What became of each device's key, as soon as it is known and on record.

    Raises
    ------
    DeployError
        If the SuperLink can't be reached, or refuses a key for another reason.
    """
    for device in deployment.devices:
        found = _register_key(out, device.name)
        is_made_here = new_keys and not key_request.has_own_key(out / device.name)
        yield new_key(out, deployment, device.name) if found.refused and is_made_here else found


def new_key(
    out: Path, deployment: Deployment, name: str, request: key_request.KeyRequest | None = None
) -> Registration:
    """Make a new key for a device, and register it; the SuperLink isn't asked to refuse the former key.

    With the ``request`` of a device that made its new key itself, that key is registered.
    """
    if request is None:
        keys.write_device(out / name)
    else:
        key_request.write_public_key(out / name, request)
    made = _register_key(out, name)
    how = "to that device" if request is None else "over the folder of its new keys on that device"
    line = (
        f"{name}: new key, registered as node {made.node_id}; copy {out / name} {how} as "
        f"{deployment.home}/{name} again, and restart fedapp-{name}"
    )
    return Registration(name, "new key", made.node_id, line)


def check_new_key(
    out: Path, deployment: Deployment, name: str, request: key_request.KeyRequest | None
) -> None:
    """Check that a device can get a new key: by a request of its own if its owner made the former one.

    Raises
    ------
    DeployError
        If it can't.
    """
    device = deployment.device(name)
    if request is None:
        if key_request.has_own_key(out / name):
            raise DeployError(f"device {name!r}: made its key itself; {_offer_of_owner(out, name)}")
        return
    if request.read_device(deployment.home) != (name, device.node_config):
        raise DeployError(
            f"the request of {request.device!r}: isn't of device {name!r} with {device.node_config}"
        )
    request.check_unknown(out, deployment)


def retire(out: Path, name: str, node_id: str) -> str:
    """Have the SuperLink refuse a device's key from now on; return the device's number there, "" if it isn't known.

    A key that the SuperLink doesn't know is registered first, so that nobody else can register it afterwards.

    Raises
    ------
    DeployError
        If the SuperLink can't be reached, or it isn't known which node the device is.
    """
    found = _register_key(out, name)
    if found.refused:
        return found.node_id
    if not (number := found.node_id or node_id):
        raise DeployError(
            f"device {name!r}: its node id isn't on record; 'flwr supernode list' shows all, --node-id says which"
        )
    if node_id and node_id != number:
        raise DeployError(f"--node-id = {node_id}: device {name!r} is node {number}")
    key = fingerprint(_public_key(out, name))
    records = NodeRecords.read(out)
    for other in records.nodes:
        if other.node_id == number and other.key != key:
            raise DeployError(f"--node-id = {number}: is on record as a node of device {other.device!r}")
    ask(out, "supernode", "unregister", number)
    records.add(replace(records.of_key(key) or NodeRecord(name, number, key, _now()), unregistered=_now()))
    return number


def _register_key(out: Path, name: str) -> Registration:
    public_key = _public_key(out, name)
    key = fingerprint(public_key)
    records = NodeRecords.read(out)
    try:
        answer = ask(out, "supernode", "register", str(public_key), "--name", name)
    except DeployError as error:
        if _IN_USE not in str(error):
            raise
        return _known_key(records, listed_nodes(out), name, key, out)
    number = str(answer["node-id"])
    records.add(NodeRecord(name, number, key, _now()))
    return Registration(name, "registered", number, f"{name}: registered, as node {number}")


def _known_key(
    records: NodeRecords, listed: Mapping[str, Mapping[str, Any]], name: str, key: str, out: Path
) -> Registration:
    """Return the state of a key that the SuperLink calls "already in use", by our records and its list of nodes."""
    node = records.of_key(key)
    if node is None or node.node_id not in listed:
        others = {other.node_id for other in records.nodes if other.key != key}
        candidates = {number: said for number, said in listed.items() if number not in others}
    else:
        candidates = {node.node_id: listed[node.node_id]}
    number = next(iter(candidates)) if len(candidates) == 1 else ""
    gone = {is_gone(said) for said in candidates.values()}
    if number:
        said = candidates[number]
        records.add(
            NodeRecord(name, number, key, said["created-at"], said["deleted-at"] if is_gone(said) else "")
        )
    if gone == {True}:
        offer = (
            _offer_of_owner(out, name)
            if key_request.has_own_key(out / name)
            else f"'fedapp deploy rekey {out} {name}' makes a new one, 'register --new-keys' for all such devices"
        )
        return Registration(name, "refused", number, f"{name}: REFUSED: {_NEVER}; {offer}")
    if gone == {False}:
        as_node = f", as node {number}" if number else ""
        return Registration(name, "already registered", number, f"{name}: already registered{as_node}")
    return Registration(
        name,
        "known",
        "",
        f"{name}: its key is known to the SuperLink, but not on record here, and some nodes there were unregistered; "
        f"if its SuperNode is refused (exit code 305), 'fedapp deploy rekey {out} {name}' makes a new one",
    )


def _offer_of_owner(out: Path, name: str) -> str:
    return f"a new key is made there ('fedapp deploy request'); 'rekey {out} {name} --request FILE' takes it"


def _public_key(out: Path, name: str) -> Path:
    return out / name / keys.PUBLIC_KEY


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%SZ")  # as Flower writes times
