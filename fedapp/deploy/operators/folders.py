"""Operators of a deployment, added and removed: their records, their folders, and the proxy's files."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding

from fedapp.deploy import keys
from fedapp.deploy.certificates import Validity, authority_of, of_operators, read
from fedapp.deploy.files import REMOVED, operator_files, read_deployment, write_startup
from fedapp.deploy.operators.records import (
    CERTIFICATE,
    FIRST,
    FOLDER,
    KEY,
    MANAGE,
    REQUEST,
    Operator,
    Operators,
    check_name,
    check_role,
    now,
)
from fedapp.deploy.operators.request import OperatorRequest, fingerprint_of_key
from fedapp.deploy.plan import DeployError, Deployment, is_operators


def read_operators(out: Path) -> tuple[Deployment, Operators]:
    """Read a deployment and its operators.

    Raises
    ------
    DeployError
        If there is no deployment, its folder is an operator's, or it has no proxy.
    """
    deployment = read_deployment(out)
    if is_operators(out):
        raise DeployError(f"{out}: is an operator's folder, and only the deployment's own has operators")
    if not deployment.backend:
        raise DeployError(f"{out}: has no proxy, which asks for certificates; 'fedapp deploy init' makes one")
    return deployment, Operators.read(out)


def add_operator(out: Path, name: str, role: str) -> tuple[Operator, str]:
    """Add an operator with a key that is made here, or change an operator's role.

    Returns
    -------
    tuple of Operator and str
        The operator, and the role before; empty if the operator is new.

    Raises
    ------
    DeployError
        If the name or the role isn't one, the operator was removed, or the authority can't be read.
    """
    deployment, operators = read_operators(out)
    check_name(name)
    check_role(role)
    former = operators.of_name(name)
    _check_not_removed(former)
    if former:
        if former.role == MANAGE != role:
            _check_other_manager(operators, former)
        operators.write(replace(former, role=role))
        write_startup(out, deployment)
        return replace(former, role=role), former.role
    authority = authority_of(out)
    with _new_folder(out, deployment, name) as folder:
        certificate = keys.write_operator(folder, authority, name)
    operator = Operator(name, role, now()).with_certificate(certificate, _key_of(certificate))
    operators.write(operator)
    write_startup(out, deployment)
    return operator, ""


def sign_operator(out: Path, request: OperatorRequest, role: str = "") -> Operator:
    """Sign the request of an operator: a new one, who gets ``role``, or, without role, one who is there.

    Raises
    ------
    DeployError
        If the role or its absence doesn't fit, the key is another operator's, the operator was removed, or the
        authority can't be read.
    """
    deployment, operators = read_operators(out)
    former = operators.of_name(request.name)
    _check_not_removed(former)
    if former and role:
        raise DeployError(
            f"operator {request.name!r}: is there already; without --role a new certificate is signed, and the "
            "role stays"
        )
    if not former:
        check_role(role)
    for other in operators.all:
        if other.name != request.name and request.fingerprint in other.keys:
            raise DeployError(
                f"the request's key is that of operator {other.name!r}, now or formerly; each request needs a new key"
            )
    certificate = authority_of(out).certificate_of_operator(request.name, request.key)
    with _new_folder(out, deployment, request.name) as folder:
        keys.replace_certificate(folder / CERTIFICATE, certificate)
        (folder / REQUEST).write_bytes(request.content)
    base = former or Operator(request.name, role, now())
    operator = base.with_certificate(certificate, request.fingerprint)
    operators.write(operator)
    write_startup(out, deployment)
    return operator


def remove_operator(out: Path, name: str) -> tuple[Operator, bool]:
    """Have the proxy refuse all certificates of an operator.

    Returns
    -------
    tuple of Operator and bool
        The operator, and whether this call removed it.

    Raises
    ------
    DeployError
        If there is no such operator, or none with the role manage would be left.
    """
    deployment, operators = read_operators(out)
    operator = operators.of_name(name)
    if operator is None:
        names = ", ".join(each.name for each in operators.present)
        raise DeployError(f"operator {name!r}: isn't one of {names}")
    is_new = not operator.removed
    if is_new:
        if operator.role == MANAGE:
            _check_other_manager(operators, operator)
        operator = replace(operator, removed=now())
        operators.write(operator)
    # Also if the operator is on record as removed: the command may have been killed after it wrote the record.
    _put_aside(out, name)
    write_startup(out, deployment)
    return operator, is_new


def renew_operators(out: Path) -> list[Path]:
    """Give each operator whose key is here, and whose certificate expires soon, a new key and certificate.

    The former certificates hold until they expire.

    Returns
    -------
    list of Path
        The certificates that are new.
    """
    due = [
        path
        for path in of_operators(out)
        if path.with_name(KEY).is_file() and Validity(path.name, read(path).not_valid_after_utc).is_due
    ]
    if not due:
        return []
    deployment, operators = read_operators(out)
    authority = authority_of(out)
    for path in due:
        operator = operators.of_name(path.parent.name)
        if operator is None:
            raise DeployError(f"{path}: is of nobody in {operators.path}")
        key, certificate = authority.operator_certificate(operator.name)
        # On record first: a certificate that isn't is refused.
        operators.write(operator.with_certificate(certificate, _key_of(certificate)))
        keys.replace_pair(path, key, certificate)
    write_startup(out, deployment)
    return due


def _check_not_removed(operator: Operator | None) -> None:
    if operator and operator.removed:
        raise DeployError(
            f"operator {operator.name!r}: was removed on {operator.removed}, and no name returns; take another"
        )


def _check_other_manager(operators: Operators, operator: Operator) -> None:
    others = [each for each in operators.present if each.name != operator.name and each.role == MANAGE]
    if not others:
        raise DeployError(
            f"operator {operator.name!r}: is the only one with the role {MANAGE}; add another first"
        )


def _key_of(certificate: x509.Certificate) -> str:
    key = certificate.public_key()
    assert isinstance(key, ec.EllipticCurvePublicKey)
    return fingerprint_of_key(key)


@contextmanager
def _new_folder(out: Path, deployment: Deployment, name: str) -> Iterator[Path]:
    """Yield a folder to write an operator's certificate to, which then takes the place of the operator's folder."""
    folder = out / FOLDER / name
    new = folder.with_name(f".{name}.new")
    try:
        with keys.written_by_owner_alone():
            shutil.rmtree(new, ignore_errors=True)
            new.mkdir(parents=True)
            yield new
            (new / "ca.crt").write_bytes(authority_of(out).certificate.public_bytes(Encoding.PEM))
            for file, text in operator_files(out, deployment).items():
                (new / file).write_text(text, "utf-8")
            # What is left of a key that was made here is no longer the certificate's.
            shutil.rmtree(folder, ignore_errors=True)
            new.rename(folder)
    except OSError as error:
        raise DeployError(f"{error.filename or new}: can't be written ({error.strerror})") from None
    finally:
        shutil.rmtree(new, ignore_errors=True)


def _put_aside(out: Path, name: str) -> None:
    """Move an operator's certificate, and key if it is here, to the folder of what was removed."""
    folder = out if name == FIRST else out / FOLDER / name
    files = [folder / file for file in (CERTIFICATE, KEY, REQUEST) if (folder / file).is_file()]
    moved = out / REMOVED / f"{FOLDER}-{name}-{datetime.now(UTC):%Y%m%dT%H%M%S%fZ}"
    try:
        if files:
            moved.mkdir(parents=True)
        for file in files:
            file.rename(moved / file.name)
        if name != FIRST and folder.is_dir():
            shutil.rmtree(folder)
    except OSError as error:
        raise DeployError(f"{error.filename or moved}: can't be moved ({error.strerror})") from None
