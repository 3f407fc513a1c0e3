"""Certificates for TLS and key pairs for node authentication, in the formats that Flower reads.

Private keys are written with mode 0600 from the first byte on.
"""

import datetime
import ipaddress
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fedapp.deploy.plan import LOOPBACK

AUTHORITY_VALID_FOR = datetime.timedelta(days=10 * 365)
CERTIFICATE_VALID_FOR = datetime.timedelta(days=2 * 365)  # 'fedapp deploy renew' makes the next one
SECRET_BYTES = 32
LOOPBACK_CERTIFICATE = "local.crt"  # of a device's own API
DEVICE_KEY, PUBLIC_KEY = "device.key", "device.pub"
OPERATOR = "fedapp operator"  # subject of the first operator's certificate


@dataclass(frozen=True)
class Authority:
    """A certificate authority: its key signs certificates, its certificate is what devices and the proxy trust."""

    key: ec.EllipticCurvePrivateKey
    certificate: x509.Certificate

    @classmethod
    def create(cls) -> "Authority":
        """Make a self-signed authority."""
        return cls._self_signed(ec.generate_private_key(ec.SECP256R1()))

    @classmethod
    def read(cls, folder: Path) -> "Authority":
        """Read an authority from its ca.key and ca.crt.

        Raises
        ------
        ValueError
            If the files can't be read, or the key isn't the certificate's.
        """
        try:
            certificate = x509.load_pem_x509_certificate((folder / "ca.crt").read_bytes())
            key = load_pem_private_key((folder / "ca.key").read_bytes(), None)
        except (OSError, ValueError, TypeError) as error:
            raise ValueError(f"{folder}: ca.key and ca.crt can't be read ({error})") from None
        if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != certificate.public_key():
            raise ValueError(f"{folder / 'ca.key'}: isn't the key of ca.crt")
        return cls(key, certificate)

    def prolonged(self) -> "Authority":
        """Return the same authority, with the same key, and a certificate that begins today."""
        return self._self_signed(self.key)

    def successor(self, certificate: x509.Certificate) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
        """Make a new key, and a certificate for it with the subject and extensions of an earlier certificate."""
        key = ec.generate_private_key(ec.SECP256R1())
        builder = _builder(
            certificate.subject,
            self.certificate.subject,
            key.public_key(),
            self._at_most(CERTIFICATE_VALID_FOR),
        )
        own = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
        for extension in certificate.extensions:
            value = own if isinstance(extension.value, x509.SubjectKeyIdentifier) else extension.value
            builder = builder.add_extension(value, critical=extension.critical)
        return key, builder.sign(self.key, hashes.SHA256())

    def _at_most(self, duration: datetime.timedelta) -> datetime.timedelta:
        """Return a duration, shortened where a certificate signed now would outlive the authority's certificate."""
        return min(duration, self.certificate.not_valid_after_utc - datetime.datetime.now(datetime.UTC))

    @classmethod
    def _self_signed(cls, key: ec.EllipticCurvePrivateKey) -> "Authority":
        name = common_name("fedapp deployment CA")
        usage = _key_usage(key_cert_sign=True, crl_sign=True)
        certificate = (
            _builder(name, name, key.public_key(), AUTHORITY_VALID_FOR)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(usage, critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .sign(key, hashes.SHA256())
        )
        return cls(key, certificate)

    def server_certificate(
        self, hosts: Sequence[str], valid_for: datetime.timedelta = CERTIFICATE_VALID_FOR
    ) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
        """Make the key and certificate of a server.

        Parameters
        ----------
        hosts : sequence of str
            Host names and IP addresses under which clients reach it: the subject's alternative names.
        valid_for : timedelta
            How long the certificate is valid.
        """
        names = x509.SubjectAlternativeName([_general_name(host) for host in hosts])
        key = ec.generate_private_key(ec.SECP256R1())
        return key, self._sign(hosts[0], key.public_key(), ExtendedKeyUsageOID.SERVER_AUTH, valid_for, names)

    def operator_certificate(
        self, name: str = OPERATOR
    ) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
        """Make the key and certificate by which the proxy knows an operator: good for a client alone."""
        key = ec.generate_private_key(ec.SECP256R1())
        return key, self.certificate_of_operator(name, key.public_key())

    def certificate_of_operator(self, name: str, key: ec.EllipticCurvePublicKey) -> x509.Certificate:
        """Make the certificate of an operator who has the private half of a key."""
        valid_for = self._at_most(CERTIFICATE_VALID_FOR)
        return self._sign(name, key, ExtendedKeyUsageOID.CLIENT_AUTH, valid_for)

    def _sign(
        self,
        name: str,
        key: ec.EllipticCurvePublicKey,
        usage: x509.ObjectIdentifier,
        valid_for: datetime.timedelta,
        *extensions: x509.ExtensionType,
    ) -> x509.Certificate:
        builder = _builder(common_name(name), self.certificate.subject, key, valid_for)
        for extension in extensions:
            builder = builder.add_extension(extension, critical=False)
        return (
            builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_key_usage(digital_signature=True), critical=True)
            .add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key()), critical=False
            )
            .sign(self.key, hashes.SHA256())
        )


@contextmanager
def written_by_owner_alone() -> Iterator[None]:
    """Make files that the group and others can't write to, whatever the caller's umask."""
    before = os.umask(0o022)
    os.umask(before | 0o022)
    try:
        yield
    finally:
        os.umask(before)


def write_authority(folder: Path) -> Authority:
    """Make an authority and write ca.key and ca.crt."""
    authority = Authority.create()
    write_key(folder / "ca.key", authority.key)
    (folder / "ca.crt").write_bytes(authority.certificate.public_bytes(Encoding.PEM))
    return authority


def write_server(folder: Path, authority: Authority, hosts: Sequence[str]) -> None:
    """Write ca.crt, server.crt and server.key for a server at ``hosts``."""
    (folder / "ca.crt").write_bytes(authority.certificate.public_bytes(Encoding.PEM))
    _write_pair(folder, "server", *authority.server_certificate(hosts))


def write_operator(folder: Path, authority: Authority, name: str = OPERATOR) -> x509.Certificate:
    """Write operator.crt and operator.key, for whoever starts runs, and return the certificate."""
    key, certificate = authority.operator_certificate(name)
    _write_pair(folder, "operator", key, certificate)
    return certificate


def write_loopback(folder: Path) -> None:
    """Write local.crt and local.key of a SuperNode's own API, by which the device's SuperExec recognises it.

    An authority made for this certificate alone signs it; the authority's key is dropped, and its certificate is in
    local.crt, too. Both certificates are valid for equally long: nothing outside the device depends on them, so that
    an earlier renewal would serve nothing.
    """
    authority = Authority.create()
    _write_pair(folder, "local", *authority.server_certificate([LOOPBACK], AUTHORITY_VALID_FOR))
    with (folder / LOOPBACK_CERTIFICATE).open("ab") as file:
        file.write(authority.certificate.public_bytes(Encoding.PEM))


def write_secret(*folders: Path) -> None:
    """Write superexec.secret, the same in each folder: only a SuperExec that has it gets tasks."""
    secret = os.urandom(SECRET_BYTES).hex().encode()
    for folder in folders:
        write_private(folder / "superexec.secret", secret)


def replace_pair(path: Path, key: ec.EllipticCurvePrivateKey, certificate: x509.Certificate) -> None:
    """Write a certificate to ``path`` and its key beside it, in place of what is there."""
    write_key(path.with_suffix(".key.new"), key)
    os.replace(path.with_suffix(".key.new"), path.with_suffix(".key"))
    replace_certificate(path, certificate)


def replace_certificate(path: Path, certificate: x509.Certificate) -> None:
    """Write a certificate in place of what is there."""
    new = path.with_suffix(".crt.new")
    new.write_bytes(certificate.public_bytes(Encoding.PEM))
    os.replace(new, path)


def write_own(folder: Path, apps_folder: Path) -> None:
    """Write what a device alone has: its key pair, its own API's certificate, and its SuperExec's secret in both."""
    write_device(folder)
    write_loopback(folder)
    write_secret(folder, apps_folder)


def write_device(folder: Path) -> None:
    """Write the key pair of a device, device.key and device.pub: P-256, the private half in OpenSSH's format."""
    key = ec.generate_private_key(ec.SECP256R1())
    write_private(folder / DEVICE_KEY, key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
    public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    (folder / PUBLIC_KEY).write_bytes(public + b"\n")


def write_private(path: Path, content: bytes) -> None:
    """Write a new file that only its owner may read; what was there before is removed."""
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)


def write_key(path: Path, key: ec.EllipticCurvePrivateKey) -> None:
    """Write the private key of a certificate."""
    write_private(path, _pem(key))


def _write_pair(
    folder: Path, name: str, key: ec.EllipticCurvePrivateKey, certificate: x509.Certificate
) -> None:
    (folder / f"{name}.crt").write_bytes(certificate.public_bytes(Encoding.PEM))
    write_key(folder / f"{name}.key", key)


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, valid_for: datetime.timedelta
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))  # devices' clocks may be behind
        .not_valid_after(now + valid_for)
    )


def _key_usage(**allowed: bool) -> x509.KeyUsage:
    names = (
        "digital_signature",
        "content_commitment",
        "key_encipherment",
        "data_encipherment",
        "key_agreement",
        "key_cert_sign",
        "crl_sign",
        "encipher_only",
        "decipher_only",
    )
    return x509.KeyUsage(**{name: allowed.get(name, False) for name in names})


def common_name(common: str) -> x509.Name:
    """Return a certificate's subject with a common name alone."""
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common[:64])])


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
