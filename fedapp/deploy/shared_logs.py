"""The last lines of devices' logs, of the devices whose sites share them.

A SuperNode sends its own lines and those of the app on its device to the SuperLink, below ``/v1/fleet`` as all that
it sends: signed with its key, at most once in ``PERIOD`` seconds and only if there are new ones. The SuperLink keeps
the last lines of each registered node in memory, for who may start runs.
"""

import base64
import json
import logging
import ssl
import threading
import time
import urllib.request
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_pem_public_key,
    load_ssh_private_key,
)

from fedapp.client.device_log import LINES, tail
from strategies.flower import messages

SEND, TELL = "/v1/fleet/fedapp-log", "/v1/control/fedapp-log"
PERIOD = 30.0  # seconds between two transfers of a device
MOST_BYTES = 1 << 20  # of a transfer
TIMEOUT = 20.0  # seconds
TOLERANCE = 300.0  # seconds by which the time of a transfer may be off
SUPERNODE, APP = "supernode", "app"  # whose lines
KEY, TIME, SIGNATURE = "x-fedapp-key", "x-fedapp-time", "x-fedapp-signature"  # headers


class SharedLogError(ValueError):
    """Lines aren't taken; the message is one line."""


class Lines(logging.Handler):
    """The last lines that this process has logged, with their times (UTC)."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s", "%Y-%m-%d %H:%M:%SZ"))
        assert self.formatter is not None
        self.formatter.converter = time.gmtime
        self.last: deque[str] = deque(maxlen=LINES)

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the lines of a record; Flower's empty ones are for its terminal."""
        if record.getMessage().strip():
            self.last.extend(self.format(record).splitlines())


def share(address: str, authority: str, key: Path, app_log: Path | None) -> None:
    """Send this process's log to the SuperLink for as long as the process lives, in a thread.

    Parameters
    ----------
    address : str
        The SuperLink's, HOST:PORT.
    authority : str
        The file of the certificate that it is checked by.
    key : Path
        The device's private key.
    app_log : Path, optional
        The log of the app on this device.
    """
    lines = Lines()
    logging.getLogger("flwr").addHandler(lines)
    trust = ssl.create_default_context(cafile=authority)

    def send() -> None:
        before: dict[str, list[str]] = {}
        while True:
            now = {SUPERNODE: list(lines.last), APP: [] if app_log is None else tail(app_log)}
            if now != before and _send(f"https://{address}{SEND}", trust, key, now):
                before = now
            time.sleep(PERIOD)

    threading.Thread(target=send, name="shared-log", daemon=True).start()


def _send(url: str, trust: ssl.SSLContext, key: Path, logs: Mapping[str, list[str]]) -> bool:
    """Send lines, and tell whether they were taken; a SuperLink that is away gets them later."""
    body = json.dumps(logs).encode()
    try:
        request = urllib.request.Request(url, body, signed(key.read_bytes(), body))
        with urllib.request.urlopen(request, timeout=TIMEOUT, context=trust):
            return True
    except (OSError, ValueError):
        return False


def signed(private_key: bytes, body: bytes) -> dict[str, str]:
    """Return the headers by which a SuperLink knows whose a body is, with the device's key in OpenSSH's format."""
    key, now = load_ssh_private_key(private_key, None), f"{time.time():.3f}"
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    public = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    signature = key.sign(now.encode() + body, ec.ECDSA(hashes.SHA256()))
    headers = {KEY: base64.b64encode(public), SIGNATURE: base64.b64encode(signature), TIME: now.encode()}
    return {"Content-Type": "application/json", **{name: value.decode() for name, value in headers.items()}}


@dataclass
class SharedLogs:
    """What the SuperLink keeps of devices' logs: when the last lines came, and these lines, by node."""

    known: dict[int, dict[str, Any]] = field(default_factory=dict)

    def take(self, node_of: Callable[[bytes], int | None], headers: Mapping[str, str], body: bytes) -> None:
        """Keep lines that a registered node has signed.

        Parameters
        ----------
        node_of : callable
            Returns the number of the node that has a public key; None if none has.

        Raises
        ------
        SharedLogError
            If they are too many, too old or not signed by a registered node.
        """
        if len(body) > MOST_BYTES:
            raise SharedLogError(f"{len(body)} bytes, allowed are {MOST_BYTES}")
        node = node_of(_signer(headers, body))
        if node is None:
            raise SharedLogError("the key isn't that of a registered node")
        try:
            read = json.loads(body)
            logs = {
                whose: [messages.clean(str(line)) for line in read[whose][-LINES:]]
                for whose in (SUPERNODE, APP)
            }
        except (ValueError, KeyError, TypeError):
            raise SharedLogError("the lines can't be read") from None
        self.known[node] = {"came": f"{datetime.now(UTC):%Y-%m-%d %H:%M:%SZ}", **logs}

    def told(self, node_id: str) -> dict[str, Any]:
        """Return what is known of a node's log; empty if nothing is."""
        return self.known.get(int(node_id), {})


def _signer(headers: Mapping[str, str], body: bytes) -> bytes:
    """Return the public key that has signed a body a short while ago."""
    try:
        public = base64.b64decode(headers[KEY], validate=True)
        signature, signed_at = base64.b64decode(headers[SIGNATURE], validate=True), headers[TIME]
        if not abs(time.time() - float(signed_at)) < TOLERANCE:
            raise SharedLogError("the time of the signature is off")
        key = load_pem_public_key(public)
        assert isinstance(key, ec.EllipticCurvePublicKey)
        key.verify(signature, signed_at.encode() + body, ec.ECDSA(hashes.SHA256()))
    except SharedLogError:
        raise
    except (KeyError, ValueError, TypeError, AssertionError, InvalidSignature, UnsupportedAlgorithm):
        raise SharedLogError("the signature isn't that of a device") from None
    return public
