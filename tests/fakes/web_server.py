"""A web server of files, with ranges, that can break off its responses."""

import hashlib
import http.server
from typing import Any


class Web(http.server.ThreadingHTTPServer):
    """Serves `files` (path -> bytes), with ranges; `break_after` cuts each answer off after so many bytes.

    redirects: from a path to a place.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, bytes] = {}
        self.redirects: dict[str, str] = {}
        self.asked: list[tuple[str, str]] = []
        self.break_after: int | None = None
        self.status = 200
        self.tags = True

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/{path}"


class Handler(http.server.BaseHTTPRequestHandler):
    server: Web
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        wanted = self.headers.get("range", "")
        self.server.asked.append((self.path[1:], wanted))
        if (place := self.server.redirects.get(self.path[1:])) is not None:
            self.send_response(302)
            self.send_header("location", place)
            self.send_header("content-length", "0")
            self.end_headers()
            return
        content = self.server.files.get(self.path[1:])
        if content is None or self.server.status != 200:
            self.send_error(404 if content is None else self.server.status)
            return
        tag = f'"{hashlib.md5(content).hexdigest()}"'
        start = int(wanted.removeprefix("bytes=").removesuffix("-")) if wanted else 0
        if self.headers.get("if-range", tag) != tag:
            start = 0
        if start >= len(content) > 0:
            self.send_response(416)
            self.send_header("content-range", f"bytes */{len(content)}")
            self.send_header("content-length", "0")
            self.end_headers()
            return
        self.send_response(206 if start else 200)
        if start:
            self.send_header("content-range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        if self.server.tags:
            self.send_header("etag", tag)
        self.send_header("content-length", str(len(content) - start))
        self.end_headers()
        body = content[start:]
        self.wfile.write(body[: self.server.break_after])
        if self.server.break_after is not None and len(body) > self.server.break_after:
            self.close_connection = True

    def log_message(self, *arguments: Any) -> None:
        """Logs nothing."""
