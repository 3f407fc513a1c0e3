"""The page of runs that go on: served on loopback to this machine alone, until it is stopped."""

import hashlib
import os
from collections.abc import Callable, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from fedapp.report.cells import UNTUNED, Tuning
from fedapp.report.files import read_summary
from fedapp.report.page.content import page_content
from fedapp.report.page.html import as_json, make_page

HOST = "127.0.0.1"

TuningOf = Callable[[Sequence[Path]], Tuning]  # the tuning of the sweep that all of some runs are of


class LivePage:
    """Serves ``/``, the page, and ``/content.json``, which it polls.

    A request with another Host header is refused, so that no other site can read the page through a browser.

    Parameters
    ----------
    runs : sequence of Path
        Folders of runs.
    port : int
        0: any that is free.
    tuning_of : callable
        Returns the tuning of the sweep that all runs are of, whenever the content is made.

    Raises
    ------
    OSError
        If the port is taken.
    NoPlotlyError
        If Plotly isn't installed.
    """

    def __init__(
        self, runs: Sequence[Path], port: int = 0, tuning_of: TuningOf = lambda runs: UNTUNED
    ) -> None:
        self.runs = list(runs)
        self._tuning_of = tuning_of
        self._made: tuple[object, str] = (None, "")
        make_page(self._content(), live=True)  # raises NoPlotlyError before the server starts
        self.server = ThreadingHTTPServer((HOST, port), self._handler())
        self.server.daemon_threads = True

    @property
    def url(self) -> str:
        """The address of the page."""
        return f"http://{HOST}:{self.server.server_port}/"

    def serve(self) -> None:
        """Answer until ``stop``, or an interrupt."""
        try:
            self.server.serve_forever()
        finally:
            self.server.server_close()

    def stop(self) -> None:
        """End ``serve``, from another thread."""
        self.server.shutdown()

    def content(self) -> str:
        """Return the content as JSON, made anew when a file of a run has changed."""
        for run in self.runs:
            read_summary(run)  # one whose process is gone is put down as failed, and so has changed
        stamp = [
            (str(path), status.st_mtime_ns, status.st_size)
            for run in self.runs
            for path in sorted(run.glob("*"))
            if (status := _status(path)) is not None
        ]
        if self._made[0] != stamp:
            self._made = (stamp, as_json({**self._content(), "live": True}))
        return self._made[1]

    def _content(self) -> dict[str, Any]:
        return page_content(self.runs, self._tuning_of(self.runs))

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        page = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                port = page.server.server_port
                if self.headers.get("Host") not in (f"{HOST}:{port}", f"localhost:{port}"):
                    self.send_error(HTTPStatus.FORBIDDEN)
                elif self.path == "/":
                    text = make_page(page._content(), live=True)
                    self._answer(text.encode(), "text/html; charset=utf-8")
                elif self.path == "/content.json":
                    self._answer(page.content().encode(), "application/json")
                else:
                    self.send_error(HTTPStatus.NOT_FOUND)

            def _answer(self, body: bytes, kind: str) -> None:
                tag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
                fresh = self.headers.get("If-None-Match") == tag
                self.send_response(HTTPStatus.NOT_MODIFIED if fresh else HTTPStatus.OK)
                self.send_header("ETag", tag)
                self.send_header("Cache-Control", "no-cache")
                self.send_header("X-Content-Type-Options", "nosniff")
                if not fresh:
                    self.send_header("Content-Type", kind)
                    self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                if not fresh:
                    self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                """Say nothing: a poll every two seconds is no news."""

        return Handler


def _status(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except OSError:  # replaced this moment
        return None
