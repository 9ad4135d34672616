"""A real text-generation server: launcher, router and shard in processes of their own."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import psutil

from shared.processes import die_with_parent
from tests.logs import assert_no_traceback

READY_SECONDS = 90.0
STOP_SECONDS = 30.0
POLL_SECONDS = 0.05


class TextGenerationServer:
    """One launcher and what it starts. Its lines go to the file `log`."""

    def __init__(self, port: int, log: Path, *flags: str, environment: dict[str, str] | None = None) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.log = log
        with log.open("w") as output:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "tgi_server.launcher.cli"),
                    *(f"--port={port}", "--hostname=127.0.0.1", "--prometheus-port=0", *flags),
                ],
                stdout=output,
                stderr=output,
                stdin=subprocess.DEVNULL,
                preexec_fn=die_with_parent(),
                env={"OMP_NUM_THREADS": "1", **os.environ, **(environment or {})},
            )

    def wait_until_ready(self) -> "TextGenerationServer":
        self.wait_until(self.is_healthy, READY_SECONDS)
        return self

    def wait_until(self, condition: Any, seconds: float = STOP_SECONDS) -> None:
        """Raises AssertionError with the log when the launcher ends, or the time is over, before it is true."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert self.process.poll() is None, f"it ended with {self.process.returncode}:\n{self.lines()}"
            assert time.monotonic() < deadline, f"waited in vain for {seconds} s:\n{self.lines()}"
            time.sleep(POLL_SECONDS)

    def is_healthy(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health", timeout=5).status_code == 200
        except httpx.HTTPError:
            return False

    def generate(self, prompt: str, **parameters: Any) -> dict[str, Any]:
        response = httpx.post(f"{self.url}/generate", json={"inputs": prompt, "parameters": parameters}, timeout=60)
        response.raise_for_status()
        answer: dict[str, Any] = response.json()
        return answer

    def child(self, role: str) -> psutil.Process:
        """The process of the `router` or a `shard`."""
        module = f"tgi_server.{role}.cli"
        (found,) = (child for child in psutil.Process(self.process.pid).children() if module in child.cmdline())
        return found

    def lines(self) -> str:
        return self.log.read_text()

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def wait(self, seconds: float = STOP_SECONDS) -> int:
        """The launcher's exit code, once it has ended."""
        return self.process.wait(seconds)

    def stop(self) -> int:
        """Stops it unless it has ended. Returns its exit status; fails if its log has a traceback or lines of gRPC."""
        if self.process.poll() is None:
            self.terminate()
        try:
            status = self.wait()
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise AssertionError(f"it did not stop within {STOP_SECONDS} s:\n{self.lines()}") from None
        assert_no_traceback(self.lines())
        assert ".cc:" not in self.lines()
        return status
