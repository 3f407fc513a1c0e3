"""The proxy's access log of the Control API: which operator asked for what, as entries of a deployment's audit.

nginx writes a line of JSON for each request, in a format of ours; Caddy writes its own. Both know the operator by the
certificate. The SuperLink, which knows no operators, names the run or the node in a header that both log.
"""

import gzip
import json
import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fedapp.deploy.audit import Audit, digest
from fedapp.deploy.keys import OPERATOR
from fedapp.deploy.operators.records import FIRST, LOOK_METHODS, MANAGE, Operator, Operators
from fedapp.deploy.plan import DeployError
from fedapp.deploy.proxy import ABOUT, CONTROL
from fedapp.deploy.seal import entries

COMMAND = "request"  # of an entry that comes from the proxy's log
IMPORT = "access-log"  # of the signed entry after them
UNKNOWN, REMOVED = "unknown", "removed"
_METHOD = re.compile("[a-z-]+")
_ABOUT = re.compile(r"(run|node) (\d+)")


@dataclass(frozen=True)
class ControlRequest:
    """A request to the Control API, as the proxy logged it.

    Attributes
    ----------
    at : str
        When it was answered, UTC.
    operator, role : str
        Who asked; ``unknown`` if the certificate isn't an operator's.
    serial : str
        The certificate's serial number; empty if there was none.
    method : str
        The name of the method, such as ``start-run``.
    status : int
        The answer's HTTP status.
    about : str
        ``run NUMBER`` or ``node NUMBER``; empty if the SuperLink named none.
    address : str
        The client's IP address.
    line : str
        Hash of the line in the log.
    """

    at: str
    operator: str
    role: str
    serial: str
    method: str
    status: int
    about: str
    address: str
    line: str

    @property
    def is_kept(self) -> bool:
        """Whether the audit has it: it changes something or was refused, and the client had a certificate."""
        return bool(self.serial) and (self.method not in LOOK_METHODS or self.status == 403)

    @property
    def outcome(self) -> str:
        """The result in one line."""
        if self.status < 400:
            return "done"
        return "refused: permission denied" if self.status == 403 else f"failed: HTTP status {self.status}"

    @property
    def details(self) -> dict[str, str]:
        """What the audit's entry has beside the outcome."""
        named = _ABOUT.fullmatch(self.about)
        return {
            "at": self.at,
            "operator": self.operator,
            "role": self.role,
            "serial": self.serial,
            "address": self.address,
            "method": self.method,
            **({named[1]: named[2]} if named else {}),
            "log-line": self.line,
        }


def take_over(out: Path, file: Path) -> int:
    """Append the requests of a log that changed something or were refused to the audit; those that are there stay.

    Returns
    -------
    int
        The number of new entries.

    Raises
    ------
    DeployError
        If the log or the audit can't be read, or the audit can't be written or signed.
    """
    found = [each for each in read_log(file, Operators.read(out)) if each.is_kept]
    known = {entry.get("log-line") for entry in entries(out)}
    new = [each for each in found if each.line not in known]
    for each in new:
        Audit(out, COMMAND).record(each.outcome, signed=False, **each.details)
    if new:
        Audit(out, IMPORT).record(f"{len(new)} requests", signed=True, arguments=str(file.absolute()))
    return len(new)


def read_log(file: Path, operators: Operators) -> list[ControlRequest]:
    """Read the requests to the Control API in a log of nginx or Caddy, also compressed by gzip.

    Raises
    ------
    DeployError
        If the file can't be read.
    """
    try:
        content = file.read_bytes()
        if file.suffix == ".gz":
            content = gzip.decompress(content)
    except (OSError, EOFError, zlib.error) as error:
        raise DeployError(f"{file}: can't be read ({getattr(error, 'strerror', None) or error})") from None
    return list(_requests(content.decode("utf-8", "replace"), operators))


def starters(audit: list[dict[str, Any]]) -> dict[str, str]:
    """Return who started each run, as far as an audit's entries name the run."""
    found: dict[str, str] = {}
    for entry in audit:
        run = str(entry.get("run", ""))
        if not run or "failed" in str(entry.get("outcome")):
            continue
        if entry.get("command") == COMMAND and entry.get("method") == "start-run":
            found[run] = f"operator {entry.get('operator')}"
        elif entry.get("command") in ("run", "relay") and entry.get("outcome") == "started":
            found.setdefault(run, f"{entry.get('user')}@{entry.get('host')}")
    return found


def line_of(entry: Mapping[str, Any]) -> str:
    """Return an entry of this module as a line to be read."""
    about = "".join(f" {name} {entry[name]}" for name in ("run", "node") if name in entry)
    at, who, role, method, outcome = (
        entry.get(name, "?") for name in ("at", "operator", "role", "method", "outcome")
    )
    return f"{at} operator {who} ({role}) {method}{about}: {outcome}"


def _requests(text: str, operators: Operators) -> Iterator[ControlRequest]:
    for line in text.splitlines():
        # Docker puts a service's name before each line.
        start = line.find("{")
        try:
            said = json.loads(line[start:]) if start >= 0 else None
            if isinstance(said, dict) and said.get("fedapp") == "control":
                request = _of_nginx(said, line[start:], operators)
            elif isinstance(said, dict) and str(_request_of(said).get("uri", "")).startswith(CONTROL):
                request = _of_caddy(said, line[start:], operators)
            else:
                continue
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
            # Lines of other sites may be anything.
            continue
        if _METHOD.fullmatch(request.method):
            yield request


def _of_nginx(said: Mapping[str, str], line: str, operators: Operators) -> ControlRequest:
    name, role = said["operator"], said["role"]
    if not name and (operator := operators.of_serial(said["serial"])):
        name, role = operator.name, REMOVED
    return ControlRequest(
        _utc(datetime.fromisoformat(said["at"])),
        name or UNKNOWN,
        role or UNKNOWN,
        said["serial"],
        said["uri"].removeprefix(CONTROL),
        int(said["status"]),
        said["about"],
        said["address"],
        digest(line.encode()),
    )


def _of_caddy(said: Mapping[str, Any], line: str, operators: Operators) -> ControlRequest:
    request = _request_of(said)
    tls = request.get("tls") or {}
    number = f"{int(tls['client_serial']):X}" if tls.get("client_serial") else ""
    serial = number.zfill(len(number) + len(number) % 2)
    at, operator = datetime.fromtimestamp(float(said["ts"]), UTC), operators.of_serial(serial)
    name, role = (operator.name, _role_at(operator, at)) if operator else (UNKNOWN, UNKNOWN)
    if operator is None and tls.get("client_common_name") == OPERATOR:
        name, role = FIRST, MANAGE
    about = (said.get("resp_headers") or {}).get(ABOUT) or [""]
    return ControlRequest(
        _utc(at),
        name,
        role,
        serial,
        str(request["uri"]).removeprefix(CONTROL),
        int(said["status"]),
        str(about[0]),
        str(request.get("remote_ip") or request.get("client_ip") or ""),
        digest(line.encode()),
    )


def _role_at(operator: Operator, at: datetime) -> str:
    """Return the role of an operator at some time; Caddy logs none, so that an earlier one isn't known."""
    is_removed = operator.removed and at >= datetime.fromisoformat(operator.removed)
    return REMOVED if is_removed else operator.role


def _request_of(said: Mapping[str, Any]) -> Mapping[str, Any]:
    request = said.get("request")
    return request if isinstance(request, dict) else {}


def _utc(time: datetime) -> str:
    return time.astimezone(UTC).isoformat(timespec="seconds")
