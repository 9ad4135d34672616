"""Users of the HTTP API for Locust (https://locust.io): whole replies, streams, and chats.

    pip install -e '.[load]'
    locust -f benchmarks/locustfile.py --host http://127.0.0.1:8080                                  # page on port 8089
    locust -f benchmarks/locustfile.py --host http://127.0.0.1:8080 --headless -u 16 -r 4 -t 1m

Beside the requests, `first token` tells how long streams took to begin. A reply that is no reply counts as failed. The
variable API_KEY has the server's key, where it wants one.
"""

import json
import os
import random
import sys
from argparse import ArgumentParser
from pathlib import Path
from time import perf_counter
from typing import Any

from locust import HttpUser, constant, events, task

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.words import text

DONE = "[DONE]"


@events.init_command_line_parser.add_listener
def add_options(parser: ArgumentParser) -> None:
    parser.add_argument("--words", type=int, default=64, help="of each prompt (default: %(default)s)")
    parser.add_argument("--new-tokens", type=int, default=64, help="of each reply at most (default: %(default)s)")


class User(HttpUser):
    """Sends the next request when the last reply is complete. Every prompt is another one."""

    wait_time = constant(0)

    def on_start(self) -> None:
        if key := os.environ.get("API_KEY"):
            self.client.headers["Authorization"] = f"Bearer {key}"

    @task
    def whole_reply(self) -> None:
        with self.client.post("/generate", json=self._body(), catch_response=True) as response:
            if response.ok and "generated_text" not in response.json():
                response.failure("the reply has no text")

    @task
    def stream(self) -> None:
        self._read_stream("/generate_stream", self._body())

    @task
    def chat(self) -> None:
        messages = [{"role": "user", "content": self._prompt()}]
        options = {"max_tokens": self._options.new_tokens, "stream": True, "model": "tgi"}
        self._read_stream("/v1/chat/completions", {"messages": messages, **options})

    @property
    def _options(self) -> Any:
        return self.environment.parsed_options

    def _prompt(self) -> str:
        return text(random.Random(), self._options.words)

    def _body(self) -> dict[str, Any]:
        return {"inputs": self._prompt(), "parameters": {"max_new_tokens": self._options.new_tokens}}

    def _read_stream(self, path: str, body: dict[str, Any]) -> None:
        """Counts the request once its stream has ended, and the time until the first event on its own."""
        begun = perf_counter()
        with self.client.post(path, json=body, stream=True, catch_response=True) as response:
            seen = 0
            for line in response.iter_lines() if response.ok else ():
                event = line.decode().removeprefix("data:").strip()
                if event in ("", DONE):
                    continue
                if "error" in json.loads(event):
                    response.failure(event)
                    return
                seen += 1
                if seen == 1:
                    self._first_token(path, perf_counter() - begun)
            if response.ok and not seen:
                response.failure("the stream has no tokens")
            # Locust's own time ends with the headers of a stream.
            response.request_meta["response_time"] = 1e3 * (perf_counter() - begun)

    def _first_token(self, path: str, seconds: float) -> None:
        self.environment.events.request.fire(
            request_type="first token", name=path, response_time=1e3 * seconds, response_length=0, exception=None
        )
