"""Follows a run that goes on: a small server on this machine alone, whose page asks now and then whether there is news."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from rllib_nlac.inspector.page import render


class Source:
    """What is shown, made anew where something has changed.

    Args:
        stamp: Changes whenever there is something new.
        make: Makes the data, packed.
        title: Of the page.
    """

    def __init__(self, stamp: Callable[[], str], make: Callable[[], bytes], title: str) -> None:
        self._stamp, self._make, self.title = stamp, make, title
        self._lock = threading.Lock()
        self._known: tuple[str, bytes] | None = None

    def stamp(self) -> str:
        """Of what there is now."""
        return self._stamp()

    def data(self) -> tuple[str, bytes]:
        """The data with its stamp, which is never younger than the data."""
        with self._lock:
            stamp = self._stamp()
            if self._known is None or self._known[0] != stamp:
                self._known = stamp, self._make()
            return self._known


class Server(ThreadingHTTPServer):
    """Serves one page to this machine, below a path that nobody else knows.

    Args:
        source: What it shows.
        port: 0 takes any free one.
    """

    daemon_threads = True

    def __init__(self, source: Source, port: int = 0) -> None:
        self.source = source
        self.secret = secrets.token_urlsafe(12)
        super().__init__(("127.0.0.1", port), _Handler)

    @property
    def address(self) -> str:
        """Where the page is."""
        return f"http://127.0.0.1:{self.server_address[1]}/{self.secret}/"


class _Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        host = (self.headers.get("Host") or "").rpartition(":")[0]
        place = self.path.partition("?")[0].removeprefix(f"/{self.server.secret}/")
        source = self.server.source
        if host not in ("127.0.0.1", "localhost") or place == self.path.partition("?")[0]:
            self.send_error(404)
        elif place == "stamp":
            self._send("text/plain; charset=utf-8", source.stamp().encode())
        elif place == "data":
            self._send("application/json", source.data()[1], "gzip")
        elif place == "":
            stamp, data = source.data()
            self._send("text/html; charset=utf-8", render(data, source.title, stamp))
        else:
            self.send_error(404)

    def _send(self, kind: str, body: bytes, encoding: str | None = None) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        if encoding:
            self.send_header("Content-Encoding", encoding)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:
        """Nothing: a page that asks every second is no news."""
