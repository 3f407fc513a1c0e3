"""The operator's way through the proxy: what goes in comes out, with a certificate, and for nobody else."""

import gc
import os
import socket
import ssl
import subprocess
import sys
import threading
import warnings
from contextlib import suppress
from pathlib import Path

import pytest

from fedapp.deploy.files import read_deployment, write_deployment
from fedapp.deploy.plan import DeployError, Deployment, devices_of
from fedapp.deploy.tunnel import Tunnel, way_in
from tests.deploy.command import deploy

PAYLOAD = os.urandom(2**20)


@pytest.fixture
def out(tmp_path, free_port):
    """A deployment whose server is this machine, and where nothing listens."""
    write_deployment(
        tmp_path / "d", Deployment(("127.0.0.1",), free_port, "/opt/fedapp", devices_of([], 1), 9093)
    )
    return tmp_path / "d"


@pytest.fixture
def echo(out):
    """In the proxy's place, who sends back what comes from somebody with a certificate; and whom it was shown."""
    trust = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    trust.load_cert_chain(out / "superlink" / "server.crt", out / "superlink" / "server.key")
    trust.load_verify_locations(out / "ca.crt")
    trust.verify_mode = ssl.CERT_REQUIRED
    listening = socket.create_server(("127.0.0.1", read_deployment(out).port))
    shown = []

    def serve() -> None:
        with suppress(OSError):  # it is closed at the end
            while True:
                connection, _ = listening.accept()
                with suppress(OSError), trust.wrap_socket(connection, server_side=True) as client:
                    shown.append(dict(pair[0] for pair in client.getpeercert()["subject"])["commonName"])
                    while piece := client.recv(65536):
                        client.sendall(piece)

    thread = threading.Thread(target=serve)
    thread.start()
    yield shown
    listening.shutdown(socket.SHUT_RDWR)
    listening.close()
    thread.join(60)
    assert not thread.is_alive()


def test_all_passes_unchanged_with_the_operators_certificate(out, echo):
    with Tunnel(out, read_deployment(out)) as tunnel:
        with socket.create_connection(("127.0.0.1", tunnel.port), timeout=60) as client:
            sender = threading.Thread(target=client.sendall, args=(PAYLOAD,))
            sender.start()
            came = b""
            while len(came) < len(PAYLOAD):
                piece = client.recv(65536)
                assert piece
                came += piece
            sender.join()
        assert came == PAYLOAD
        assert echo == ["fedapp operator"]
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", tunnel.port))


KNOCK = """
import socket, sys
connection = socket.create_connection(("127.0.0.1", int(sys.argv[1])), 60)
try:
    connection.sendall(b"x")
    print(len(connection.recv(1)))
except ConnectionError:
    print(0)
"""


@pytest.mark.skipif(
    not Path("/proc/net/tcp").exists(), reason="this system doesn't tell whose a connection is"
)
@pytest.mark.skipif(os.getuid() != 0, reason="needs another user: run it as root")
def test_another_user_of_the_machine_is_turned_away(out, echo):
    with Tunnel(out, read_deployment(out)) as tunnel:
        knock = ["/usr/bin/env", "python3", "-c", KNOCK, str(tunnel.port)]
        other = subprocess.run(
            knock, user=65534, text=True, capture_output=True, env={"PATH": "/usr/bin:/bin"}
        )
        assert (other.stdout, echo) == ("0\n", []), other.stderr
        knock[:2] = [sys.executable]
        assert subprocess.run(knock, text=True, capture_output=True).stdout == "1\n"
        assert echo == ["fedapp operator"]


def test_it_ends_without_a_word_while_a_connection_is_open(out, echo, capfd, caplog):
    with Tunnel(out, read_deployment(out)) as tunnel:
        client = socket.create_connection(("127.0.0.1", tunnel.port), timeout=60)
        client.sendall(b"a")
        assert client.recv(1) == b"a"
    assert client.recv(1) == b""
    client.close()
    assert (capfd.readouterr(), caplog.text) == (("", ""), "")


def test_a_proxy_that_is_away_is_named(out, capfd):
    deployment = read_deployment(out)
    with (
        Tunnel(out, deployment) as tunnel,
        socket.create_connection(("127.0.0.1", tunnel.port), timeout=60) as client,
    ):
        assert client.recv(1) == b""
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(f"127.0.0.1:{deployment.port}: can't be reached (")


def test_who_has_no_certificate_is_told_so(out):
    (out / "operator.key").unlink()
    with (
        pytest.raises(DeployError, match=r"operator.crt, operator.key: can't be read \(No such file"),
        way_in(out),
    ):
        pass
    result = deploy("flwr", "--deployment", out, "list")
    assert (result.exit_code, len(result.output.splitlines())) == (1, 1)
    assert result.output.startswith(f"error: {out}/operator.crt, operator.key: can't be read")


def test_the_port_is_closed_with_the_tunnel(out):
    gc.collect()  # what other tests' tunnels have left: TLS's goodbyes outlast a tunnel
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        with Tunnel(out, read_deployment(out)):
            pass
        gc.collect()
    assert [str(each.message) for each in seen if each.category is ResourceWarning] == []
