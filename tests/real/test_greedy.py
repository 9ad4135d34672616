"""Greedy answers of the trained models are those of `transformers` in float32 on the dequantized weights.

A token may differ from the reference's where both are almost equally likely. The numbers of the kernels with inputs in
16 or 8 bits differ more; tests/real/test_perplexity.py bounds what that costs.
"""

import json
import os
import subprocess
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import PreTrainedModel

from oatmill import LLM
from tests.conftest import FreePort
from tests.real.calls import generated_tokens, post
from tests.real.conftest import CACHE, START_SECONDS, RealServers
from tests.real.models import model_path, reference_model, reference_tokenizer
from tests.servers import TextGenerationServer
from tests.timing import until

ROOT = Path(__file__).parents[2]
GIVEN: dict[str, list[Any]] = json.loads(Path(__file__).with_name("prompts.json").read_text(encoding="utf-8"))
TOKENS = 32
# Of the range of the logits: where the two largest are as close, either token is greedy.
TIE = 1e-3


@dataclass(frozen=True)
class GreedyAnswer:
    """The token ids of a prompt, and those that a server has added; `text` is without special tokens."""

    prompt: str
    prompt_ids: list[int]
    ids: list[int]
    text: str
    finish_reason: str


def prompts_of(name: str, server: TextGenerationServer) -> list[str]:
    """Returns the 20 prompts. A base model gets the last messages of the chats as they are."""
    if name == "qwen":
        chats = [post(server, "/chat_tokenize", {"messages": chat})["templated_text"] for chat in GIVEN["chats"]]
    else:
        chats = [chat[-1]["content"] for chat in GIVEN["chats"]]
    return [*GIVEN["prompts"], *chats]


def greedy_answers(name: str, server: TextGenerationServer) -> list[GreedyAnswer]:
    """Returns the answers to all prompts, which the server computes in one batch."""

    def answer(prompt: str) -> GreedyAnswer:
        tokens, text, reason = generated_tokens(server, prompt, TOKENS)
        ids = [token["id"] for token in tokens]
        return GreedyAnswer(prompt, reference_tokenizer(name)(prompt)["input_ids"], ids, text, reason)

    prompts = prompts_of(name, server)
    reference_tokenizer(name)  # once, before the threads
    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(answer, prompts))


@pytest.fixture(scope="module", params=["qwen", "gemma"])
def answers(request: pytest.FixtureRequest, real_server: RealServers) -> tuple[str, list[GreedyAnswer]]:
    server = real_server(request.param, "--dtype=float32", "--max-total-tokens=4096")
    return request.param, greedy_answers(request.param, server)


def differences(model: PreTrainedModel, answer: GreedyAnswer) -> Iterator[str]:
    """Yields a line for each token of an answer that the model would not have chosen after the ones before it."""
    with torch.inference_mode():
        output = model(torch.tensor([answer.prompt_ids + answer.ids]), use_cache=False)
    logits = output.logits[0, len(answer.prompt_ids) - 1 : -1]  # [tokens of the answer, vocabulary]
    for place, (row, token) in enumerate(zip(logits, answer.ids, strict=True)):
        behind, spread = (row.max() - row[token]).item(), (row.max() - row.min()).item()
        if behind > TIE * spread:
            chosen = int(row.argmax())
            yield f"{answer.prompt!r}: token {place} is {token}, not {chosen}; logits differ by {behind} of {spread}"


def test_tokens_are_those_of_transformers(answers: tuple[str, list[GreedyAnswer]]) -> None:
    name, found = answers
    model = reference_model(name)
    assert [line for answer in found for line in differences(model, answer)] == []
    ends = set(end_ids(model))
    for answer in found:
        assert (answer.finish_reason == "eos_token") == (answer.ids[-1] in ends), answer
        assert answer.finish_reason == "eos_token" or len(answer.ids) == TOKENS, answer


def end_ids(model: PreTrainedModel) -> Sequence[int]:
    ends = model.generation_config.eos_token_id
    return ends if isinstance(ends, list) else [ends]


def test_chats_have_the_same_answers(answers: tuple[str, list[GreedyAnswer]], real_server: RealServers) -> None:
    name, found = answers
    if name != "qwen":
        pytest.skip("a base model has no chats")
    server = real_server(name, "--dtype=float32", "--max-total-tokens=4096")
    for chat, expected in zip(GIVEN["chats"], found[len(GIVEN["prompts"]) :], strict=True):
        body = {"messages": chat, "max_tokens": TOKENS, "temperature": 0}
        choice = post(server, "/v1/chat/completions", body)["choices"][0]
        assert choice["message"]["content"] == expected.text
        assert choice["finish_reason"] == ("stop" if expected.finish_reason == "eos_token" else "length")


def test_a_model_in_this_process_has_the_same_tokens(qwen_server: TextGenerationServer) -> None:
    prompts = GIVEN["prompts"][:10]
    with LLM(model_path("qwen"), max_total_tokens=4096, packed_weights_cache=CACHE) as llm:
        for options in ({"temperature": 0}, {"temperature": 0.8, "top_p": 0.9, "seed": 7}):
            for prompt, result in zip(prompts, llm.generate(prompts, max_tokens=TOKENS, **options), strict=True):
                body = {"model": "tgi", "prompt": prompt, "max_tokens": TOKENS, "return_token_ids": True, **options}
                choice = post(qwen_server, "/v1/completions", body)["choices"][0]
                assert (result.token_ids, result.text) == (choice["token_ids"], choice["text"]), prompt


def test_default_numbers_agree_mostly(
    answers: tuple[str, list[GreedyAnswer]], real_server: RealServers, capsys: pytest.CaptureFixture[str]
) -> None:
    name, expected = answers
    found = greedy_answers(name, real_server(name, "--max-total-tokens=4096"))
    with capsys.disabled():
        print(f"\n{name} in the default dtype beside float32: {agreement(expected, [each.ids for each in found])}")


def agreement(expected: Sequence[GreedyAnswer], found: Sequence[Sequence[int]]) -> str:
    """Returns how many of the answers agree, and how many of their tokens before the first that differs."""
    same = [
        len(list(takewhile(lambda pair: pair[0] == pair[1], zip(answer.ids, ids, strict=False))))
        for answer, ids in zip(expected, found, strict=True)
    ]
    whole = sum(count == len(answer.ids) for count, answer in zip(same, expected, strict=True))
    total = sum(len(answer.ids) for answer in expected)
    return f"{whole} of {len(expected)} answers, {sum(same)} of {total} tokens before the first difference"


@pytest.fixture
def llama_cpp(free_port: FreePort, answers: tuple[str, list[GreedyAnswer]], tmp_path: Path) -> Iterator[str]:
    """Returns the URL of llama.cpp's server of the same file."""
    if (python := os.environ.get("OATMILL_LLAMA_PYTHON")) is None:
        pytest.skip("OATMILL_LLAMA_PYTHON names no interpreter that has xllamacpp")
    port = free_port()
    command = (python, "-m", "benchmarks.llama_cpp_server", model_path(answers[0]), str(port), "--parallel", "1")
    with (tmp_path / "log").open("w") as log, subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log) as process:
        url = f"http://127.0.0.1:{port}"
        try:
            until(lambda: is_ready(url), START_SECONDS)
            yield url
        finally:
            process.terminate()


def is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health").status_code == 200
    except httpx.HTTPError:
        return False


def test_agreement_with_llama_cpp_is_printed(
    llama_cpp: str, answers: tuple[str, list[GreedyAnswer]], capsys: pytest.CaptureFixture[str]
) -> None:
    name, expected = answers
    found = []
    for answer in expected:
        body = {"prompt": answer.prompt_ids, "n_predict": TOKENS, "temperature": 0, "return_tokens": True}
        response = httpx.post(f"{llama_cpp}/completion", json=body, timeout=START_SECONDS)
        found.append(response.raise_for_status().json()["tokens"])
    with capsys.disabled():
        print(f"\nllama.cpp beside {name} in float32: {agreement(expected, found)}")
