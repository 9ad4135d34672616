"""Starts the two services as child processes."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import IO

import httpx2

from shared.processes import die_with_parent

STOP_SECONDS = 20.0


class RunningService:
    """One running service. It has a session of its own, so that Ctrl-C reaches only the tool that started it."""

    def __init__(
        self,
        name: str,
        module: str,
        arguments: Sequence[str],
        output: IO[str] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Starts the service. output: gets its lines; None: the terminal. environment: further variables."""
        self.name = name
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            env={**os.environ, **(environment or {})},
            preexec_fn=die_with_parent(),
        )

    def exit_code(self) -> int | None:
        """Returns None while the service is running."""
        return self._process.poll()

    def stop(self) -> int:
        """Ends the service by a signal, and waits for its end. Returns the exit code."""
        if self.exit_code() is None:
            self._process.send_signal(signal.SIGTERM)
        try:
            return self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()


def text_generation_server(*flags: str, output: IO[str] | None = None) -> RunningService:
    return RunningService("model server", "oatmill", ["serve", *flags], output)


def llm_functionalities(
    port: int,
    endpoint: str,
    *arguments: str,
    output: IO[str] | None = None,
    environment: Mapping[str, str] | None = None,
) -> RunningService:
    flags = [f"--port={port}", f"--endpoint={endpoint}", *arguments]
    return RunningService("llm_functionalities", "llm_functionalities", flags, output, environment)


def is_listening(port: int) -> bool:
    """Returns True if something on this machine accepts connections on the port."""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


def is_ready(url: str) -> bool:
    """Returns True if the model server's /health answers with 200."""
    return _health(url)[0] == httpx2.codes.OK


def loading_progress(url: str) -> str:
    """Returns the loading progress that the model server reports; empty before it listens and once it is ready."""
    status, text = _health(url)
    found = re.search(r"\d+ %: [a-z ]+", text) if status == httpx2.codes.SERVICE_UNAVAILABLE else None
    return found[0] if found else ""


def _health(url: str) -> tuple[int, str]:
    """Returns status and body of /health; 0 and nothing if the model server does not answer."""
    try:
        response = httpx2.get(f"{url}/health", timeout=5, trust_env=False)
    except httpx2.HTTPError:
        return 0, ""
    return response.status_code, response.text


def first_to_end(services: Sequence[RunningService], poll_seconds: float = 0.2) -> RunningService:
    """Waits until one of them ends by itself."""
    while True:
        for service in services:
            if service.exit_code() is not None:
                return service
        time.sleep(poll_seconds)


def interrupt_on_signals() -> None:
    """Makes SIGTERM and SIGINT raise KeyboardInterrupt, also in background jobs, for which shells ignore SIGINT."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.default_int_handler)
