"""Serve a report on this machine, and keep it up to date while its runs train."""

import hashlib
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from trimtab.errors import RecipeError

HOST = "127.0.0.1"


def report_server(make_page: Callable[[str | None], str], port: int = 0) -> ThreadingHTTPServer:
    """Return a server for one page, not yet started; other machines cannot reach it.

    Args:
        make_page: Builds the page at each request. Its argument is the version of the content, by which the page in a
            browser detects a newer one; None makes a page without a version.
        port: Port; 0 chooses a free one.

    Raises:
        RecipeError: The port is in use.
    """
    try:
        return ThreadingHTTPServer((HOST, port), _handler(make_page))
    except (OSError, OverflowError) as error:
        raise RecipeError(
            f"port {port} cannot be used: {getattr(error, 'strerror', None) or error}",
            "choose another --port, or remove it to use a free one",
        ) from error


def _handler(make_page: Callable[[str | None], str]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        """Answers only GET /."""

        def do_GET(self) -> None:  # noqa: N802
            """Send the page, or a short reply if the browser already has this version."""
            host = self.headers.get("Host", "").rpartition(":")[0]
            if host not in (HOST, "localhost"):  # a web page of another name that resolves to this machine
                self.send_error(HTTPStatus.FORBIDDEN)
                return
            if self.path.partition("?")[0] != "/":
                self.send_error(HTTPStatus.NOT_FOUND)
                return
            tag = f'"{hashlib.sha256(make_page(None).encode()).hexdigest()[:16]}"'
            is_known = self.headers.get("If-None-Match") == tag
            content = b"" if is_known else make_page(tag).encode()
            self.send_response(HTTPStatus.NOT_MODIFIED if is_known else HTTPStatus.OK)
            self.send_header("ETag", tag)
            self.send_header("Cache-Control", "no-cache")
            if not is_known:
                self.send_header("Content-Type", "text/html; charset=utf-8")
                self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: Any) -> None:
            """Log nothing."""

    return Handler
