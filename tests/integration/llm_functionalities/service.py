"""The service as its users run it: a process of its own, called over gRPC."""

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc

from shared.stubs import llm_pb2, llm_pb2_grpc
from tests.logs import assert_no_traceback

START_SECONDS = 60


class Service:
    """A running service. `log` grows with its lines."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.process = process
        self.log: list[str] = []
        self._port: int | None = None
        self._listening = threading.Event()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line.rstrip())
            if match := re.search(r"listening on \S*:(\d+)", line):
                self._port = int(match.group(1))
                self._listening.set()
        self._listening.set()

    @property
    def port(self) -> int:
        self._listening.wait(START_SECONDS)
        assert self._port, "\n".join(self.log)
        return self._port

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @contextmanager
    def channel(self, *options: tuple[str, Any]) -> Iterator[grpc.Channel]:
        with grpc.insecure_channel(self.address, options=[("grpc.use_local_subchannel_pool", 1), *options]) as channel:
            yield channel

    @contextmanager
    def runner(self) -> Iterator[llm_pb2_grpc.LLMRunnerStub]:
        with self.channel() as channel:
            yield llm_pb2_grpc.LLMRunnerStub(channel)

    def threads(self) -> int:
        return len(list(Path(f"/proc/{self.process.pid}/task").iterdir()))

    def sockets(self) -> int:
        links = Path(f"/proc/{self.process.pid}/fd").iterdir()
        return sum(1 for link in links if _target(link).startswith("socket:"))

    def stop(self) -> int:
        """Asks it to stop, unless it has. Returns its exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(15)


def _target(link: Path) -> str:
    try:
        return os.readlink(link)
    except OSError:
        return ""


@contextmanager
def running_service(*flags: str, **environment: str) -> Iterator[Service]:
    """Starts the service on a free port with `flags`; stops it at the end, which has to go well."""
    process = subprocess.Popen(
        [sys.executable, "-m", "llm_functionalities", "--port", "0", "--listen-address", "127.0.0.1", *flags],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )
    service = Service(process)
    try:
        assert service.port
        yield service
        assert service.stop() == 0, "\n".join(service.log)
        assert_no_traceback("\n".join(service.log))
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def ask(runner: llm_pb2_grpc.LLMRunnerStub, prompt: str = "hello", timeout_ms: int = 10_000) -> str:
    """The text of one call."""
    return str(runner.call_model(llm_pb2.ModelRequest(formatted_prompt=prompt, timeout=timeout_ms)).text)


def reason(runner: llm_pb2_grpc.LLMRunnerStub, prompt: str = "hello", timeout_ms: int = 10_000) -> tuple[str, str]:
    """The text of one call, and the reason that the service gives for an empty one."""
    request = llm_pb2.ModelRequest(formatted_prompt=prompt, timeout=timeout_ms)
    response, call = runner.call_model.with_call(request)
    return response.text, dict(call.trailing_metadata()).get("empty-reason", "")
