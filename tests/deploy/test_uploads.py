"""A SuperNode's uploads: over a link that is slower than Flower's timeout allows, and after one that broke off."""

import socket
import ssl
import threading
import time

import httpx
import pytest
from flwr.proto.message_pb2 import PushObjectRequest, PushObjectResponse
from flwr.supercore.protobuf.constants import PROTOBUF_MEDIA_TYPE
from flwr.supercore.retry import make_simple_http_retry_invoker
from flwr.supernode.fleet_http_client import FleetHttpClient

from fedapp.deploy.supernode import upload_steadily

OBJECT = 5 << 20  # bytes: Flower's largest
RATE = 1 << 20  # bytes a second
TIMEOUT = 1.5  # seconds: of Flower's 30, for a link that is so much faster


@pytest.fixture
def kind(monkeypatch):
    """Flower's client of a SuperNode, changed until the end of the test."""
    for name in ("__init__", "PushObject", "_unary_unary"):
        monkeypatch.setattr(FleetHttpClient, name, getattr(FleetHttpClient, name))
    assert upload_steadily()
    return FleetHttpClient


def request(number: int = 0) -> PushObjectRequest:
    return PushObjectRequest(session_id="session", object_id=str(number), object_content=bytes(8))


def answering(kind, *answers: PushObjectResponse | Exception):
    """A client to which a SuperLink gives these answers, one by one."""
    left = list(answers)

    def answer(_: httpx.Request) -> httpx.Response:
        found = left.pop(0)
        if isinstance(found, Exception):
            raise found
        return httpx.Response(
            200, content=found.SerializeToString(), headers={"content-type": PROTOBUF_MEDIA_TYPE}
        )

    client = kind("http://127.0.0.1:1")
    client._client = httpx.Client(transport=httpx.MockTransport(answer))
    return client


def test_an_object_that_is_sent_again_and_has_arrived_already_counts_as_stored(kind):
    refused = PushObjectResponse(stored=False)
    client = answering(kind, httpx.ReadTimeout("cut"), refused, refused)
    with pytest.raises(httpx.ReadTimeout):
        client.PushObject(request())
    assert client.PushObject(request()).stored
    assert not client.PushObject(request(1)).stored  # its upload didn't break off: it is refused


def test_an_object_that_is_refused_at_once_isnt_stored(kind):
    client = answering(kind, PushObjectResponse(stored=False), PushObjectResponse(stored=True))
    assert not client.PushObject(request()).stored
    assert client.PushObject(request()).stored


def test_a_handshake_that_times_out_or_breaks_off_is_tried_again(kind):
    stored = PushObjectResponse(stored=True)
    for error in (
        httpx.ConnectTimeout("_ssl.c:989: The handshake operation timed out"),
        httpx.ConnectError("[SSL: UNEXPECTED_EOF_WHILE_READING] EOF occurred in violation of protocol"),
    ):
        client = answering(kind, error, stored)
        assert make_simple_http_retry_invoker().invoke(client.PushObject, request()).stored


def test_a_wrong_certificate_is_given_up_at_once(kind):
    client = answering(kind, httpx.ConnectError("[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed"))
    with pytest.raises(httpx.ConnectError, match="CERTIFICATE"):
        make_simple_http_retry_invoker().invoke(client.PushObject, request())


def answer_slowly(listener: socket.socket, trust: ssl.SSLContext) -> None:
    """Take a request at a rate, and answer it."""
    plain, _ = listener.accept()
    with trust.wrap_socket(plain, server_side=True) as connection:
        taken = b""
        while b"\r\n\r\n" not in taken:
            taken += connection.recv(1 << 12)
        head, _, body = taken.partition(b"\r\n\r\n")
        (length,) = (
            int(line.split(b":")[1])
            for line in head.split(b"\r\n")
            if line.lower().startswith(b"content-length")
        )
        left = length - len(body)
        while left and (part := connection.recv(min(left, 1 << 15))):
            left -= len(part)
            time.sleep(len(part) / RATE)
        content = PushObjectResponse(stored=True).SerializeToString()
        head = f"HTTP/1.1 200 OK\r\ncontent-type: {PROTOBUF_MEDIA_TYPE}\r\ncontent-length: {len(content)}\r\n\r\n"
        connection.sendall(head.encode() + content)


@pytest.mark.skipif(
    not hasattr(socket, "TCP_NOTSENT_LOWAT"), reason="the system doesn't bound what isn't sent"
)
def test_an_object_passes_a_link_for_which_the_kernels_buffers_hold_more_than_the_timeout(kind, made):
    trust = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    trust.load_cert_chain(made / "superlink" / "server.crt", made / "superlink" / "server.key")
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        server = threading.Thread(target=answer_slowly, args=(listener, trust), daemon=True)
        server.start()
        address = f"https://127.0.0.1:{listener.getsockname()[1]}"
        client = kind(address, verify=str(made / "ca.crt"), timeout=TIMEOUT)
        began = time.monotonic()
        asked = PushObjectRequest(session_id="session", object_id="0", object_content=bytes(OBJECT))
        assert client.PushObject(asked).stored
        assert time.monotonic() - began > 2 * TIMEOUT
        server.join(10)
