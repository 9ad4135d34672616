"""Grammars on a server whose KV cache is too small for its requests: they make room for each other, and go on."""

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import jsonschema
import pytest

from tests.conftest import FreePort
from tests.integration.structured.test_generate import PROMPT
from tests.servers import TextGenerationServer

REQUESTS = 8
LONG_TEXT = {"type": "string", "minLength": 450, "maxLength": 520}
SCHEMA = {
    "type": "object",
    "properties": {"why the answer is right": LONG_TEXT, "minutes": {"type": "integer", "minimum": 1}},
    "required": ["why the answer is right", "minutes"],
    "additionalProperties": False,
}
REGEX = "([a-z]{2,7} ){75,85}[a-z]{2,7}"


@pytest.fixture
def server(free_port: FreePort, tmp_path: Path) -> Iterator[TextGenerationServer]:
    """Its cache holds 512 tokens; a request has up to 320."""
    flags = ("--max-total-tokens=320", "--max-input-tokens=64", "--cpu-memory=2MiB", "--dtype=float32")
    server = TextGenerationServer(free_port(), tmp_path / "log", *flags)
    try:
        yield server.wait_until_ready()
    finally:
        server.stop()


def generate(server: TextGenerationServer, index: int) -> str:
    grammar = {"type": "regex", "value": REGEX} if index % 2 else {"type": "json", "value": SCHEMA}
    answer = server.generate(PROMPT, grammar=grammar, max_new_tokens=280, do_sample=True, temperature=2.0, seed=index)
    return str(answer["generated_text"])


def preemptions(server: TextGenerationServer) -> int:
    found = re.search(r"^tgi_batch_preemption_count_total\S* (\d+)", httpx.get(f"{server.url}/metrics").text, re.M)
    return int(found[1]) if found else 0


@pytest.mark.slow
def test_preempted_requests_go_on_in_their_grammars(server: TextGenerationServer) -> None:
    alone = [generate(server, index) for index in range(REQUESTS)]
    assert preemptions(server) == 0
    with ThreadPoolExecutor(REQUESTS) as pool:
        together = list(pool.map(lambda index: generate(server, index), range(REQUESTS)))
    assert preemptions(server) > 0
    for index, text in enumerate(together):
        if index % 2:
            assert re.fullmatch(REGEX, text)
        else:
            jsonschema.validate(json.loads(text), SCHEMA)
    assert together == alone
