"""A stand-in for a text-generation server, on a real socket, that can fail in every way a server can."""

import json
import select
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TRICKLE_SECONDS = 0.05


@dataclass
class Request:
    path: str
    body: dict[str, Any]
    headers: dict[str, str]
    query: str = ""
    # Set once the caller closed the connection before it had its answer.
    abandoned: threading.Event = field(default_factory=threading.Event)

    @property
    def prompt(self) -> str:
        return str(self.body["inputs"])


class ModelServer:
    """Answers `/generate`, `/generate_stream` and `/health`; how, is `fault`.

    None answers with `answer` (a text, or a function of the prompt) after `delay` seconds. "hang" never answers,
    "trickle" sends its answer a byte at a time without an end, "reset" breaks the connection half-way through its
    answer, "garbage" answers with half a JSON object, "endless" never stops sending, "interim" sends 1xx
    responses without an end, "no grammars" refuses requests with a grammar, a number answers with that HTTP status. The
    fault holds for `/health` too when `sick`.
    """

    def __init__(self, port: int = 0, host: str = "127.0.0.1", tls: tuple[Path, Path] | None = None) -> None:
        self.fault: str | int | None = None
        self.sick = True
        # Status and message of "no grammars".
        self.refusal = (422, "grammar is not supported")
        self.answer: Any = "a fine answer"
        self.delay = 0.0
        # A body to answer with, whatever is asked, or a function of the request's; with `raw_status`.
        self.raw: bytes | Callable[[dict[str, Any]], bytes] | None = None
        self.raw_status = "200 OK"
        # Of the responses of /generate, and of `raw`.
        self.headers: dict[str, str] = {}
        # The answer to each decision; None: it has none.
        self.decision: dict[str, Any] | None = None
        self.decisions_asked = 0
        self.requests: list[Request] = []
        self.health_checks = 0
        self.connections = 0
        self._host = host
        self._tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER) if tls else None
        if self._tls is not None and tls is not None:
            self._tls.load_cert_chain(*tls)
        self.port = port
        self._family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._listener: socket.socket | None = None
        self._threads: list[threading.Thread] = []

    @property
    def url(self) -> str:
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self.port}"

    @property
    def prompts(self) -> list[str]:
        return [request.prompt for request in self.requests]

    def __enter__(self) -> "ModelServer":
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.kill()

    def start(self) -> None:
        listener = socket.create_server((self._host, self.port), family=self._family, backlog=512)
        self.port = listener.getsockname()[1]
        self._listener = listener
        self._run(self._accept, listener)

    def kill(self) -> None:
        """Does what the death of a process does: nothing listens any more, and every connection is reset."""
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        with self._lock:
            connections = list(self._open)
        for connection in connections:
            _reset(connection)
        for thread in self._threads:
            thread.join(5)
        self._threads.clear()

    def _run(self, target: Any, *arguments: Any) -> None:
        thread = threading.Thread(target=target, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with self._lock:
                self._open.add(connection)
                self.connections += 1
            self._run(self._serve, connection)

    def _serve(self, connection: socket.socket) -> None:
        plain = connection
        try:
            if self._tls is not None:
                connection = self._tls.wrap_socket(connection, server_side=True)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            reader = connection.makefile("rb")
            while (request := _read_request(reader)) is not None:
                try:
                    if not self._answer(connection, request):
                        break
                except OSError:
                    request.abandoned.set()
                    raise
        except OSError:
            pass
        finally:
            with self._lock:
                self._open.discard(plain)
            connection.close()

    def _answer(self, connection: socket.socket, request: Request) -> bool:
        """Returns True if the connection stays open."""
        if request.path == "/v1/decisions" and self.raw is None:  # which not every server has
            self.decisions_asked += 1
            if self.decision is None:
                _send(connection, b"{}", status="404 Not Found")
            else:
                _send(connection, json.dumps({"answers": [self.decision]}).encode())
            return True
        if request.path == "/health":
            self.health_checks += 1
            fault = self.fault if self.sick else None
        else:
            self.requests.append(request)
            fault = self.fault
        if self.raw is not None and request.path != "/health":
            body = self.raw(request.body) if callable(self.raw) else self.raw
            _send(connection, body, self.raw_status, self.headers)
            return True
        if fault is None:
            return self._speak(connection, request)
        if isinstance(fault, int):
            body = json.dumps({"error": "it is broken", "error_type": "unhealthy"}).encode()
            _send(connection, body, status=f"{fault} Because")
        elif fault == "no grammars":
            if not request.body.get("parameters", {}).get("grammar"):
                return self._speak(connection, request)
            status, message = self.refusal
            kind = "overloaded" if status == 429 else "validation"
            body = json.dumps({"error": message, "error_type": kind}).encode()
            _send(connection, body, status=f"{status} Because")
        elif fault == "hang":
            _until_abandoned(connection, request, 60)
            return False
        elif fault == "garbage":
            _send(connection, b'{"generated_text": "half an ob')
        elif fault == "reset":
            connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n{")
            time.sleep(0.01)
            _reset(connection)
            return False
        elif fault == "interim":
            while True:
                connection.sendall(b"HTTP/1.1 103 Early Hints\r\n\r\n" * 1000)
        elif fault in ("trickle", "endless"):
            self._pour(connection, request, fault)
            return False
        return True

    def _pour(self, connection: socket.socket, request: Request, fault: str) -> None:
        connection.sendall(b'HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n\r\n{"generated_text": "')
        try:
            while True:
                connection.sendall(b"a" if fault == "trickle" else b"a" * 65536)
                if fault == "trickle" and _until_abandoned(connection, request, TRICKLE_SECONDS):
                    return
        except OSError:
            request.abandoned.set()

    def _speak(self, connection: socket.socket, request: Request) -> bool:
        if request.path == "/health":
            _send(connection, b"")
            return True
        text = self.answer(request.prompt) if callable(self.answer) else self.answer
        if request.path == "/generate_stream":
            return self._stream(connection, request, text)
        if self.delay and _until_abandoned(connection, request, self.delay):
            return False
        _send(connection, json.dumps({"generated_text": text}).encode(), headers=self.headers)
        return True

    def _stream(self, connection: socket.socket, request: Request, text: str) -> bool:
        """One event for each word, each after `delay`."""
        connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        words = [word if place == 0 else f" {word}" for place, word in enumerate(text.split(" "))]
        for place, word in enumerate([*words, "</s>"]):
            if self.delay and _until_abandoned(connection, request, self.delay):
                return False
            last = place == len(words)
            details = (
                {"finish_reason": "eos_token", "generated_tokens": len(words), "seed": None, "input_length": 7}
                if last
                else None
            )
            event = {
                "index": place,
                "token": {"id": place, "text": word, "logprob": -0.1, "special": last},
                "generated_text": text if last else None,
                "details": details,
            }
            data = f"data:{json.dumps(event)}\n\n".encode()
            connection.sendall(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        connection.sendall(b"0\r\n\r\n")
        return True


def _read_request(reader: Any) -> Request | None:
    line = reader.readline()
    if not line:
        return None
    path, _, query = line.split()[1].decode().partition("?")
    headers = {}
    while header := reader.readline().strip():
        name, _, value = header.decode("latin-1").partition(":")
        headers[name.lower()] = value.strip()
    length = int(headers.get("content-length", 0))
    body = reader.read(length)
    if len(body) < length:
        return None  # the connection ended within the request
    return Request(path, json.loads(body) if body else {}, headers, query)


def _send(
    connection: socket.socket, body: bytes, status: str = "200 OK", headers: Mapping[str, str] | None = None
) -> None:
    lines = [f"{name}: {value}\r\n" for name, value in (headers or {}).items()]
    head = f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
    connection.sendall(f"{head}{''.join(lines)}\r\n".encode() + body)


def _until_abandoned(connection: socket.socket, request: Request, seconds: float) -> bool:
    """Waits. Returns True if the caller went away meanwhile."""
    readable, _, _ = select.select([connection], [], [], seconds)
    if readable and not _has_data(connection):
        request.abandoned.set()
        return True
    return False


def _has_data(connection: socket.socket) -> bool:
    if isinstance(connection, ssl.SSLSocket):
        return False  # callers send nothing after their request but the end
    try:
        return bool(connection.recv(1, socket.MSG_PEEK))
    except OSError:
        return False


def _reset(connection: socket.socket) -> None:
    """Closes with a RST, as the kernel does for a killed process with unread data."""
    try:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass
    connection.close()
