"""/v1/chat/completions over a scheduler that answers at once."""

import json
from typing import Any

import httpx

from tests.fakes.router_service import ScriptedScheduler
from tests.fakes.vocabularies import EOS

MESSAGES = [{"role": "user", "content": "hello"}]
TOOLS = [{"type": "function", "function": {"name": "clock", "parameters": {"type": "object"}}}]
CALL = '{"name": "clock", "arguments": {"zone": "UTC"}}'


async def chat(client: httpx.AsyncClient, **body: Any) -> dict[str, Any]:
    response = await client.post("/v1/chat/completions", json={"model": "m", "messages": MESSAGES, **body})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


async def chunks(client: httpx.AsyncClient, **body: Any) -> list[dict[str, Any]]:
    request = {"model": "m", "messages": MESSAGES, "stream": True, **body}
    text = (await client.post("/v1/chat/completions", json=request)).text
    *events, done = [event.removeprefix("data:").strip() for event in text.split("\n\n") if event]
    assert done == "[DONE]"
    return [json.loads(event)["choices"][0] for event in events]


async def test_the_prompt_is_the_rendered_conversation(client: httpx.AsyncClient, scheduler: ScriptedScheduler):
    answer = await chat(client)
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": "hello world"}
    (request,) = scheduler.submitted
    prompt = "".join(scheduler._tokenizer.decode([each]) for each in request.input_ids)
    assert prompt == "user: hello\nassistant:"
    assert answer["usage"]["prompt_tokens"] == len(request.input_ids)


async def test_logprobs_tell_the_bytes_of_each_token(client: httpx.AsyncClient):
    (choice,) = (await chat(client, logprobs=True))["choices"]
    told = choice["logprobs"]["content"]
    assert [each["token"] for each in told] == ["hello", " world", EOS]
    assert bytes(told[0]["bytes"]).decode() == "hello"


async def test_logprobs_tell_each_token_though_its_text_is_held_back(client: httpx.AsyncClient):
    for stop in ("hello world!", "hello wor"):
        (choice,) = (await chat(client, logprobs=True, stop=stop))["choices"]
        tokens = [each["token"] for each in choice["logprobs"]["content"]]
        assert tokens[:2] == ["hello", " world"]
        streamed = await chunks(client, logprobs=True, stop=stop)
        assert [each["token"] for chunk in streamed for each in chunk["logprobs"]["content"]] == tokens


async def test_a_tool_is_called_alike_whole_and_streamed(client: httpx.AsyncClient, scheduler: ScriptedScheduler):
    scheduler.texts = [CALL]
    (choice,) = (await chat(client, tools=TOOLS))["choices"]
    function = choice["message"]["tool_calls"][0]["function"]
    assert (function["name"], json.loads(function["arguments"])) == ("clock", {"zone": "UTC"})
    assert choice["finish_reason"] == "tool_calls"
    streamed = await chunks(client, tools=TOOLS)
    pieces = [each["delta"]["tool_calls"][0]["function"] for each in streamed]
    assert pieces[0]["name"] == "clock"
    assert json.loads("".join(each["arguments"] for each in pieces)) == {"zone": "UTC"}
    assert streamed[-1]["finish_reason"] == "tool_calls"


async def test_a_call_that_a_stop_sequence_cuts_off_finishes_as_a_text_does(
    client: httpx.AsyncClient, scheduler: ScriptedScheduler
):
    scheduler.texts = [CALL]
    for body in ({"stop": ["TC"]}, {"stop": ['"}']}):
        assert (await chat(client, tools=TOOLS, **body))["choices"][0]["finish_reason"] == "stop"
        assert (await chunks(client, tools=TOOLS, **body))[-1]["finish_reason"] == "stop"
    scheduler.texts = [CALL + CALL]
    (choice,) = (await chat(client, tools=TOOLS, stop=["}{"]))["choices"]  # behind the arguments of the first
    assert (len(choice["message"]["tool_calls"]), choice["finish_reason"]) == (1, "tool_calls")


async def test_each_choice_decides_for_itself_and_is_generated_once(
    client: httpx.AsyncClient, scheduler: ScriptedScheduler
):
    scheduler.texts = ["hello world", CALL]
    choices = (await chat(client, tools=TOOLS, n=2))["choices"]
    assert choices[0]["message"]["content"] == "hello world"
    assert choices[1]["message"]["tool_calls"][0]["function"]["name"] == "clock"
    assert len(scheduler.submitted) == 2


async def test_a_conversation_without_tools_streams_its_text(client: httpx.AsyncClient):
    streamed = await chunks(client)
    assert "".join(each["delta"]["content"] for each in streamed) == "hello world"
    assert [each["finish_reason"] for each in streamed] == [None, None, "stop"]


async def test_the_first_delta_of_each_choice_has_the_role(client: httpx.AsyncClient, scheduler: ScriptedScheduler):
    scheduler.texts = ["hello world", CALL]
    streamed = await chunks(client, tools=TOOLS, n=2)
    for index in (0, 1):
        roles = [each["delta"].get("role") for each in streamed if each["index"] == index]
        assert roles == ["assistant"] + [None] * (len(roles) - 1)


async def test_a_tool_whose_input_is_text_is_called_alike_whole_and_streamed(
    client: httpx.AsyncClient, scheduler: ScriptedScheduler
):
    text = 'print("é")\n'
    scheduler.texts = [json.dumps({"name": "run", "arguments": {"input": text}})]
    grammar = {"type": "grammar", "grammar": {"syntax": "regex", "definition": "(.|\\n)+"}}
    tools = [{"type": "custom", "custom": {"name": "run", "description": "Runs Python.", "format": grammar}}]
    for choice in ("auto", "required", {"type": "custom", "custom": {"name": "run"}}):
        (chosen,) = (await chat(client, tools=tools, tool_choice=choice))["choices"]
        (call,) = chosen["message"]["tool_calls"]
        assert (call["type"], call["custom"]) == ("custom", {"name": "run", "input": text})
    pieces = [each["delta"]["tool_calls"][0] for each in await chunks(client, tools=tools)]
    assert (pieces[0]["type"], pieces[0]["custom"]["name"]) == ("custom", "run")
    assert "".join(each["custom"]["input"] for each in pieces) == text
    scheduler.texts = ["Well."]
    said = [*MESSAGES, chosen["message"], {"role": "tool", "tool_call_id": call["id"], "content": "done"}]
    assert (await chat(client, messages=said, tools=tools))["choices"][0]["message"]["content"] == "Well."


async def test_tools_of_others_servers_are_left_out_and_reported(client: httpx.AsyncClient):
    body = {"messages": MESSAGES, "tools": [*TOOLS, {"type": "web_search"}]}
    response = await client.post("/v1/chat/completions", json=body)
    assert (response.status_code, response.headers["x-ignored-fields"]) == (200, "tools[1] (web_search)")
