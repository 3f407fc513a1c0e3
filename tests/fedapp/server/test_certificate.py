"""A run whose SuperLink's certificate expires ends with one line."""

import json
import ssl
import threading
from collections.abc import Iterable
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import httpx
import pytest
from cryptography.hazmat.primitives.serialization import Encoding
from flwr.app import Message

from fedapp.deploy import keys
from fedapp.deploy.plan import LOOPBACK
from strategies import RunError
from tests.fedapp.server.conftest import NAMES, Devices


class ExpiresInRound3(Devices):
    """Devices of which the SuperLink doesn't let the server send a third round."""

    def __init__(self, superlink: str, trusted: ssl.SSLContext) -> None:
        super().__init__(NAMES)
        self.superlink, self.trusted, self.rounds = superlink, trusted, 0

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Send messages, of the third round to the SuperLink itself."""
        messages = list(messages)
        self.rounds += messages[0].metadata.message_type.startswith("train")
        if self.rounds == 3:
            httpx.post(self.superlink, verify=self.trusted)
        return super().push_messages(messages)


@pytest.fixture
def expired(tmp_path: Path):
    """Serve TLS with an expired certificate; its address, and what trusts its authority."""
    authority = keys.Authority.create()
    pair = authority.server_certificate([LOOPBACK], timedelta(hours=-1))
    keys.replace_pair(tmp_path / "server.crt", *pair)
    trusted = ssl.create_default_context(cadata=authority.certificate.public_bytes(Encoding.PEM).decode())
    served = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    served.load_cert_chain(tmp_path / "server.crt", tmp_path / "server.key")
    with HTTPServer((LOOPBACK, 0), BaseHTTPRequestHandler) as server:
        server.socket = served.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"https://{LOOPBACK}:{server.server_port}", trusted
        server.shutdown()


def test_an_expired_certificate_ends_a_run_with_one_line(expired, go, tmp_path):
    with pytest.raises(RunError) as raised:
        go(grid=ExpiresInRound3(*expired), num_server_rounds=5)
    assert str(raised.value) == (
        f"the SuperLink's certificate isn't trusted any more (certificate has expired), so {tmp_path / 'run'} ends; "
        "what it has stays, and resume continues from its checkpoint"
    )
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["status"], summary["reason"]) == ("failed", str(raised.value))
    assert "Traceback" not in (tmp_path / "run" / "log.txt").read_text()
    assert (tmp_path / "run" / "metrics.jsonl").read_text().count("\n") == 3
