"""The processes and sockets of a running server, and a client of it."""

import json
import threading
from pathlib import Path

import httpx
import psutil

from tests.servers import TextGenerationServer


def alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Returns those that run. One that tries grammars may outlive its server until it has read the tokenizer."""
    return [each for each in processes if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]


def shard_of(server: TextGenerationServer, rank: int) -> psutil.Process:
    (found,) = (
        child
        for child in psutil.Process(server.process.pid).children()
        if "tgi_server.shard.cli" in child.cmdline() and child.environ()["RANK"] == str(rank)
    )
    return found


def socket_folder(shard: psutil.Process) -> Path:
    (flag,) = (part for part in shard.cmdline() if part.startswith("--uds-path="))
    return Path(flag.partition("=")[2]).parent


class Stream:
    """A request whose answer is read in a thread."""

    def __init__(self, server: TextGenerationServer, tokens: int) -> None:
        self.events: list[dict[str, object]] = []
        self._server = server
        self._tokens = tokens
        self._thread = threading.Thread(target=self._read)
        self._thread.start()
        server.wait_until(lambda: len(self.events) > 2)

    def _read(self) -> None:
        body = {"inputs": "the quick", "parameters": {"max_new_tokens": self._tokens, "ignore_eos": True}}
        with httpx.stream("POST", f"{self._server.url}/generate_stream", json=body, timeout=60) as response:
            try:
                for line in response.iter_lines():
                    if line.startswith("data:"):
                        self.events.append(json.loads(line.removeprefix("data:")))
            except httpx.HTTPError as error:
                self.events.append({"error": str(error)})

    def finish(self) -> dict[str, object]:
        """The last event."""
        self._thread.join(timeout=60)
        return self.events[-1]
