"""What gets through the proxy and what doesn't: real nginx and Caddy in front of a real SuperLink."""

import http.client
import resource
import socket
import ssl
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from flwr.proto.control_pb2 import ListNodesRequest, ListNodesResponse
from flwr.supercore.protobuf.constants import PROTOBUF_MEDIA_TYPE

from fedapp.deploy import keys
from fedapp.deploy.local import LocalDeployment
from fedapp.deploy.proxy import REQUESTS_AT_ONCE, REQUESTS_PER_SECOND
from tests.deploy.proxies import PROXIES

MIB = 2**20
FLEET = "/v1/fleet/pull-messages"
CONTROL = "/v1/control/list-nodes"

# Everything that may mean the control port to one of the two that read it, and all else that the SuperLink has.
ELSEWHERE = [
    "/v1/fleet/../control/list-nodes",
    "/v1/fleet/x/../../control/list-nodes",
    "/v1/fleet/./../control/list-nodes",
    "/v1/fleet/%2e%2e/control/list-nodes",
    "/v1/fleet/%2E%2E%2Fcontrol/list-nodes",
    "/v1/fleet/..%2fcontrol/list-nodes",
    "/v1/fleet/%252e%252e/control/list-nodes",
    "/v1/fleet/..;/control/list-nodes",
    "/v1/fleet/..\\control\\list-nodes",
    "/v1/fleet/pull-messages%00/../../control/list-nodes",
    "/v1/fleet/pull-messages?/../../control/list-nodes",
    "/v1/fleet/pull-messages#/v1/control/list-nodes",
    "//v1/control/list-nodes",
    "/v1//control/list-nodes",
    "/v1/./control/list-nodes",
    "/v1/%63ontrol/list-nodes",
    "/%76%31/control/list-nodes",
    "/v1%2fcontrol%2flist-nodes",
    "/V1/CONTROL/list-nodes",
    "/v1/control/list-nodes/",
    "/v1/control/list-nodes?x=/v1/fleet/pull-messages",
    "/v1/control",
    "/v1/fleet",
    "/v1/fleet/",
    "/v1/fleet/pull-messages/",
    "/v1/runtime/acquire-task",
    "/v1/responses",
    "/health",
    "/docs",
    "/openapi.json",
    "/",
    "*",
]


class Gate:
    """The proxy's port, and what the SuperLink behind it is asked."""

    def __init__(self, deployment: LocalDeployment) -> None:
        self.deployment = deployment
        self.folder, self.port = deployment.folder, deployment.deployment.port

    def trust(self, certificate: Path | None = None) -> ssl.SSLContext:
        """Return what a client connects with: without a certificate, or with one that has its key beside it."""
        context = ssl.create_default_context(cafile=str(self.folder / "ca.crt"))
        if certificate:
            context.load_cert_chain(certificate, certificate.with_suffix(".key"))
        return context

    @contextmanager
    def open(self, certificate: Path | None = None) -> Iterator[http.client.HTTPSConnection]:
        connection = http.client.HTTPSConnection(
            "127.0.0.1", self.port, timeout=60, context=self.trust(certificate)
        )
        try:
            yield connection
        finally:
            connection.close()

    def ask(
        self, path: str, body: bytes = b"", certificate: Path | None = None, method: str = "POST"
    ) -> tuple[int, bytes]:
        """Return the status and content of the answer to one request."""
        with self.open(certificate) as connection:
            connection.request(method, path, body, {"Content-Type": PROTOBUF_MEDIA_TYPE})
            answer = connection.getresponse()
            return answer.status, answer.read()

    def seen(self) -> list[str]:
        """Return the requests that have got to the SuperLink, which logs each before it answers."""
        lines = self.deployment.log("superlink").read_text().splitlines()
        return [line for line in lines if "HTTP/1.1" in line and "/health" not in line]


@pytest.fixture(scope="module")
def superlink(tmp_path_factory):
    """A SuperLink that thinks it is behind a proxy."""
    nodes = [{"partition-id": 0, "num-partitions": 1}]
    with LocalDeployment(tmp_path_factory.mktemp("proxy") / "d", nodes, proxied=True) as deployment:
        deployment.start_superlink()
        deployment.wait_for_superlink()
        yield deployment


@pytest.fixture(scope="module", params=PROXIES)
def gate(request, superlink):
    with PROXIES[request.param](superlink):
        yield Gate(superlink)


def test_a_device_gets_to_the_superlink_which_asks_for_its_signature(gate):
    before = len(gate.seen())
    status, content = gate.ask(FLEET)
    assert (status, b"Invalid SuperNode authentication" in content) == (401, True)
    assert len(gate.seen()) == before + 1


def test_the_operator_gets_to_the_control_port(gate):
    request = ListNodesRequest().SerializeToString()
    status, content = gate.ask(CONTROL, request, gate.folder / "operator.crt")
    assert status == 200
    assert len(ListNodesResponse.FromString(content).nodes_info) == 0


def test_nobody_else_gets_to_the_control_port(gate, tmp_path):
    """No certificate, the server's, a device's own, another deployment's operator's, one signed by a device."""
    before = gate.seen()
    assert gate.ask(CONTROL)[0] == 403
    keys.write_operator(tmp_path, keys.write_authority(tmp_path))
    forged = tmp_path / "forged"
    forged.mkdir()
    key = load_ssh_private_key((gate.folder / "device-0" / "device.key").read_bytes(), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    issuer = x509.load_pem_x509_certificate((gate.folder / "ca.crt").read_bytes())
    keys.write_operator(forged, keys.Authority(key, issuer))
    for certificate in (
        forged / "operator.crt",
        gate.folder / "superlink" / "server.crt",
        gate.folder / "device-0" / "local.crt",
        tmp_path / "operator.crt",
    ):
        for path in (CONTROL, FLEET):
            try:
                status, _ = gate.ask(path, certificate=certificate)
            except (ssl.SSLError, ConnectionError):  # refused before there is a request
                continue
            assert status in (400, 403), certificate
    assert gate.seen() == before


@pytest.mark.parametrize("path", ELSEWHERE)
def test_there_is_no_other_way_to_the_superlink(path, gate):
    before = gate.seen()
    for target in (path, f"https://127.0.0.1:{gate.port}{path}"):
        for method in ("POST", "GET"):
            assert gate.ask(target, method=method)[0] in (400, 403, 404, 405), (method, target)
    assert gate.seen() == before


@pytest.mark.parametrize("path", ELSEWHERE)
def test_a_certificate_opens_no_other_path(path, gate):
    before = gate.seen()
    assert gate.ask(path, certificate=gate.folder / "operator.crt")[0] in (400, 404)
    assert gate.seen() == before


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "OPTIONS", "CONNECT"])
def test_flower_posts_and_nothing_else_does(method, gate):
    before = gate.seen()
    for path in (FLEET, CONTROL):
        assert gate.ask(path, certificate=gate.folder / "operator.crt", method=method)[0] in (
            400,
            403,
            404,
            405,
        )
    assert gate.seen() == before


def test_a_request_as_large_as_flowers_passes_and_a_larger_one_does_not(gate):
    before = len(gate.seen())
    assert gate.ask(FLEET, bytes(15 * MIB))[0] in (400, 401)  # the SuperLink's own answer
    assert len(gate.seen()) == before + 1
    assert refused_body(gate, 17 * MIB) == 413
    assert len(gate.seen()) == before + 1


def test_300_mb_without_credentials_are_refused_at_the_proxy(gate):
    before = gate.seen()
    assert refused_body(gate, 300_000_000) == 413
    assert gate.seen() == before


@pytest.mark.parametrize("gate", ["nginx"], indirect=True)
def test_300_mb_of_unknown_length_are_refused_at_nginx(gate):
    before = gate.seen()
    with gate.open() as connection:
        with suppress(OSError):  # it need not take all of it
            connection.request("POST", FLEET, (bytes(MIB) for _ in range(286)), encode_chunked=True)
        assert connection.getresponse().status == 413
    assert gate.seen() == before


def refused_body(gate: Gate, size: int) -> int:
    """Announce a body, and return the answer that comes before any of it is sent."""
    with gate.open() as connection:
        connection.putrequest("POST", FLEET)
        connection.putheader("Content-Length", str(size))
        connection.putheader("Content-Type", PROTOBUF_MEDIA_TYPE)
        connection.endheaders()
        return connection.getresponse().status


@pytest.fixture
def many_files():
    """Allow this process as many connections as the test has, and some."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 4096 if before[1] == resource.RLIM_INFINITY else min(4096, before[1])
    if wanted < 2048:
        pytest.skip(f"needs 2,048 open files; the limit is {wanted}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(wanted, before[0]), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.usefixtures("many_files")
def test_a_thousand_idle_connections_keep_nobody_out(gate):
    """More than Debian's nginx has room for: those that are silent make way."""
    with ExitStack() as stack:
        for _ in range(1000):
            stack.enter_context(socket.create_connection(("127.0.0.1", gate.port)))
        for _ in range(20):
            silent = socket.create_connection(("127.0.0.1", gate.port))
            stack.enter_context(gate.trust().wrap_socket(silent, server_hostname="127.0.0.1"))
        assert gate.ask(FLEET)[0] == 401
        assert gate.ask(CONTROL, certificate=gate.folder / "operator.crt")[0] == 200
        gate.deployment.wait_for_superlink()


@pytest.mark.parametrize("gate", ["nginx"], indirect=True)
def test_one_address_has_so_many_requests_at_once(gate):
    """The SuperLink sees nothing of those that never end; the next is told to come again, as Flower does then."""
    before = gate.seen()
    with ExitStack() as stack:
        for _ in range(REQUESTS_AT_ONCE):
            begin_request(stack.enter_context(gate.open()), FLEET)
        with gate.open() as connection:
            begin_request(connection, FLEET)
            assert connection.getresponse().status == 503
        assert gate.seen() == before


def begin_request(connection: http.client.HTTPSConnection, path: str) -> None:
    """Send a request but for the last byte of its body."""
    connection.putrequest("POST", path)
    connection.putheader("Content-Length", "2")
    connection.endheaders(b"x")


@pytest.mark.parametrize("gate", ["nginx"], indirect=True)
def test_one_address_is_slowed_down(gate):
    log = gate.folder / "nginx" / "error.log"
    request = f"GET {FLEET} HTTP/1.1\r\nHost: x\r\n\r\n".encode()
    with gate.open() as connection:
        connection.connect()
        connection.sock.sendall(request * (3 * REQUESTS_PER_SECOND))
        deadline = time.monotonic() + 60
        while "delaying request" not in log.read_text():
            assert time.monotonic() < deadline
            time.sleep(0.05)
