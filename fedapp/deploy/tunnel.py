"""The operator's way through the proxy: a port on loopback, whose connections go on with the operator's certificate.

Flower's command line can't show a client certificate: its config.toml has no key for one. So a command of Flower's is
given an address on loopback, for as long as it takes, and what comes in there goes to the proxy over TLS.
Other users of the machine are turned away, if the system tells whose a connection is (Linux does).
"""

import asyncio
import os
import socket
import ssl
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from cryptography.hazmat.primitives.serialization import Encoding

from fedapp.deploy.certificates import read_authority
from fedapp.deploy.files import flower_config, read_deployment
from fedapp.deploy.operators.records import CERTIFICATE, FIRST, FOLDER, KEY, MANAGE, Operators
from fedapp.deploy.plan import LOOPBACK, DeployError, Deployment

PIECE = 64 * 1024  # bytes that are passed on at once
CONNECTIONS = Path("/proc/net/tcp")


@contextmanager
def way_in(out: Path) -> Iterator[Path]:
    """Yield the FLWR_HOME with which Flower's commands reach a deployment's SuperLink, within the block.

    Raises
    ------
    DeployError
        If `out` holds no deployment, or the authority's or the operator's certificate can't be read.
    """
    deployment = read_deployment(out)
    if not deployment.backend:
        yield out / "flower"
        return
    with tempfile.TemporaryDirectory(prefix="fedapp-") as home, Tunnel(out, deployment) as tunnel:
        config = flower_config(f"{LOOPBACK}:{tunnel.port}", {"insecure": True})
        Path(home, "config.toml").write_text(config, "utf-8")
        yield Path(home)


class Tunnel:
    """A port on loopback that leads to the proxy, with the operator's certificate; open while it is a context.

    Parameters
    ----------
    out : Path
        The deployment's folder, with operator.crt and operator.key, or an operator's.
    deployment : Deployment

    Attributes
    ----------
    port : int
        The port, from the beginning of the context on.
    """

    def __init__(self, out: Path, deployment: Deployment) -> None:
        self._host, self._port = deployment.hosts[0], deployment.port
        self._trust = _trust(out)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="tunnel", daemon=True)
        self.port = 0

    def __enter__(self) -> "Tunnel":
        self._thread.start()
        listening = asyncio.start_server(self._serve, LOOPBACK, 0)
        self._server = asyncio.run_coroutine_threadsafe(listening, self._loop).result()
        self.port = int(self._server.sockets[0].getsockname()[1])
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._server.close)
        asyncio.run_coroutine_threadsafe(_end_all(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection, until its end or the tunnel's."""
        # Python 3.11 prints a traceback for a connection whose task is cancelled.
        with suppress(asyncio.CancelledError):
            await self._forward(reader, writer)
        writer.close()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if owner_of(writer.get_extra_info("peername"), self.port) not in (os.getuid(), 0, None):
            return
        try:
            to_proxy = await asyncio.open_connection(self._host, self._port, ssl=self._trust)
        except OSError as error:  # Flower only says that the SuperLink isn't available
            print(f"{self._host}:{self._port}: can't be reached ({error})", file=sys.stderr)
            return
        to_proxy[1].get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        there, back = _pass_on(reader, to_proxy[1]), _pass_on(to_proxy[0], writer)
        ways = [asyncio.create_task(there), asyncio.create_task(back)]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            to_proxy[1].close()


def owner_of(peer: tuple[str, int], port: int) -> int | None:
    """Return the user at the other end of a connection to a port on loopback, None where the system doesn't tell."""
    if not CONNECTIONS.exists():
        return None
    ends = [_in_hex(*peer), _in_hex(LOOPBACK, port)]
    for line in CONNECTIONS.read_text("ascii").splitlines()[1:]:
        fields = line.split()
        if fields[1:3] == ends:
            return int(fields[7])
    return -1  # it is gone already


def _in_hex(host: str, port: int) -> str:
    return f"{int.from_bytes(socket.inet_aton(host), sys.byteorder):08X}:{port:04X}"


def _trust(out: Path) -> ssl.SSLContext:
    context = ssl.create_default_context(cadata=read_authority(out).public_bytes(Encoding.PEM).decode())
    certificate = _own_certificate(out)
    try:
        context.load_cert_chain(certificate, certificate.with_name(KEY))
    except OSError as error:
        raise DeployError(f"{certificate}, {KEY}: can't be read ({error.strerror})") from None
    return context


def _own_certificate(out: Path) -> Path:
    """Return the certificate of whoever uses the folder: if the first operator was removed, a manager's."""
    operators = Operators.read(out)
    if operators.has_first:
        return out / CERTIFICATE
    for each in operators.present:
        path = out / FOLDER / each.name / CERTIFICATE
        if each.role == MANAGE and path.with_name(KEY).is_file():
            return path
    raise DeployError(
        f"{out}: has no operator's key, as {FIRST!r} was removed; use the folder of an operator: --deployment FOLDER"
    )


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Pass on all that comes, as fast as it is taken, until one of the two ends closes."""
    with suppress(OSError):
        while piece := await reader.read(PIECE):
            writer.write(piece)
            await writer.drain()


async def _end_all() -> None:
    """End every connection."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
