"""Serves a page on loopback to whoever knows its token."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from shardwright.cli.errors import UsageError

LOOPBACK = "127.0.0.1"
Content = str | Mapping[str, Any]  # a page of HTML, or JSON
Route = Callable[[dict[str, str]], Content]  # from the query to what is answered


class PageServer(ThreadingHTTPServer):
    """Answers GET requests by path, of this machine's users who have the token, and no others.

    A request must name the token in its query, and this host and port: names of other hosts that
    resolve to loopback (DNS rebinding) are refused.
    """

    daemon_threads = True

    def __init__(self, port: int, routes: Mapping[str, Route]) -> None:
        self.token = secrets.token_urlsafe(16)
        self.routes = routes
        try:
            super().__init__((LOOPBACK, port), _Handler)
        except OSError as e:
            raise UsageError(f"cannot serve on port {port} of {LOOPBACK}: {e.strerror}") from e

    @property
    def address(self) -> str:
        """The page's URL, with the token."""
        return f"http://{LOOPBACK}:{self.server_port}/?token={self.token}"


class _Handler(BaseHTTPRequestHandler):
    server: PageServer
    server_version = "shardwright"
    sys_version = ""

    def do_GET(self) -> None:
        """Answer one request."""
        asked = urlsplit(self.path)
        query = dict(parse_qsl(asked.query))
        host = self.headers.get("Host", "")
        here = {f"{name}:{self.server.server_port}" for name in (LOOPBACK, "localhost")}
        token = query.pop("token", "")
        if host not in here or not secrets.compare_digest(
            token.encode(), self.server.token.encode()
        ):
            self._send(HTTPStatus.FORBIDDEN, "open the address that the command printed")
        elif asked.path not in self.server.routes:
            self._send(HTTPStatus.NOT_FOUND, "there is no such page")
        else:
            try:
                self._send(HTTPStatus.OK, self.server.routes[asked.path](query))
            except UsageError as e:
                self._send(HTTPStatus.BAD_REQUEST, {"state": "failed", "error": str(e)})

    def _send(self, status: HTTPStatus, content: Content) -> None:
        kind = "text/html" if isinstance(content, str) else "application/json"
        text = content if isinstance(content, str) else json.dumps(content)
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("Referrer-Policy", "no-referrer")  # the address has the token
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("X-Frame-Options", "DENY")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Print nothing: requests are those of the page."""
