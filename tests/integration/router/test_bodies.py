"""A client that sends a wrong body gets a clear error, and no other client is affected."""

import json
from typing import Any

import pytest

from tests.integration.router.conftest import Router, in_one_loop

HELLO = [{"role": "user", "content": "Hello"}]
BODIES: dict[str, dict[str, Any]] = {
    "/generate": {"inputs": "Hello"},
    "/v1/chat/completions": {"messages": HELLO},
    "/v1/completions": {"prompt": "Hello"},
}
LONE_SURROGATE = '"\\ud800"'


def with_field(path: str, name: str, value: str) -> str:
    """A body of the route whose parameter `name` is the JSON text `value`."""
    body = BODIES[path]
    if path == "/generate":
        return json.dumps(body)[:-1] + f', "parameters": {{"{name}": {value}}}}}'
    return json.dumps(body)[:-1] + f', "{name}": {value}}}'


async def refused(router: Router, path: str, content: str | bytes) -> str:
    """The message that the body is refused with."""
    response = await router.http.post(path, content=content)
    answer = response.json()
    assert response.status_code == (400 if path.startswith("/v1/") else 422), answer
    error = answer["error"]
    message = error["message"] if isinstance(error, dict) else error
    assert len(message) < 1_200
    assert message.isprintable()
    return str(message)


@in_one_loop
@pytest.mark.parametrize(
    ("path", "name", "value", "fault"),
    [
        ("/v1/completions", "top_k", "4294967296", "`top_k` is 4294967296; it must be at most 2147483647"),
        ("/v1/chat/completions", "top_k", "4294967296", "`top_k` is 4294967296; it must be at most 2147483647"),
        ("/v1/chat/completions", "top_k", "1" + "0" * 300, "it must be at most 2147483647"),
        ("/v1/chat/completions", "top_k", "1" + "0" * 300_000, "not JSON: number out of range"),
        ("/v1/chat/completions", "top_k", "-2", "`top_k` is -2; it must be at least -1"),
        ("/v1/chat/completions", "n", "-1", "`n` is -1; it must be at least 1"),
        ("/v1/chat/completions", "n", "true", "`n`: Input should be a valid integer"),
        ("/v1/chat/completions", "max_tokens", "4294967296", "it must be at most 4294967295"),
        ("/v1/chat/completions", "seed", "18446744073709551616", "it must be at most 18446744073709551615"),
        ("/v1/completions", "temperature", "1e300", "`temperature` is 1e+300; it must be at most 3.4e+38"),
        ("/v1/completions", "temperature", "1e999", "`temperature`: Input should be a finite number"),
        ("/v1/completions", "temperature", "NaN", "`temperature`: Input should be a finite number"),
        ("/v1/completions", "min_p", "-1e300", "`min_p` is -1e+300; it must be at least -3.4e+38"),
        ("/v1/completions", "logit_bias", '{"0": 1e300}', "`logit_bias.0` is 1e+300; it must be at most 3.4e+38"),
        ("/v1/completions", "logit_bias", '{"4294967296": 1}', "`logit_bias` has the name"),
        ("/v1/completions", "logit_bias", '{"1e1": 1}', "`logit_bias` has the name"),
        ("/v1/completions", "logit_bias", json.dumps([1] * 2000), "`logit_bias`: Dictionary should have at most 1024"),
        ("/generate", "top_k", "4294967296", "`parameters.top_k` is 4294967296; it must be at most 2147483647"),
        ("/generate", "top_n_tokens", "4294967295", "`parameters.top_n_tokens` is 4294967295; it must be 0 to 5"),
        ("/generate", "truncate", "4294967296", "it must be at most 4294967295"),
        (
            "/generate",
            "repetition_penalty",
            "1e39",
            "`parameters.repetition_penalty` is 1e+39; it must be at most 3.4e+38",
        ),
    ],
)
async def test_numbers_out_of_bounds(shared_router: Router, path: str, name: str, value: str, fault: str):
    assert fault in await refused(shared_router, path, with_field(path, name, value))


@pytest.mark.parametrize("item", ["{}", "0", '{"role": 1, "content": 2, "tool_calls": 3, "name": 4}'])
async def test_many_wrong_items(router: Router, item: str):
    items = ",".join([item] * (1_900_000 // (len(item) + 1)))
    assert "`messages[0]" in await refused(router, "/v1/chat/completions", f'{{"messages": [{items}]}}')


async def test_at_most_ten_faults_are_told(router: Router):
    wrong = dict.fromkeys(("best_of", "max_new_tokens", "min_p", "seed", "stop", "temperature", "top_k"), True)
    wrong |= dict.fromkeys(("details", "do_sample", "grammar", "logit_bias", "watermark", "adapter_id"), 7)
    message = await refused(router, "/generate", json.dumps({"inputs": "Hello", "parameters": wrong}))
    assert message.count("; ") == 10
    assert message.endswith("; and more")


@pytest.mark.parametrize("arguments", ["[" * 5_000, '{"a":' * 5_000, LONE_SURROGATE, f'{{"a": {LONE_SURROGATE}}}'])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/chat_tokenize"])
async def test_arguments_that_are_no_json(router: Router, path: str, arguments: str):
    call = {"id": "a" * 5_000, "type": "function", "function": {"name": "clock", "arguments": arguments}}
    body = {"messages": [{"role": "assistant", "tool_calls": [call]}, *HELLO]}
    message = await refused(router, path, json.dumps(body))
    assert "the `arguments` of the tool call" in message
    assert "are not JSON" in message


@in_one_loop
@pytest.mark.parametrize(
    ("path", "content"),
    [
        ("/generate", f'{{"inputs": {LONE_SURROGATE}}}'),
        ("/tokenize", f'{{"inputs": {LONE_SURROGATE}}}'),
        ("/generate", f'{{"inputs": "a", "parameters": {{"stop": [{LONE_SURROGATE}]}}}}'),
        ("/generate", f'{{"inputs": "a", "parameters": {{"adapter_id": {LONE_SURROGATE}}}}}'),
        ("/generate", f'{{"inputs": "a", "parameters": {{"logit_bias": {{{LONE_SURROGATE}: 1}}}}}}'),
        ("/generate", f'{{"inputs": "a", "parameters": {{"grammar": {{"type": "json", "value": {LONE_SURROGATE}}}}}}}'),
        ("/v1/chat/completions", f'{{"messages": [{{"role": {LONE_SURROGATE}, "content": "a"}}]}}'),
        ("/v1/chat/completions", f'{{"messages": [], "tool_prompt": {LONE_SURROGATE}}}'),
        ("/v1/completions", f'{{"prompt": [{LONE_SURROGATE}]}}'),
        ("/v1/completions", f'{{"prompt": "a", {LONE_SURROGATE}: 1}}'),
        ("/vertex", f'{{"instances": [{{"inputs": {LONE_SURROGATE}}}]}}'),
        ("/invocations", f'{{"inputs": {LONE_SURROGATE}}}'),
        ("/generate", b'{"inputs": "\xed\xa0\x80"}'),
        *((path, '{"x": ' + "[" * 5_000) for path in ("/generate", "/v1/completions", "/vertex", "/invocations", "/")),
        ("/generate", '{"inputs": "a", "parameters": {"grammar": {"type": "json", "value": ' + '{"a":' * 5_000),
        ("/generate", json.dumps({"inputs": "a", "parameters": {"grammar": {"type": "json", "value": "[" * 5_000}}})),
    ],
)
async def test_texts_that_are_none_and_json_that_is_too_deep(shared_router: Router, path: str, content: str | bytes):
    assert "JSON" in await refused(shared_router, path, content)


FORGED = "\n2026-01-01T00:00:00.000Z INFO    router: all is well"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"inputs": "a", "parameters": {"logit_bias": {FORGED * 20_000: "x"}}}),
        ("/generate", {"inputs": "a", "parameters": {"logit_bias": {FORGED: 1}}}),
        ("/generate", {"inputs": "a", "parameters": {"grammar": {"type": FORGED * 20_000, "value": "a"}}}),
        ("/v1/chat/completions", {"messages": HELLO, "tool_choice": FORGED}),
        ("/v1/chat/completions", {"messages": HELLO, "tool_choice": FORGED * 20_000}),
        ("/v1/chat/completions", {"messages": HELLO, "response_format": {"type": FORGED}}),
    ],
)
async def test_characters_that_are_no_part_of_a_line_are_escaped_in_errors(
    router: Router, path: str, body: dict[str, Any]
):
    await refused(router, path, json.dumps(body))
