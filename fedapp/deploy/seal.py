"""The audit of a deployment as a seal: the ends of runs are signed, and every line is checked.

Who has the server's key can write another audit. Who hasn't can't change a line before a signature without being
found: each line holds the one before by its hash, and a signature holds its line.
"""

import base64
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID

from fedapp.deploy.audit import FILE, SEAL, Audit, digest, entry_of, is_chained, text_of
from fedapp.deploy.certificates import read_authority
from fedapp.deploy.plan import DeployError, is_operators

END = "end of run"  # the command of an entry that says how a run ended
ANEW = "init --force"  # the command of an entry after which the deployment has another authority


def sign_ends(out: Path, ended: Iterable[tuple[str, str]]) -> None:
    """Note the end of each run that isn't noted yet, signed by the server's key; an operator's folder has none.

    Parameters
    ----------
    out : Path
        The deployment's folder.
    ended : iterable of (str, str)
        Runs that have ended: number, and the status in Flower's words.

    Raises
    ------
    DeployError
        If the audit can't be read or written, or the server's key can't be read.
    """
    if is_operators(out):
        return
    before = entries(out) if (out / FILE).exists() else []
    noted = {entry.get("run") for entry in before if entry.get("command") == END}
    for run_id, status in ended:
        if run_id not in noted:
            Audit(out, END).record(status, signed=True, run=run_id)


def entries(out: Path) -> list[dict[str, Any]]:
    """Return the audit's entries, the oldest first, without lines that are no entry.

    Raises
    ------
    DeployError
        If the audit can't be read.
    """
    return [entry for line in _lines(out) if (entry := entry_of(line)) is not None]


@dataclass
class Verified:
    """What the check of an audit found, if no line was changed.

    Attributes
    ----------
    lines : int
    torn : list of int
        Lines that are no entries: a command was killed as it wrote.
    signed : list of int
        Lines with a signature.
    heads : list of str
        The hash of each line from the first that carries one on.
    going : dict of str to int
        Runs that began and have no signed end, with the line of their beginning.
    """

    lines: int = 0
    torn: list[int] = field(default_factory=list)
    signed: list[int] = field(default_factory=list)
    heads: list[str] = field(default_factory=list)
    going: dict[str, int] = field(default_factory=dict)

    def said(self) -> list[str]:
        """Return it as lines to be read."""
        last = self.signed[-1] if self.signed else 0
        by_key = f", {len(self.signed)} of them signed by the server's key" if self.signed else ""
        said = [f"{self.lines} lines are as they were written{by_key}; head {self.heads[-1]}"]
        said += [f"line {line}: is no entry, a command was ended as it wrote" for line in self.torn]
        said += [
            f"line {line}: run {run} began, and its end isn't signed" for run, line in self.going.items()
        ]
        if last < self.lines:
            said.append(
                f"lines {last + 1} to {self.lines}: held by hashes alone, there is no signature after them"
            )
        return said


def verify(out: Path, head: str = "") -> Verified:
    """Check every hash and signature of an audit; ``out`` holds ``audit.jsonl``, ``audit.seal`` and ``ca.crt``.

    Parameters
    ----------
    out : Path
        The deployment's folder, or a copy of those files.
    head : str
        The hash that an earlier check called the head: that line must still be there.

    Raises
    ------
    DeployError
        Naming the first line that isn't as it was written; or if the audit can't be read, or is empty.
    """
    lines = _lines(out)
    where = out / FILE
    found = Verified(len(lines))
    authority = read_authority(out)
    block, foreign = b"", 0  # what the next hash is of; the first line that another authority's server signed
    for number, line in enumerate(lines, 1):
        entry = entry_of(line)
        if not is_chained(entry) or entry is None:
            if entry is not None:
                raise DeployError(
                    f"{where}: line {number}: carries no hash of the line before; it was added by hand"
                )
            found.torn.append(number)  # a command was ended as it wrote
            block += line + b"\n"
            continue
        _check_link(where, number, entry, block)
        block = line + b"\n"
        found.heads.append(digest(block))
        if "signature" in entry:
            known = _check_signature(where, number, entry, authority)
            found.signed.append(number)
            foreign = (0 if entry.get("command") == ANEW else foreign) if known else foreign or number
        _follow_runs(found, number, entry)
    if not found.heads:
        raise DeployError(f"{where}: has no entry")
    if found.torn and found.torn[-1] == len(lines):
        raise DeployError(f"{where}: line {len(lines)}: is no entry, and none was written after it")
    if foreign:
        raise DeployError(
            f"{where}: line {foreign}: is signed by another authority's server than {out / 'ca.crt'}'s"
        )
    _check_seal(out, lines, found)
    if head and head not in found.heads:
        raise DeployError(
            f"--head = {head}: no line of {where} has this hash; lines were replaced or cut off"
        )
    return found


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise DeployError(f"{file}: can't be read ({error.strerror})") from None


def _lines(out: Path) -> list[bytes]:
    content = _read(out / FILE)
    return content.removesuffix(b"\n").split(b"\n") if content else []


def _check_link(where: Path, number: int, entry: Mapping[str, Any], block: bytes) -> None:
    if entry.get("line") != number:
        raise DeployError(
            f"{where}: line {number}: was written as line {entry.get('line')}; lines were removed, added or moved"
        )
    if entry["previous"] == digest(block):
        return
    if number == 1:
        raise DeployError(f"{where}: line 1: isn't the first that was written")
    raise DeployError(f"{where}: line {number - 1}: isn't as it was when line {number} was written")


def _check_signature(where: Path, number: int, entry: Mapping[str, Any], authority: x509.Certificate) -> bool:
    """Check the signature of an entry, and tell whether ``authority`` issued the signer's certificate."""
    whole = {name: value for name, value in entry.items() if name != "signature"}
    try:
        certificate = x509.load_der_x509_certificate(base64.b64decode(entry["certificate"]))
        usage = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
        key = certificate.public_key()
        if ExtendedKeyUsageOID.SERVER_AUTH not in usage or not isinstance(key, ec.EllipticCurvePublicKey):
            raise ValueError
        key.verify(base64.b64decode(entry["signature"]), text_of(whole), ec.ECDSA(hashes.SHA256()))
    except (KeyError, TypeError, ValueError, x509.ExtensionNotFound, InvalidSignature):
        raise DeployError(f"{where}: line {number}: its signature isn't the server's") from None
    try:
        certificate.verify_directly_issued_by(authority)
    except (InvalidSignature, ValueError, TypeError):
        return False
    return True


def _check_seal(out: Path, lines: list[bytes], found: Verified) -> None:
    """Compare with the last signed line, which is kept a second time."""
    where, file = out / FILE, out / SEAL
    if not file.exists():
        if found.signed:
            raise DeployError(f"{file}: is missing, and line {found.signed[-1]} of {where} is signed")
        return
    kept = _read(file).removesuffix(b"\n")
    number = (entry_of(kept) or {}).get("line")
    if not isinstance(number, int) or number < 1:
        raise DeployError(f"{file}: holds no line of {where}")
    if number > len(lines):
        raise DeployError(
            f"{where}: line {len(lines) + 1}: is missing, {file} holds the signed line {number}; lines were cut off"
        )
    if lines[number - 1] != kept:
        raise DeployError(f"{where}: line {number}: isn't the signed line that {file} holds")


def _follow_runs(found: Verified, number: int, entry: Mapping[str, Any]) -> None:
    run = str(entry.get("run", ""))
    if run and entry.get("command") == "run":
        found.going[run] = number
    elif entry.get("command") == END and "signature" in entry:
        found.going.pop(run, None)
