"""A device's request: the device made its key itself, and asks a deployment to add it with the public half.

``request.json`` has the device as ``deploy add`` takes it, the public key, and a signature over both by the private
key. The signature proves that whoever asks has the private key, so that nobody can have another's key registered.
The operator keeps the file in the device's folder: there it says that the private key is on the device alone.
"""

import base64
import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_ssh_private_key,
    load_ssh_public_key,
)

from fedapp.deploy import keys
from fedapp.deploy.nodes import NodeRecords, fingerprint, fingerprint_of
from fedapp.deploy.plan import HOME, SUPEREXEC, DeployError, Deployment, check_name, device_of, relay_of

FILE = "request.json"
MAX_BYTES = 16384  # of the file, which comes from outside
# What the device makes itself, and the deployment's folder doesn't have.
_OWN_FILES = (
    keys.DEVICE_KEY,
    keys.LOOPBACK_CERTIFICATE,
    "local.key",
    "superexec.secret",
    f"{SUPEREXEC}/superexec.secret",
)
_PURPOSE = b"fedapp deploy request\n"  # a signature that was made for something else is none here


@dataclass(frozen=True)
class KeyRequest:
    """What a device asks for.

    Attributes
    ----------
    device : str
        The device as ``deploy add`` takes it: ``NAME=DATA-PATH``, or ``NAME`` or ``NAME=SOCKET`` of a relay.
    relay : bool
        Whether it is a relay.
    key : str
        Its public key on the curve P-256, in OpenSSH's format without a comment.
    signature : str
        Signature of all this by the private key (ECDSA, SHA-256), in Base64.
    """

    device: str
    relay: bool
    key: str
    signature: str = ""

    def read_device(self, home: str = HOME) -> tuple[str, dict[str, int | str]]:
        """Return the device's name and node config; ``home`` is the deployment's folder on every machine.

        Raises
        ------
        DeployError
            If no device can have them.
        """
        name, node_config = relay_of(self.device, home) if self.relay else device_of(self.device)
        check_name(name)
        return name, node_config

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the public key."""
        return fingerprint_of(self.key.encode())

    @property
    def text(self) -> str:
        """The text of the request's file."""
        return json.dumps(asdict(self), indent=2) + "\n"

    def signed(self, private_key: bytes) -> "KeyRequest":
        """Return the request, signed by a private key in OpenSSH's format."""
        key = load_ssh_private_key(private_key, None)
        assert isinstance(key, ec.EllipticCurvePrivateKey)
        signature = key.sign(self._content(), ec.ECDSA(hashes.SHA256()))
        return replace(self, signature=base64.b64encode(signature).decode())

    def check_signature(self) -> None:
        """Check that the private half of the key has signed the request.

        Raises
        ------
        ValueError
            If it hasn't, or the key is none for a device.
        """
        key = _public_key(self.key)
        try:
            signature = base64.b64decode(self.signature, validate=True)
            key.verify(signature, self._content(), ec.ECDSA(hashes.SHA256()))
        except InvalidSignature:
            raise ValueError("the signature isn't of this content by this key") from None

    def check_unknown(self, out: Path, deployment: Deployment) -> None:
        """Check that no device of a deployment has, or had, this key, nor its negation.

        The points P and -P have the same x-coordinate: whoever has the private half of one has that of the other, and
        Diffie-Hellman with either gives the same secret.

        Raises
        ------
        DeployError
            If one has.
        """
        known = {node.key: node.device for node in NodeRecords.read(out).nodes}
        folders = [out / device.name for device in deployment.devices]
        for folder in (*folders, *out.glob("removed/*")):
            if (folder / keys.PUBLIC_KEY).is_file():
                known.setdefault(fingerprint(folder / keys.PUBLIC_KEY), folder.name)
        for key, what in ((self.key, "the key"), (_negation(self.key), "the negation of the key")):
            device = known.get(fingerprint_of(key.encode()))
            if device is not None:
                raise DeployError(
                    f"the request's key is {what} of {device!r}, now or formerly; each request needs a new key"
                )

    def _content(self) -> bytes:
        content = {name: value for name, value in asdict(self).items() if name != "signature"}
        return _PURPOSE + json.dumps(content, sort_keys=True).encode()


@keys.written_by_owner_alone()
def make_request(device: str, *, relay: bool = False, folder: Path | None = None) -> tuple[Path, KeyRequest]:
    """Make a device's keys, on the device, and its request.

    Parameters
    ----------
    device : str
        The device as ``deploy add`` takes it.
    relay : bool
        Whether it is a relay.
    folder : Path, optional
        Where the keys and the request are written; by default a folder of the device's name.

    Returns
    -------
    tuple of Path and KeyRequest
        The folder, and the request in it.

    Raises
    ------
    DeployError
        If no deployment can have such a device, or the folder has keys or a request, is in a deployment's, or can't
        be written.
    """
    request = KeyRequest(device, relay, "")
    name, _ = request.read_device()
    folder = folder or Path(name)
    for file in (*_OWN_FILES, keys.PUBLIC_KEY, FILE):
        if (folder / file).exists():
            raise DeployError(
                f"{folder / file}: is there already, and no key is replaced; choose another --out"
            )
    if (folder.absolute().parent / "deployment.toml").exists():
        raise DeployError(
            f"{folder}: is in a deployment's folder, where the private key doesn't belong; choose another --out"
        )
    try:
        (folder / SUPEREXEC).mkdir(parents=True, exist_ok=True)
        if not (folder / ".gitignore").exists():
            (folder / ".gitignore").write_text("*\n")  # private keys stay out of repositories
        keys.write_own(folder, folder / SUPEREXEC)
        key = (folder / keys.PUBLIC_KEY).read_text("utf-8").strip()
        request = replace(request, key=key).signed((folder / keys.DEVICE_KEY).read_bytes())
        (folder / FILE).write_text(request.text, "utf-8")
    except OSError as error:
        raise DeployError(f"{error.filename or folder}: can't be written ({error.strerror})") from None
    return folder, request


@keys.written_by_owner_alone()
def write_public_key(folder: Path, request: KeyRequest) -> None:
    """Write a device's request and public key into its folder in the deployment; keys that were made there go."""
    for file in _OWN_FILES:
        (folder / file).unlink(missing_ok=True)
    (folder / keys.PUBLIC_KEY).write_text(request.key + "\n", "utf-8")
    (folder / FILE).write_text(request.text, "utf-8")


def has_own_key(folder: Path) -> bool:
    """Tell from a device's folder in the deployment whether the device made its key itself."""
    return (folder / FILE).is_file()


def read_request(file: Path) -> KeyRequest:
    """Read a request, and check its signature.

    Raises
    ------
    DeployError
        If the file can't be read, isn't a request, or isn't signed by the key that is in it.
    """
    try:
        with file.open("rb") as opened:
            text = opened.read(MAX_BYTES + 1)
        if len(text) > MAX_BYTES:
            raise ValueError(f"it has more than {MAX_BYTES} bytes")
        request = KeyRequest(**_fields(text))
        request.check_signature()
    except OSError as error:
        raise DeployError(f"{file}: can't be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        raise DeployError(f"{file}: is no request of a device: {error}") from None
    return request


def _fields(text: bytes) -> dict[str, Any]:
    content = json.loads(text)
    types = {"device": str, "relay": bool, "key": str, "signature": str}
    if not isinstance(content, dict) or {name: type(value) for name, value in content.items()} != types:
        raise ValueError(f"it must have {', '.join(types)}, and nothing else")
    return content


def _public_key(text: str) -> ec.EllipticCurvePublicKey:
    try:
        key = load_ssh_public_key(text.encode())
    except (ValueError, UnsupportedAlgorithm):
        raise ValueError("the key can't be read as a public key in OpenSSH's format") from None
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise ValueError("the key isn't of the curve P-256, as Flower's SuperNodes need it")
    if _text_of(key) != text:  # else a key could be known under another text
        raise ValueError("the key isn't written as OpenSSH writes it, without a comment")
    return key


def _negation(text: str) -> str:
    """Return the public key -P of a public key P."""
    key = _public_key(text)
    point = key.public_bytes(Encoding.X962, PublicFormat.CompressedPoint)
    # The first byte of a compressed point is 2 or 3, the sign of y.
    return _text_of(
        ec.EllipticCurvePublicKey.from_encoded_point(key.curve, bytes([point[0] ^ 1]) + point[1:])
    )


def _text_of(key: ec.EllipticCurvePublicKey) -> str:
    return key.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()
