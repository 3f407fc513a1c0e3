"""What is brought home from the server: a run's folder, each file checked by its hash, and the log of a device."""

import hashlib
import http.client
import json
import ssl
import time
import tomllib
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.error import HTTPError

from fedapp.deploy.files import CONNECTION, read_deployment
from fedapp.deploy.nodes import NodeRecords
from fedapp.deploy.plan import DeployError
from fedapp.deploy.run_files import LIST, PIECE, READ
from fedapp.deploy.runs import run_of
from fedapp.deploy.shared_logs import APP, SUPERNODE, TELL
from fedapp.deploy.tunnel import way_in

TIMEOUT = (
    60.0  # seconds of silence after which a connection counts as broken; hashing a folder may take as long
)
ATTEMPTS, PAUSE = 5, 1.0  # connections in a row that bring nothing, and seconds between two
LOG = "superlink.log"  # in the folder: the run's log as the SuperLink has it


@dataclass(frozen=True)
class Fetched:
    """What was fetched: the folder here, the number of its files and bytes, and how many bytes came."""

    folder: Path
    files: int
    bytes: int
    new: int


def fetch(out: Path, run: str, into: Path) -> Fetched:
    """Copy a run's folder from the server to a folder of its name in ``into``; what is there already stays.

    A file whose transfer broke off is continued where it ended, within the call and in a later one.

    Parameters
    ----------
    out : Path
        The deployment's folder.
    run : str
        The run's number at the SuperLink, "" for the last one, or the name of its folder.
    into : Path
        Where runs are to be.

    Raises
    ------
    DeployError
        If there is no such run, the server can't be reached, a file isn't what the server said, or can't be written.
    """
    log: list[str] = []
    if not run or run.isdecimal():
        found = run_of(out, run)
        log, asked = found.log, found.folder
        if not asked:
            raise DeployError(f"run {found.run_id}: its log names no folder ({found.status})")
    else:
        asked = run
    folder = into / PurePosixPath(asked).name
    with _server(out) as server:
        listed = server.listed(asked)
        try:
            new = sum(_take(server, asked, folder, file) for file in listed)
            if log:
                (folder / LOG).write_text("\n".join(log) + "\n", "utf-8")
        except OSError as error:
            raise DeployError(f"{error.filename or folder}: can't be written ({error.strerror})") from None
    return Fetched(folder, len(listed), sum(file["bytes"] for file in listed), new)


def device_log(out: Path, device: str) -> list[str]:
    """Return the last lines of a device's log that its site shares, with headings.

    Raises
    ------
    DeployError
        If there is no such device, it isn't registered, shares nothing, or the server can't be reached.
    """
    name = read_deployment(out).device(device).name
    node = NodeRecords.read(out).of_device(out, name)
    if node is None:
        raise DeployError(f"device {name!r}: isn't registered; 'fedapp deploy register {out}'")
    with _server(out) as server, server.post(TELL, node=node.node_id) as answer:
        said = json.loads(answer.read())
    if not said:
        raise DeployError(
            f"device {name!r}: has sent no log since the SuperLink began; its site allows it by share-logs = true"
        )
    lines = []
    for whose, head in ((SUPERNODE, "SuperNode"), (APP, "app")):
        lines += [f"{name}, {head}, {said['came']}:", *(f"  {line}" for line in said[whose])]
    return lines


def _take(server: "_Server", run: str, folder: Path, file: dict[str, Any]) -> int:
    """Fetch a file unless it is here; return the number of bytes that came."""
    name, size, digest = PurePosixPath(file["path"]), int(file["bytes"]), str(file["sha256"])
    if name.is_absolute() or ".." in name.parts:
        raise DeployError(f"run {run!r}: the server names a file {file['path']!r} outside of the folder")
    path = folder / name
    if path.is_file() and path.stat().st_size == size and _digest(path) == digest:
        return 0
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")
    begun = part.stat().st_size if part.is_file() else 0
    if begun > size:
        part.unlink()
        begun = 0
    came = _continue(server, run, str(name), part, begun, size)
    if _digest(part) != digest:
        part.unlink()
        raise DeployError(
            f"run {run!r}: {name} isn't what the server said, perhaps because the run goes on; fetch it again"
        )
    part.replace(path)
    return came


def _continue(server: "_Server", run: str, name: str, part: Path, begun: int, size: int) -> int:
    """Append what is missing to a part of a file, over as many connections as it takes."""
    have, failed = begun, 0
    with part.open("ab") as target:
        while have < size:
            before, reason = have, "the connection ended"
            try:
                with server.post(READ, run=run, path=name, offset=have, bytes=size - have) as answer:
                    while piece := answer.read(PIECE):
                        target.write(piece)
                        have += len(piece)
            except (http.client.HTTPException, ConnectionError, TimeoutError, ssl.SSLError) as error:
                reason = str(error) or type(error).__name__
            failed = 0 if have > before else failed + 1
            if failed == ATTEMPTS:
                raise DeployError(
                    f"run {run!r}: {name}: {have} of {size} bytes came ({reason}); fetch it again"
                )
            if have < size:
                time.sleep(PAUSE)
    return have - begun


def _digest(path: Path) -> str:
    with path.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


class _Server:
    """The SuperLink's HTTP API, over the way in of Flower's own commands."""

    def __init__(self, url: str, trust: ssl.SSLContext | None) -> None:
        self._url, self._trust = url, trust

    def listed(self, run: str) -> list[dict[str, Any]]:
        """Return path, bytes and sha256 of each file of a run's folder; DeployError as of ``post``."""
        try:
            with self.post(LIST, run=run) as answer:
                return list(json.loads(answer.read())["files"])
        except (http.client.HTTPException, OSError, ValueError, KeyError) as error:
            if isinstance(error, DeployError):
                raise
            raise DeployError(
                f"{self._url}: the list of files can't be read ({error}); fetch again"
            ) from None

    def post(self, api: str, **fields: Any) -> Any:
        """Ask for something; DeployError if the server refuses or can't be reached."""
        request = urllib.request.Request(
            self._url + api, json.dumps(fields).encode(), {"Content-Type": "application/json"}
        )
        try:
            return urllib.request.urlopen(request, timeout=TIMEOUT, context=self._trust)
        except HTTPError as refused:
            raise DeployError(_said(refused)) from None
        except OSError as error:
            raise DeployError(f"{self._url}: can't be reached ({getattr(error, 'reason', error)})") from None


def _said(refused: HTTPError) -> str:
    try:
        answer = dict(json.loads(refused.read()))
        return str(
            answer["detail"] if "detail" in answer else answer["error"]
        )  # the proxy's, or the server's
    except (ValueError, KeyError, TypeError, OSError):
        return (
            f"the server hands out no runs ({refused.code} {refused.reason}): "
            "is it started by this version's start-up files ('fedapp deploy refresh'), and is this its operator?"
        )


@contextmanager
def _server(out: Path) -> Iterator[_Server]:
    with way_in(out) as home:
        known = tomllib.loads(Path(home, "config.toml").read_text("utf-8"))["superlink"][CONNECTION]
        if known.get("insecure"):  # the tunnel, which goes on over TLS
            yield _Server(f"http://{known['address']}", None)
        else:
            trust = ssl.create_default_context(cafile=known["root-certificates"])
            yield _Server(f"https://{known['address']}", trust)
