"""Servers that draft, asked for all there is by many clients at once: answers are those of a server without drafts."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.conftest import ServerFactory
from tests.servers import TextGenerationServer
from tests.unit.engine.speculation.test_invisible import MODELS
from tgi_server import demo_model

CLIENTS = 16
QUESTIONS = (
    "How long do I boil an egg?",
    "How do I sharpen a chisel?",
    "How do I make pancakes? How do I make pancakes?",
)
NUMBER = {"type": "object", "properties": {"minutes": {"type": "integer"}}, "required": ["minutes"]}
PARAMETERS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "reports": {"top_n_tokens": 3, "decoder_input_details": True},
    "sampled": {"do_sample": True, "temperature": 1.2, "top_k": 20, "seed": 3},
    "sampled with reports": {"do_sample": True, "top_p": 0.8, "seed": 4, "top_n_tokens": 2},
    "typical": {"do_sample": True, "typical_p": 0.9, "seed": 7},
    "penalties": {"repetition_penalty": 1.3, "frequency_penalty": 0.7},
    "watermark": {"do_sample": True, "watermark": True, "seed": 5},
    "stop sequences": {"stop": ["egg", " the", ". ", "1"]},
    "stop sequence of several tokens": {"stop": ["pancakes?", " in a ", "until "]},
    "few tokens": {"max_new_tokens": 5},
    "one token": {"max_new_tokens": 1},
    "the whole text": {"return_full_text": True, "max_new_tokens": 20},
    "json": {"grammar": {"type": "json", "value": NUMBER}},
    "sampled json": {"grammar": {"type": "json", "value": NUMBER}, "do_sample": True, "seed": 8},
    "expression": {"grammar": {"type": "regex", "value": "([a-z]{1,7} ){6}[0-9]+"}, "top_n_tokens": 2},
}
# Enough for some requests at once: others wait, or are preempted.
LITTLE_MEMORY = ("--max-total-tokens=256", "--max-input-tokens=128", "--max-batch-total-tokens=384")


def ask(server: TextGenerationServer) -> list[dict[str, Any]]:
    """Asks each question in every way, twice; the second time, all is in the prefix cache."""

    def one(number: int) -> dict[str, Any]:
        prompt = f"### Instruction:\n{QUESTIONS[number % len(QUESTIONS)]}\n\n### Response:\n"
        asked = list(PARAMETERS.values())[number // len(QUESTIONS)]
        return server.generate(prompt, **{"max_new_tokens": 60, "details": True} | asked)

    with ThreadPoolExecutor(CLIENTS) as clients:
        return [answer for _ in range(2) for answer in clients.map(one, range(len(PARAMETERS) * len(QUESTIONS)))]


@pytest.fixture(scope="module")
def expected(demo_server: TextGenerationServer) -> list[dict[str, Any]]:
    return ask(demo_server)


@pytest.mark.slow
@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("drafter", ["n-gram", *MODELS])
def test_answers_are_those_of_a_server_without_drafts(
    drafter: str, shards: int, expected: list[dict[str, Any]], server: ServerFactory, tmp_path: Path
) -> None:
    flags = [f"--model-id={demo_model.PATH}", "--dtype=float32", "--speculate=5", *LITTLE_MEMORY]
    if drafter in MODELS:
        flags.append(f"--speculative-model={MODELS[drafter](tmp_path / drafter)}")
    running = server(*flags, f"--num-shard={shards}").wait_until_ready()
    for answer, wanted in zip(ask(running), expected, strict=True):
        assert answer["generated_text"] == wanted["generated_text"]
        assert _without_numbers(answer["details"]) == _without_numbers(wanted["details"])
        assert _logprobs(answer["details"]) == pytest.approx(_logprobs(wanted["details"]), abs=1e-2)
    values = _metrics(running)
    assert values["tgi_batch_speculated_tokens"] > values["tgi_batch_accepted_tokens"] > 0
    assert values["tgi_request_skipped_tokens_sum"] > 0


def _without_numbers(details: Any) -> Any:
    """Returns the details without log-probabilities, at whatever depth."""
    if isinstance(details, dict):
        return {name: _without_numbers(value) for name, value in details.items() if name != "logprob"}
    return [_without_numbers(each) for each in details] if isinstance(details, list) else details


def _logprobs(details: dict[str, Any]) -> list[float]:
    tokens = (
        details["prefill"] + details["tokens"] + [each for place in details.get("top_tokens") or () for each in place]
    )
    return [token["logprob"] for token in tokens if token["logprob"] is not None]


def _metrics(server: TextGenerationServer) -> dict[str, float]:
    lines = httpx.get(f"{server.url}/metrics").text.splitlines()
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")}
