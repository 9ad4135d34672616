"""A stand-in for the Hugging Face hub: as much of its HTTP API as fetching a model takes."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Repository:
    """One model. `files` are those of every revision in `revisions`."""

    files: dict[str, bytes]
    revisions: tuple[str, ...] = ("main", COMMIT)
    # Without it the hub does not say that there is such a model.
    token: str | None = None
    gated: bool = False


@dataclass
class Hub:
    """A stand-in for the hub: the files that it serves, and the requests that it got."""

    url: str = ""
    models: dict[str, Repository] = field(default_factory=dict)
    # Breaks the next download off after so many bytes.
    break_after: int | None = None
    requests: list[str] = field(default_factory=list)
    ranges: list[str] = field(default_factory=list)

    def fetched(self) -> list[str]:
        """Names of the files whose content was asked for."""
        return [
            request.rpartition("/")[2]
            for request in self.requests
            if request.startswith("GET") and "/resolve/" in request
        ]


@contextmanager
def running_hub() -> Iterator[Hub]:
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler_of(hub))
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _handler_of(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self._answer()

        def do_GET(self) -> None:
            self._answer()

        def log_message(self, *_: object) -> None:
            """Tests look at `hub.requests`."""

        def _answer(self) -> None:
            path = urlsplit(self.path).path
            hub.requests.append(f"{self.command} {path}")
            match path.strip("/").split("/"):
                case ["api", "models", owner, name, "revision", revision]:
                    if repository := self._repository(f"{owner}/{name}", revision):
                        siblings = [{"rfilename": file} for file in repository.files]
                        self._json({"id": f"{owner}/{name}", "sha": COMMIT, "siblings": siblings})
                case ["api", "models", owner, name, "tree", revision]:
                    if repository := self._repository(f"{owner}/{name}", revision):
                        self._json([_entry(*file) for file in repository.files.items()])
                case [owner, name, "resolve", revision, *file]:
                    if repository := self._repository(f"{owner}/{name}", revision):
                        self._file(repository.files.get("/".join(file)))
                case _:
                    self._refuse(404, "EntryNotFound")

        def _repository(self, name: str, revision: str) -> Repository | None:
            repository = hub.models.get(name)
            if repository and repository.gated:
                self._refuse(403, "GatedRepo")
                return None
            token = repository.token if repository else None
            if repository is None or (token and self.headers["Authorization"] != f"Bearer {token}"):
                self._refuse(401, "RepoNotFound")
                return None
            if revision not in repository.revisions:
                self._refuse(404, "RevisionNotFound")
                return None
            return repository

        def _file(self, content: bytes | None) -> None:
            if content is None:
                self._refuse(404, "EntryNotFound")
                return
            start = 0
            if asked := self.headers["Range"]:
                hub.ranges.append(asked)
                start = int(asked.removeprefix("bytes=").split("-")[0])
            self.send_response(206 if asked else 200)
            if asked:
                self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
            self.send_header("ETag", f'"{hashlib.sha1(content).hexdigest()}"')
            self.send_header("X-Repo-Commit", COMMIT)
            self._body(content[start:])

        def _body(self, content: bytes) -> None:
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if self.command == "HEAD":
                return
            if hub.break_after is not None and len(content) > hub.break_after:
                content, hub.break_after, self.close_connection = content[: hub.break_after], None, True
            self.wfile.write(content)

        def _json(self, content: object) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self._body(json.dumps(content).encode())

        def _refuse(self, status: int, code: str) -> None:
            """The hub names the kind of error in a header."""
            self.send_response(status)
            self.send_header("X-Error-Code", code)
            self.send_header("Content-Length", "0")
            self.end_headers()

    return Handler


def _entry(path: str, content: bytes) -> dict[str, object]:
    return {"type": "file", "path": path, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
