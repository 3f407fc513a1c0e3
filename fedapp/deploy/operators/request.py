"""An operator's request for a certificate (a CSR, PKCS #10): the operator's machine makes the key, which stays there.

``operator.csr`` has the operator's name as its subject, the public key, and a signature by the private key. The role
isn't in it: whoever signs the request says which one it is.
"""

from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from cryptography.x509.oid import NameOID

from fedapp.deploy import keys
from fedapp.deploy.key_request import MAX_BYTES
from fedapp.deploy.nodes import fingerprint_of
from fedapp.deploy.operators.records import KEY, REQUEST, check_name
from fedapp.deploy.plan import PLAN, DeployError


@dataclass(frozen=True)
class OperatorRequest:
    """What an operator asks for.

    Attributes
    ----------
    name : str
    key : ec.EllipticCurvePublicKey
        The public key, on the curve P-256.
    content : bytes
        The request's file.
    """

    name: str
    key: ec.EllipticCurvePublicKey
    content: bytes

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the public key."""
        return fingerprint_of_key(self.key)


@keys.written_by_owner_alone()
def make_request(name: str, folder: Path | None = None) -> tuple[Path, OperatorRequest]:
    """Make an operator's key, on the operator's machine, and the request.

    Parameters
    ----------
    name : str
        The operator's name.
    folder : Path, optional
        Where the key and the request are written; by default a folder of that name.

    Raises
    ------
    DeployError
        If the name isn't one, or the folder has a key or a request, is in a deployment's, or can't be written.
    """
    check_name(name)
    folder = folder or Path(name)
    for file in (KEY, REQUEST):
        if (folder / file).exists():
            raise DeployError(
                f"{folder / file}: is there already, and no key is replaced; choose another --out"
            )
    if any((above / PLAN).exists() for above in (folder.absolute(), folder.absolute().parent)):
        raise DeployError(
            f"{folder}: is in a deployment's folder, where the private key doesn't belong; choose another --out"
        )
    key = ec.generate_private_key(ec.SECP256R1())
    builder = x509.CertificateSigningRequestBuilder().subject_name(keys.common_name(name))
    content = builder.sign(key, hashes.SHA256()).public_bytes(Encoding.PEM)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / ".gitignore").exists():
            # Private keys stay out of repositories.
            (folder / ".gitignore").write_text("*\n")
        keys.write_key(folder / KEY, key)
        (folder / REQUEST).write_bytes(content)
    except OSError as error:
        raise DeployError(f"{error.filename or folder}: can't be written ({error.strerror})") from None
    return folder, OperatorRequest(name, key.public_key(), content)


def read_request(file: Path) -> OperatorRequest:
    """Read a request, and check its signature.

    Raises
    ------
    DeployError
        If the file can't be read, isn't an operator's request, or isn't signed by the key that is in it.
    """
    try:
        with file.open("rb") as opened:
            content = opened.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise ValueError(f"it has more than {MAX_BYTES} bytes")
        return _read(content)
    except OSError as error:
        raise DeployError(f"{file}: can't be read ({error.strerror})") from None
    except (ValueError, UnsupportedAlgorithm, InvalidSignature) as error:
        raise DeployError(f"{file}: is no request of an operator: {error}") from None


def fingerprint_of_key(key: ec.EllipticCurvePublicKey) -> str:
    """Return the fingerprint of a public key."""
    return fingerprint_of(key.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH))


def _read(content: bytes) -> OperatorRequest:
    request = x509.load_pem_x509_csr(content)
    key = request.public_key()
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise ValueError("its key isn't of the curve P-256")
    if not request.is_signature_valid:
        raise ValueError("its signature isn't of this content by this key")
    names = request.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    if len(names) != 1 or len(list(request.subject)) != 1:
        raise ValueError("its subject must be the operator's name as the common name (CN), and nothing else")
    name = str(names[0].value)
    check_name(name)
    return OperatorRequest(name, key, content)
