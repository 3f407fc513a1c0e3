"""A SuperNode that ends says how wrong its clock is, by the time that the SuperLink tells."""

import ssl
import threading
import time
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from fedapp.deploy.supernode import clock_remark


@pytest.fixture
def superlink(made):
    """Return a function that asks for the remark on a clock so many seconds ahead of the server's."""

    class Handler(BaseHTTPRequestHandler):
        ahead = 0.0
        code = 200

        def date_time_string(self, timestamp: float | None = None) -> str:
            return formatdate(time.time() - self.ahead, usegmt=True)

        def do_GET(self) -> None:
            self.send_response(self.code)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    certificate = made / "superlink" / "server.crt"
    context.load_cert_chain(certificate, certificate.with_suffix(".key"))
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    address = f"127.0.0.1:{server.server_address[1]}"

    def remark(ahead: float, code: int = 200) -> str:
        Handler.ahead, Handler.code = ahead, code
        arguments = ["--superlink", address, "--root-certificates", str(made / "ca.crt"), "--host", "x"]
        return clock_remark(arguments).replace(address, "SUPERLINK")

    yield remark
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize("code", [200, 404])  # a proxy lets devices' requests alone pass
def test_a_wrong_clock_is_named(superlink, code):
    refused = (
        "SUPERLINK, which refuses requests of devices more than 5 s ahead or 305 s behind: set the clock"
    )
    ahead, behind = superlink(3600, code), superlink(-3600, code)
    assert ahead.startswith("ERROR: this device's clock is 360")
    assert ahead.endswith(f" s ahead of the clock of {refused}, with NTP say")
    assert behind.startswith("ERROR: this device's clock is 3")
    assert behind.endswith(f" s behind the clock of {refused}, with NTP say")


def test_a_clock_that_the_superlink_accepts_is_not_named(superlink, made):
    assert superlink(0) == superlink(4) == superlink(-290) == ""
    assert clock_remark(["--superlink", "127.0.0.1:1", "--root-certificates", str(made / "ca.crt")]) == ""
    assert clock_remark(["--superlink", "127.0.0.1:1", "--root-certificates", str(made / "none.crt")]) == ""
    assert clock_remark([]) == ""
