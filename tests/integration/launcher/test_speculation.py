"""Servers that draft, asked for all there is by many clients at once: answers are those of a server without drafts."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.conftest import ServerFactory
from tests.servers import TextGenerationServer
from tests.tiny_models import make_tokenizer
from tests.unit.engine.speculation.test_invisible import MODELS
from tests.unit.engine.speculation.test_mtp import save
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
    # No draw with this seed is closer to another token than 0.008; one with seed 5 is at 4e-6: the last bits decide.
    "watermark": {"do_sample": True, "watermark": True, "seed": 13},
    "stop sequences": {"stop": ["egg", " the", ". ", "1"]},
    "stop sequence of several tokens": {"stop": ["pancakes?", " in a ", "until "]},
    "few tokens": {"max_new_tokens": 5},
    "one token": {"max_new_tokens": 1},
    "the whole text": {"return_full_text": True, "max_new_tokens": 20},
    "json": {"grammar": {"type": "json", "value": NUMBER}},
    "sampled json": {"grammar": {"type": "json", "value": NUMBER}, "do_sample": True, "seed": 8},
    "expression": {"grammar": {"type": "regex", "value": "([a-z]{1,7} ){6}[0-9]+"}, "top_n_tokens": 2},
}
REQUESTS = [(way, question) for way in PARAMETERS for question in QUESTIONS]
# Enough for some requests at once: others wait, or are preempted.
LITTLE_MEMORY = ("--max-total-tokens=256", "--max-input-tokens=128", "--max-batch-total-tokens=384")


def ask(server: TextGenerationServer, clients: int = CLIENTS) -> list[dict[str, Any]]:
    """Asks each question in every way, twice; the second time, all is in the prefix cache."""

    def one(request: tuple[str, str]) -> dict[str, Any]:
        way, question = request
        prompt = f"### Instruction:\n{question}\n\n### Response:\n"
        return server.generate(prompt, **{"max_new_tokens": 60, "details": True} | PARAMETERS[way])

    with ThreadPoolExecutor(clients) as threads:
        return [answer for _ in range(2) for answer in threads.map(one, REQUESTS)]


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
    _compare(ask(running), expected, running)
    if not _drafts_were_right_and_wrong(running):
        # Drafts are checked where steps with them were measured to take little longer: for a request alone, if for any.
        _compare(ask(running, clients=1), expected, running)
        assert _drafts_were_right_and_wrong(running), _told(running)


@pytest.mark.slow
def test_metrics_count_what_the_models_own_layer_drafts(server: ServerFactory, tmp_path: Path) -> None:
    """The layer is right about a model whose tokens each say which one is next."""
    folder = save("glm4_moe", tmp_path / "model", right=True, layers=12)
    make_tokenizer().save(str(folder / "tokenizer.json"))
    running = server(f"--model-id={folder}", "--dtype=float32", "--speculate=3", "--max-batch-size=4")
    running.wait_until_ready()
    assert "drafts come from the layer for multi-token prediction" in running.lines()
    drafts: dict[str, float] = {}
    for first in range(3, 12):  # drafts are checked where steps with them were measured to take little longer
        body = {"model": "tgi", "prompt": [first], "max_tokens": 24, "temperature": 0.0, "ignore_eos": True}
        httpx.post(f"{running.url}/v1/completions", json=body, timeout=60).raise_for_status()
        if (drafts := _drafts(running))["tgi_batch_speculated_tokens_total"] > 0:
            break
    print(drafts)
    assert drafts["tgi_batch_speculated_tokens_total"] == drafts["tgi_batch_accepted_tokens_total"] > 0
    assert drafts["tgi_request_skipped_tokens_sum"] > 0


def _compare(answers: list[dict[str, Any]], expected: list[dict[str, Any]], server: TextGenerationServer) -> None:
    for request, answer, wanted in zip(2 * REQUESTS, answers, expected, strict=True):
        told = f"{request}, answered {answer}, without drafts {wanted}"
        assert answer["generated_text"] == wanted["generated_text"], f"{told}\n{_told(server)}"
        assert _without_numbers(answer["details"]) == _without_numbers(wanted["details"]), f"{told}\n{_told(server)}"
        assert _logprobs(answer["details"]) == pytest.approx(_logprobs(wanted["details"]), abs=1e-2), told


def _drafts_were_right_and_wrong(server: TextGenerationServer) -> bool:
    drafts = _drafts(server)
    return drafts["tgi_batch_speculated_tokens_total"] > drafts["tgi_batch_accepted_tokens_total"] > 0 and (
        drafts["tgi_request_skipped_tokens_sum"] > 0
    )


def _told(server: TextGenerationServer) -> str:
    """Returns what the server drafted, and its log, which has the kernels and the times of steps that it measured."""
    return f"{_drafts(server)}\n{server.lines()}"


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


def _drafts(server: TextGenerationServer) -> dict[str, float]:
    counts = ("tgi_batch_speculated_tokens_total", "tgi_batch_accepted_tokens_total", "tgi_request_skipped_tokens_sum")
    lines = httpx.get(f"{server.url}/metrics").text.splitlines()
    values = {name: value for name, _, value in (line.rpartition(" ") for line in lines)}
    return {name: float(values[name]) for name in counts}
