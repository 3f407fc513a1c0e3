"""``fedapp deploy`` in this process, and what is checked of the folder that it makes."""

import socket
import ssl
import threading
from pathlib import Path

from typer.testing import CliRunner, Result

from fedapp.cli import app


def deploy(*arguments: object) -> Result:
    """Run ``fedapp deploy`` with these arguments."""
    return CliRunner().invoke(app, ["deploy", *map(str, arguments)])


def contents(out: Path) -> dict[str, bytes]:
    """Return the content of every file of a folder, by its path there."""
    return {str(path.relative_to(out)): path.read_bytes() for path in out.rglob("*") if path.is_file()}


def shake_hands(
    made: Path, name: str, authority: Path | None = None, server: Path | None = None
) -> ssl.SSLError | None:
    """Connect over TLS on loopback as if to ``name``; return why the client refuses the server."""
    certificate = server or made / "superlink" / "server.crt"
    listening = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    listening.load_cert_chain(certificate, certificate.with_suffix(".key"))
    client = ssl.create_default_context(cafile=str(authority or made / "oslo" / "ca.crt"))
    client.verify_flags |= ssl.VERIFY_X509_STRICT
    ours, theirs = socket.socketpair()

    def serve() -> None:
        try:
            listening.wrap_socket(theirs, server_side=True).close()
        except OSError:
            theirs.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        client.wrap_socket(ours, server_hostname=name).close()
    except ssl.SSLError as error:
        return error
    finally:
        ours.close()
        thread.join()
    return None
