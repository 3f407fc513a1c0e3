"""Certificates of a deployment: until when they are valid, and new ones by the same authority.

A device trusts the authority alone. So a new server certificate asks nothing of the devices, and neither does a new
certificate of the authority with the same key: the one that devices have holds until it expires.
"""

import ipaddress
import socket
import ssl
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature

from fedapp.deploy import keys
from fedapp.deploy.operators.records import CERTIFICATE, FOLDER
from fedapp.deploy.plan import DeployError, Deployment

WARN_BEFORE = timedelta(days=60)
CONNECT_TIMEOUT = 5.0  # seconds


@dataclass(frozen=True)
class Validity:
    """Until when a certificate is valid; ``name`` is its path in the deployment's folder."""

    name: str
    until: datetime

    @property
    def days_left(self) -> int:
        """Whole days until it expires; negative afterwards."""
        return (self.until - datetime.now(UTC)).days

    @property
    def is_due(self) -> bool:
        """Whether it is time for a new one."""
        return self.until - datetime.now(UTC) <= WARN_BEFORE

    @property
    def line(self) -> str:
        """Name, date and days left, as one line."""
        left = f"for {self.days_left} days" if self.until > datetime.now(UTC) else "EXPIRED"
        return f"{self.name}: valid until {self.until:%Y-%m-%d}, {left}"


def validities(out: Path) -> list[Validity]:
    """Return until when each certificate of a deployment is valid, its authority's first."""
    own = [(path, read(path)) for path in [*_with_keys(out), *of_operators(out)]]
    return [
        Validity(str(path.relative_to(out)), certificate.not_valid_after_utc)
        for path, certificate in [(out / "ca.crt", read_authority(out)), *own]
    ]


def renew(out: Path, *, authority: bool = False) -> list[Path]:
    """Make new keys and certificates, and return the certificates.

    The server and everybody else whose certificate the authority signed get new ones, and so do the devices whose own
    certificates (local.crt) expire soon.

    Parameters
    ----------
    out : Path
        The deployment's folder.
    authority : bool
        Make a new certificate for the authority, too, with the same key.

    Returns
    -------
    list of Path
        The certificates that are new.

    Raises
    ------
    DeployError
        If the authority or a certificate can't be read, or the authority has expired.
    """
    issuer = authority_of(out)
    new = []
    if authority:
        issuer = issuer.prolonged()
        new = sorted({out / "ca.crt", *out.glob("*/ca.crt"), *out.glob(f"{FOLDER}/*/ca.crt")})
        for path in new:
            keys.replace_certificate(path, issuer.certificate)
    elif issuer.certificate.not_valid_after_utc <= datetime.now(UTC):
        raise DeployError(f"{out / 'ca.crt'}: the authority has expired; 'fedapp deploy renew --authority'")
    for path in list(_signed(out, issuer.certificate)):
        keys.replace_pair(path, *issuer.successor(read(path)))
        new.append(path)
    for path in sorted(out.glob(f"*/{keys.LOOPBACK_CERTIFICATE}")):
        if Validity(path.name, read(path).not_valid_after_utc).is_due:
            keys.write_loopback(path.parent)
            new.append(path)
    return new


def read(path: Path) -> x509.Certificate:
    """Read a certificate.

    Raises
    ------
    DeployError
        If it can't be read.
    """
    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except OSError as error:
        raise DeployError(f"{path}: can't be read ({error.strerror})") from None
    except ValueError as error:
        raise DeployError(f"{path}: can't be read as a certificate ({error})") from None


def read_authority(out: Path) -> x509.Certificate:
    """Read the certificate of a deployment's authority.

    Raises
    ------
    DeployError
        If it can't be read; every machine of the deployment has a copy.
    """
    try:
        return read(out / "ca.crt")
    except DeployError as error:
        raise DeployError(f"{error}; superlink/ and each device's folder have a copy of it") from None


def shown_by_server(deployment: Deployment) -> x509.Certificate | None:
    """Return the certificate that the server shows now, whoever signed it; None if it can't be reached."""
    host = deployment.hosts[0]
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # an expired one is what we look for
    try:
        with (
            socket.create_connection((host, deployment.port), CONNECT_TIMEOUT) as raw,
            context.wrap_socket(raw, server_hostname=None if _is_address(host) else host) as connection,
        ):
            shown = connection.getpeercert(binary_form=True)
    except OSError:
        return None
    return x509.load_der_x509_certificate(shown) if shown else None


def _with_keys(out: Path) -> list[Path]:
    """Return the certificates whose keys are here, whoever signed them."""
    found = sorted([*out.glob("*.crt"), *out.glob("*/*.crt")])
    return [path for path in found if path.name != "ca.crt" and path.with_suffix(".key").is_file()]


def _signed(out: Path, authority: x509.Certificate) -> Iterator[Path]:
    """Yield the certificates that the authority signed and whose keys are here."""
    for path in _with_keys(out):
        certificate = read(path)
        with suppress(InvalidSignature, ValueError, TypeError):
            certificate.verify_directly_issued_by(authority)
            yield path


def of_operators(out: Path) -> list[Path]:
    """Return the certificates of all operators but the first."""
    return sorted(out.glob(f"{FOLDER}/*/{CERTIFICATE}"))


def authority_of(out: Path) -> keys.Authority:
    """Read a deployment's authority with its key.

    Raises
    ------
    DeployError
        If it can't be read.
    """
    try:
        return keys.Authority.read(out)
    except ValueError as error:
        raise DeployError(f"{error}; without it no certificate can be made") from None


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
