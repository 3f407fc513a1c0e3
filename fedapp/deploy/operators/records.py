"""Who the operators of a deployment are: ``operators.json``, from which the proxy's files follow.

The proxy knows an operator's certificate by its serial number, which the authority gives to one certificate alone. A
certificate that isn't on record is refused, also if the authority has signed it. The first operator's certificate,
operator.crt, is known by its subject, so that the proxy accepts a renewed one without new files.
"""

import json
import os
import re
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from cryptography import x509

from fedapp.deploy.plan import DeployError

FILE = "operators.json"
FOLDER = "operators"  # of the operators' folders, in the deployment's
CERTIFICATE, KEY, REQUEST = "operator.crt", "operator.key", "operator.csr"
FIRST = "operator"  # name of the operator whose certificate `deploy init` makes
LOOK, START, MANAGE = "look", "start", "manage"
ROLES = (LOOK, START, MANAGE)
# Names of Control API methods below /v1/control/, in Flower 1.41's spelling; those of this app begin with fedapp-.
# Every method that is in neither list is for the role manage alone.
LOOK_METHODS = (
    "list-runs",
    "list-run-series",
    "get-run-series",
    "list-run-series-events",
    "list-automations",
    "list-nodes",
    "list-apps",
    "list-app-associations",
    "list-federations",
    "show-federation",
    "stream-logs",
    "stream-run-events",
    "pull-artifacts",
    "fedapp-run-files",
    "fedapp-run-file",
    "fedapp-log",
)
START_METHODS = ("start-run", "stop-run")
# nginx's hash of a map has 64 bytes for a key of 40 characters at most, a serial number's.
_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,31}")


@dataclass(frozen=True)
class Operator:
    """An operator.

    Attributes
    ----------
    name : str
    role : str
        Of ``ROLES``.
    added : str
        When the operator was added, UTC.
    serials : tuple of str
        Serial numbers of the operator's certificates, hexadecimal; renewed ones are valid until they expire.
    keys : tuple of str
        Fingerprints of the certificates' public keys.
    removed : str
        When the operator was removed, UTC; empty before.
    """

    name: str
    role: str
    added: str
    serials: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()
    removed: str = ""

    def with_certificate(self, certificate: x509.Certificate, key: str) -> "Operator":
        """Return the operator with one more certificate; ``key`` is the fingerprint of its public key."""
        keys = tuple(dict.fromkeys([*self.keys, key]))
        return replace(self, serials=(*self.serials, serial_of(certificate)), keys=keys)


@dataclass
class Operators:
    """All operators that a deployment has or had, but for the first unless it was removed."""

    path: Path
    all: tuple[Operator, ...] = ()

    @classmethod
    def read(cls, out: Path) -> "Operators":
        """Read the records in a deployment's folder; a folder without operators.json has the first operator alone.

        Raises
        ------
        DeployError
            If the file can't be read.
        """
        path = out / FILE
        try:
            content = json.loads(path.read_text("utf-8")) if path.exists() else {"operators": []}
            return cls(path, tuple(_operator(**each) for each in content["operators"]))
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise DeployError(f"{path}: can't be read ({error})") from None

    @property
    def present(self) -> list[Operator]:
        """The operators that weren't removed, the first one first."""
        first = [Operator(FIRST, MANAGE, "")] if self.has_first else []
        return [*first, *(each for each in self.all if not each.removed)]

    @property
    def has_first(self) -> bool:
        """Whether operator.crt is accepted."""
        return all(each.name != FIRST for each in self.all)

    def of_name(self, name: str) -> Operator | None:
        """Return the operator of a name, also one that was removed; None if there was none."""
        return next((each for each in [*self.present, *self.all] if each.name == name), None)

    def of_serial(self, serial: str) -> Operator | None:
        """Return the operator who has, or had, the certificate of a serial number."""
        return next((each for each in self.all if serial in each.serials), None)

    def write(self, operator: Operator) -> None:
        """Add an operator, in place of an earlier record of the same name.

        Raises
        ------
        DeployError
            If the file can't be written.
        """
        kept = [each for each in self.all if each.name != operator.name]
        now = tuple(sorted([*kept, operator], key=lambda each: each.name))
        new = self.path.with_suffix(".new")
        try:
            new.write_text(
                json.dumps({"operators": [asdict(each) for each in now]}, indent=2) + "\n", "utf-8"
            )
            os.replace(new, self.path)
        except OSError as error:
            raise DeployError(f"{self.path}: can't be written ({error.strerror})") from None
        self.all = now


def check_name(name: str) -> None:
    """Check the name of an operator.

    Raises
    ------
    DeployError
        If it isn't one, or is the first operator's.
    """
    if not _NAME.fullmatch(name) or name == FIRST:
        raise DeployError(
            f"operator {name!r}: a name is 1 to 32 of a-z, 0-9 and -, no - first, and not {FIRST!r}"
        )


def check_role(role: str) -> None:
    """Check the name of a role; DeployError if it is none."""
    if role not in ROLES:
        raise DeployError(f"--role {role!r}: must be one of {', '.join(ROLES)}")


def serial_of(certificate: x509.Certificate) -> str:
    """Return a certificate's serial number as nginx writes it: hexadecimal, two digits a byte."""
    digits = f"{certificate.serial_number:X}"
    return digits.zfill(len(digits) + len(digits) % 2)


def now() -> str:
    """Return the time, UTC, as it is on record."""
    return datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%SZ")


def _operator(**fields: object) -> Operator:
    lists = {name: tuple(fields.pop(name)) for name in ("serials", "keys")}  # type: ignore[arg-type, var-annotated]
    if fields.get("role") not in ROLES:
        raise ValueError(f"role = {fields.get('role')!r}")
    return Operator(**fields, **lists)  # type: ignore[arg-type]
