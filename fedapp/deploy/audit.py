"""Who changed what in a deployment, and when: ``audit.jsonl`` in its folder, to which our commands append.

Each line carries its number and the hash of the line before. The line that makes a deployment and the end of each run
are signed by the server's key, and ``audit.seal`` keeps the last signed line a second time (``fedapp.deploy.seal``
checks all of it). Plain ``flwr`` adds no entries; the ends of runs that it started are noted all the same.
"""

import base64
import fcntl
import hashlib
import json
import os
import pwd
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key

from fedapp.deploy.plan import DeployError

FILE = "audit.jsonl"
SEAL = "audit.seal"


class Audit:
    """The entries of one command.

    Parameters
    ----------
    out : Path
        The deployment's folder.
    command : str
        What was asked for, such as ``register``.
    """

    def __init__(self, out: Path, command: str) -> None:
        self.out = out
        self.path = out / FILE
        self.command = command

    def record(self, outcome: str, *, signed: bool = False, **details: str) -> None:
        """Append an entry.

        Parameters
        ----------
        outcome : str
            The command's result, one line.
        signed : bool
            Whether the server's key signs the entry, and with it all entries before.
        details : str
            What the command was about, such as the device.

        Raises
        ------
        DeployError
            If the audit or its seal can't be written, or the server's key can't be read.
        """
        sign = _signer(self.out) if signed else None
        with self.opened() as descriptor:
            fcntl.flock(descriptor, fcntl.LOCK_EX)  # the commands of two people have one order
            content = _read(descriptor)
            # A command that was killed as it wrote leaves a line without its end.
            ended = content if content.endswith(b"\n") or not content else content + b"\n"
            entry: dict[str, Any] = {
                "line": ended.count(b"\n") + 1,
                "previous": digest(_last_block(ended)),
                "time": datetime.now(UTC).isoformat(timespec="seconds"),
                **_who(),
                "command": self.command,
                **details,
                "outcome": outcome,
            }
            line = text_of(sign(entry) if sign else entry) + b"\n"
            _write(descriptor, ended[len(content) :] + line, len(content))
            if signed:
                new = (self.out / SEAL).with_suffix(".new")
                new.write_bytes(line)
                os.replace(new, self.out / SEAL)

    @contextmanager
    def opened(self) -> Iterator[int]:
        """Open the file to append to it, for its owner alone.

        Raises
        ------
        DeployError
            If it can't be written.
        """
        try:
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
            try:
                yield descriptor
            finally:
                os.close(descriptor)
        except OSError as error:
            raise DeployError(f"{error.filename or self.path}: can't be written ({error.strerror})") from None


@contextmanager
def audited(out: Path, command: str, **details: str) -> Iterator[Audit]:
    """Yield the audit to a command that changes a deployment, and note the error if the command fails.

    The command notes its success itself.

    Raises
    ------
    DeployError
        If there is no deployment, or its audit can't be written; before anything is done.
    """
    if not (out / "deployment.toml").is_file():
        raise DeployError(f"{out}: holds no deployment; 'fedapp deploy init' makes one")
    audit = Audit(out, command)
    with audit.opened():
        pass
    try:
        yield audit
    except BaseException as error:
        said = str(error) or type(error).__name__
        audit.record(f"failed: {said.splitlines()[0]}", signed=False, **details)
        raise


def text_of(entry: Mapping[str, Any]) -> bytes:
    """Return an entry as its line, without the line's end."""
    return json.dumps(entry, ensure_ascii=False).encode()


def entry_of(line: bytes) -> dict[str, Any] | None:
    """Return the entry that a line is; None if it is none."""
    try:
        entry = json.loads(line)
    except ValueError:
        return None
    return entry if isinstance(entry, dict) else None


def is_chained(entry: Mapping[str, Any] | None) -> bool:
    """Tell whether an entry carries the hash of the line before it."""
    return entry is not None and "previous" in entry


def digest(content: bytes) -> str:
    """Return the hash by which a line holds what is before it: SHA-256, hexadecimal."""
    return hashlib.sha256(content).hexdigest()


def _last_block(content: bytes) -> bytes:
    """Return the content from the last line with a hash to the end; the whole content if no line has a hash."""
    lines = content.splitlines(keepends=True)
    for place in reversed(range(len(lines))):
        if is_chained(entry_of(lines[place])):
            return b"".join(lines[place:])
    return content


def _signer(out: Path) -> Any:
    """Return a function that signs an entry by the server's key."""
    file = out / "superlink" / "server.key"
    try:
        key = load_pem_private_key(file.read_bytes(), None)
        certificate = x509.load_pem_x509_certificate(file.with_suffix(".crt").read_bytes())
    except (OSError, ValueError, TypeError) as error:
        said = getattr(error, "strerror", None) or error
        raise DeployError(f"{file}: can't be read to sign the audit ({said})") from None
    assert isinstance(key, ec.EllipticCurvePrivateKey)

    def sign(entry: Mapping[str, Any]) -> dict[str, Any]:
        shown = base64.b64encode(certificate.public_bytes(Encoding.DER)).decode()
        whole = {**entry, "certificate": shown}
        signature = key.sign(text_of(whole), ec.ECDSA(hashes.SHA256()))
        return {**whole, "signature": base64.b64encode(signature).decode()}

    return sign


def _read(descriptor: int) -> bytes:
    os.lseek(descriptor, 0, os.SEEK_SET)
    parts = []
    while part := os.read(descriptor, 2**20):
        parts.append(part)
    return b"".join(parts)


def _write(descriptor: int, text: bytes, size: int) -> None:
    """Write a whole line to the end of a file of ``size`` bytes, or nothing of it."""
    try:
        if os.write(descriptor, text) < len(text):
            raise OSError(28, "No space left on device")
        os.fsync(descriptor)
    except OSError:
        os.ftruncate(descriptor, size)
        raise


def _who() -> dict[str, str]:
    try:
        user = pwd.getpwuid(os.getuid()).pw_name  # not what the environment says
    except KeyError:
        user = str(os.getuid())
    behind = {"sudo-user": os.environ["SUDO_USER"]} if "SUDO_USER" in os.environ else {}
    return {"user": user, **behind, "host": socket.gethostname()}
