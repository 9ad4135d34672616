"""Grammars on /generate and /generate_stream, through a real server."""

import json
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import jsonschema
import pytest

from tests.servers import TextGenerationServer

PROMPT = "### Instruction:\nHow do I boil an egg?\n\n### Response:\n"
SCHEMA = {
    "type": "object",
    "properties": {
        "dish": {"type": "string", "maxLength": 20},
        "day": {"type": "string", "format": "date"},
        "minutes": {"type": "integer", "minimum": 1, "maximum": 90},
        "tools": {"type": "array", "items": {"enum": ["pan", "pot", "whisk"]}, "minItems": 1, "maxItems": 2},
    },
    "required": ["dish", "day", "minutes", "tools"],
    "additionalProperties": False,
}
REGEX = "[A-Z][a-z]{2,8}: [0-9]{1,3} (minutes|hours)"
LARK = 'start: word ("," word){1,3}\nword: /[a-z]{2,6}/'


def is_json(text: str) -> bool:
    jsonschema.validate(json.loads(text), SCHEMA, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER)
    return True


def matches(pattern: str) -> Callable[[str], Any]:
    return lambda text: re.fullmatch(pattern, text)


GRAMMARS: dict[str, tuple[dict[str, Any], Callable[[str], Any]]] = {
    "regex": ({"type": "regex", "value": REGEX}, matches(REGEX)),
    "json": ({"type": "json", "value": SCHEMA}, is_json),
    "json as text": ({"type": "json", "value": json.dumps(SCHEMA)}, is_json),
    "json without properties": (
        {"type": "json", "value": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4}},
        matches(r"\[(true|false)(, (true|false)){1,3}\]"),
    ),
    "json_schema": ({"type": "json_schema", "value": {"name": "dish", "schema": SCHEMA}}, is_json),
    "lark": ({"type": "lark", "value": LARK}, matches("[a-z]{2,6}(,[a-z]{2,6}){1,3}")),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"do_sample": True, "temperature": 1.5, "seed": 7},
    "warped": {"do_sample": True, "top_k": 20, "top_p": 0.9, "typical_p": 0.95, "seed": 8},
    "penalised": {"repetition_penalty": 1.4, "frequency_penalty": 0.5, "watermark": True},
    "with logprobs": {"top_n_tokens": 3, "decoder_input_details": True},
}


def post(server: TextGenerationServer, path: str, body: dict[str, Any]) -> httpx.Response:
    """Asks again while there is no turn for the grammar: those before it may have used up the time of trials."""
    while (response := httpx.post(server.url + path, json=body, timeout=60)).status_code == 429:
        time.sleep(0.5)
    return response


def stream(server: TextGenerationServer, prompt: str, **parameters: Any) -> list[dict[str, Any]]:
    body = {"inputs": prompt, "parameters": {"max_new_tokens": 200, "details": True, **parameters}}
    text = post(server, "/generate_stream", body).text
    return [json.loads(line.removeprefix("data:")) for line in text.splitlines() if line.startswith("data:")]


def generate(server: TextGenerationServer, prompt: str = PROMPT, **parameters: Any) -> dict[str, Any]:
    return server.generate(prompt, **{"max_new_tokens": 200, "details": True, **parameters})


@pytest.mark.parametrize(
    ("name", "options"),
    [
        pytest.param(name, options, marks=() if name == "json" or options == "greedy" else pytest.mark.slow)
        for name in GRAMMARS
        for options in OPTIONS
    ],
)
def test_a_text_that_ended_matches(demo_server: TextGenerationServer, name: str, options: str) -> None:
    grammar, check = GRAMMARS[name]
    answer = generate(demo_server, grammar=grammar, **OPTIONS[options])
    assert answer["details"]["finish_reason"] == "eos_token"
    assert check(answer["generated_text"]), answer["generated_text"]
    if "decoder_input_details" in OPTIONS[options]:
        return  # not for streams
    events = stream(demo_server, PROMPT, grammar=grammar, **OPTIONS[options])
    assert events[-1]["generated_text"] == answer["generated_text"]
    shown = "".join(event["token"]["text"] for event in events if not event["token"]["special"])
    assert shown == answer["generated_text"]


@pytest.mark.parametrize("name", GRAMMARS)
def test_best_of(demo_server: TextGenerationServer, name: str) -> None:
    grammar, check = GRAMMARS[name]
    answer = generate(demo_server, grammar=grammar, best_of=2, do_sample=True)
    texts = [answer["generated_text"], *(each["generated_text"] for each in answer["details"]["best_of_sequences"])]
    assert len(texts) == 2
    assert all(check(text) for text in texts), texts


def test_only_the_allowed_tokens_are_generated(demo_server: TextGenerationServer) -> None:
    found = post(demo_server, "/tokenize", {"inputs": " yes no maybe"}).json()
    allowed = [token["id"] for token in found]
    for sampling in ({}, {"temperature": 2.0, "seed": 5}):
        details = generate(demo_server, allowed_token_ids=allowed, max_new_tokens=12, **sampling)["details"]
        assert (details["generated_tokens"], details["finish_reason"]) == (12, "length")
        assert {token["id"] for token in details["tokens"]} <= set(allowed)
    chat = {"messages": [{"role": "user", "content": "Is rice white?"}], "max_tokens": 1, "logprobs": True}
    answer = post(demo_server, "/v1/chat/completions", chat | {"allowed_token_ids": allowed}).json()["choices"][0]
    assert answer["message"]["content"] in {token["text"] for token in found}


def test_one_allowed_token_is_generated_to_the_end(demo_server: TextGenerationServer) -> None:
    (first, *_) = post(demo_server, "/tokenize", {"inputs": " yes no maybe"}).json()
    for allowed in ([first["id"]], [first["id"]] * 2):
        details = generate(demo_server, allowed_token_ids=allowed, max_new_tokens=12)["details"]
        assert [token["id"] for token in details["tokens"]] == [first["id"]] * 12
    end = post(demo_server, "/generate", {"inputs": "a", "parameters": {"allowed_token_ids": [1], "details": True}})
    assert end.json()["details"]["generated_tokens"] == 1


def test_a_stop_sequence_ends_a_match_early(demo_server: TextGenerationServer) -> None:
    answer = generate(demo_server, grammar=GRAMMARS["regex"][0], stop=[": "])
    assert answer["details"]["finish_reason"] == "stop_sequence"
    assert re.fullmatch("[A-Z][a-z]{2,8}: ", answer["generated_text"])
    events = stream(demo_server, PROMPT, grammar=GRAMMARS["json"][0], stop=['", "day'])
    assert events[-1]["details"]["finish_reason"] == "stop_sequence"
    assert re.fullmatch('{"dish": ".{0,20}", "day', events[-1]["generated_text"])


def test_a_text_that_is_cut_is_the_beginning_of_a_match(demo_server: TextGenerationServer) -> None:
    for name, (grammar, _) in GRAMMARS.items():
        whole = generate(demo_server, grammar=grammar)["generated_text"]
        for length in (1, 2, 5):
            cut = generate(demo_server, grammar=grammar, max_new_tokens=length)
            assert whole.startswith(cut["generated_text"].rstrip("\ufffd")), name
            assert cut["details"]["generated_tokens"] <= length


def test_a_cached_prompt_changes_nothing(demo_server: TextGenerationServer) -> None:
    prompt = "Whisk the eggs. " * 30 + PROMPT
    for name, (grammar, _) in GRAMMARS.items():
        first, second = (generate(demo_server, f"{name}: {prompt}", grammar=grammar) for _ in range(2))
        assert first["generated_text"] == second["generated_text"]
        plain, after = (generate(demo_server, f"{name}: {prompt}", max_new_tokens=8) for _ in range(2))
        assert plain["generated_text"] == after["generated_text"]


def all_at_once(server: TextGenerationServer, requests: int) -> list[tuple[str, str]]:
    """The name of the grammar, or none, and the text, of many requests at the same time."""
    names = [*GRAMMARS, ""]

    def one(number: int) -> tuple[str, str]:
        name = names[number % len(names)]
        grammar = GRAMMARS[name][0] if name else None
        return name, generate(server, f"{number}. {PROMPT}", grammar=grammar, max_new_tokens=60)["generated_text"]

    with ThreadPoolExecutor(requests) as pool:
        return list(pool.map(one, range(requests)))


def test_many_grammars_at_once(demo_server: TextGenerationServer) -> None:
    together = all_at_once(demo_server, 21)
    assert all(GRAMMARS[name][1](text) for name, text in together if name)
    for number in (1, 2, 6):
        name, text = together[number]
        grammar = GRAMMARS[name][0] if name else None
        alone = generate(demo_server, f"{number}. {PROMPT}", grammar=grammar, max_new_tokens=60)
        assert alone["generated_text"] == text
