"""/v1/responses over a scheduler that answers at once: what agents send, and what they get."""

import json
from typing import Any

import httpx
import pytest

from tests.fakes.router_service import PAYLOAD_LIMIT, RouterService, ScriptedScheduler
from tgi_server.router.service import RequestPolicy

FUNCTION = {"type": "function", "name": "read", "parameters": {"type": "object", "properties": {}}}
NAMESPACE = {"type": "namespace", "name": "files", "description": "Files.", "tools": [FUNCTION]}
FREE_FORM = {"type": "custom", "name": "patch", "description": "Edits files."}
ELSEWHERE = ["web_search", "image_generation", "tool_search", "file_search", "code_interpreter", "mcp", "computer", "x"]


def call(name: str, **arguments: Any) -> str:
    """A call as the model of the test writes it."""
    return json.dumps({"name": name, "arguments": arguments})


async def respond(client: httpx.AsyncClient, **body: Any) -> dict[str, Any]:
    response = await client.post("/v1/responses", json={"input": "hello", **body})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


async def events(client: httpx.AsyncClient, **body: Any) -> list[dict[str, Any]]:
    response = await client.post("/v1/responses", json={"input": "hello", "stream": True, **body})
    return [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: ")]


def prompts(scheduler: ScriptedScheduler) -> list[str]:
    return [scheduler._tokenizer.decode(request.input_ids) for request in scheduler.submitted]


async def test_functions_of_a_namespace_are_called_by_a_longer_name(
    client: httpx.AsyncClient, scheduler: ScriptedScheduler
):
    scheduler.texts = [call("files__read")]
    (item,) = (await respond(client, tools=[NAMESPACE]))["output"]
    assert (item["type"], item["name"], item["namespace"]) == ("function_call", "read", "files")
    done = [each["item"] for each in await events(client, tools=[NAMESPACE]) if each["type"].endswith("item.done")]
    assert [(each["name"], each["namespace"]) for each in done] == [("read", "files")]
    for choice in (
        {"type": "function", "name": "read"},
        {"type": "function", "name": "files__read"},
        {"type": "function", "name": "read", "namespace": "files"},
        {"type": "allowed_tools", "mode": "required", "tools": [{"type": "namespace", "name": "files"}]},
    ):
        assert (await respond(client, tools=[NAMESPACE], tool_choice=choice))["output"][0]["name"] == "read"


async def test_earlier_calls_of_a_namespace_have_the_longer_name(client: httpx.AsyncClient, router: RouterService):
    said = [
        {"role": "user", "content": "hello"},
        {"type": "function_call", "call_id": "1", "name": "read", "namespace": "files", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "text"},
    ]
    await respond(client, input=said, tools=[NAMESPACE])
    count = await client.post("/v1/responses/input_tokens", json={"input": said, "tools": [NAMESPACE]})
    assert count.json() == {
        "object": "response.input_tokens",
        "input_tokens": len(router.scheduler.submitted[0].input_ids),
    }


async def test_a_tool_whose_input_is_text(client: httpx.AsyncClient, scheduler: ScriptedScheduler):
    text = '*** Begin\n+ "é"\n'
    scheduler.texts = [call("patch", input=text)]
    answer = await respond(client, tools=[FREE_FORM])
    (item,) = answer["output"]
    assert (item["type"], item["name"], item["input"], item["status"]) == (
        "custom_tool_call",
        "patch",
        text,
        "completed",
    )
    streamed = await events(client, tools=[FREE_FORM])
    deltas = [each for each in streamed if each["type"] == "response.custom_tool_call_input.delta"]
    assert "".join(each["delta"] for each in deltas) == text
    (done,) = [each for each in streamed if each["type"] == "response.custom_tool_call_input.done"]
    assert done["input"] == text
    result = {"type": "custom_tool_call_output", "call_id": item["call_id"], "output": "Done."}
    scheduler.texts = ["Well."]
    await respond(client, input=[{"role": "user", "content": "hello"}, item, result], tools=[FREE_FORM])
    await respond(client, input=[result], previous_response_id=answer["id"], tools=[FREE_FORM])
    for request in scheduler.submitted[-2:]:
        assert "tool: Done." in scheduler._tokenizer.decode(request.input_ids)


async def test_the_grammar_of_a_free_text_is_enforced(client: httpx.AsyncClient, scheduler: ScriptedScheduler):
    scheduler.texts = [call("patch", input="12")]
    regex = {"type": "grammar", "syntax": "regex", "definition": "[0-9]+"}
    await respond(client, tools=[{**FREE_FORM, "format": regex}])
    grammar = scheduler.submitted[-1].options.grammar
    assert grammar is not None
    assert "^(?:[0-9]+)$" in grammar.value
    lark = {"type": "grammar", "syntax": "lark", "definition": "start: /a+/"}
    response = await client.post("/v1/responses", json={"input": "hello", "tools": [{**FREE_FORM, "format": lark}]})
    assert "x-unenforced-constraints" not in response.headers
    grammar = scheduler.submitted[-1].options.grammar
    assert grammar is not None
    assert '"x-lark": "start: /a+/"' in grammar.value
    assert grammar.lenient == ()
    assert prompts(scheduler)[-1].count("start: /a+/") == 1
    assert "x-lark" not in prompts(scheduler)[-1]


@pytest.mark.parametrize("kind", ELSEWHERE)
async def test_tools_of_others_servers_are_left_out_and_reported(client: httpx.AsyncClient, kind: str):
    tools = [FUNCTION, {"type": kind, "name": "n"}]
    response = await client.post("/v1/responses", json={"input": "hello", "tools": tools})
    assert response.headers["x-ignored-fields"] == f"tools[1] ({kind})"
    choice = {"type": "allowed_tools", "tools": [{"type": "function", "name": "read"}, {"type": kind}]}
    response = await client.post("/v1/responses", json={"input": "hello", "tools": tools, "tool_choice": choice})
    assert response.status_code == 200
    response = await client.post(
        "/v1/responses", json={"input": "hello", "tools": tools, "tool_choice": {"type": kind}}
    )
    assert response.status_code == 400
    assert "tool_choice" in response.json()["error"]["message"]


async def test_items_of_others_servers_are_left_out_and_reported(
    client: httpx.AsyncClient, scheduler: ScriptedScheduler
):
    said = [
        {"role": "user", "content": "hello"},
        {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search"}},
        {"type": "compaction", "encrypted_content": "abc"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "abc"},
        {"role": "assistant", "content": [{"type": "output_text", "text": "Hi.", "annotations": []}], "phase": "x"},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
        {"role": "user", "content": "world"},
    ]
    response = await client.post("/v1/responses", json={"input": said})
    assert response.headers["x-ignored-fields"] == "input[1] (web_search_call); input[2] (compaction)"
    assert prompts(scheduler)[-1] == "user: hello\nassistant: Hi.\nassistant: No.\nuser: world\nassistant:"


async def test_tools_in_the_input(client: httpx.AsyncClient, scheduler: ScriptedScheduler):
    scheduler.texts = [call("read")]
    said = [
        {"type": "additional_tools", "role": "developer", "tools": [FUNCTION]},
        {"role": "user", "content": "hello"},
    ]
    assert (await respond(client, input=said))["output"][0]["name"] == "read"


async def test_a_reference_is_the_stored_item(client: httpx.AsyncClient, scheduler: ScriptedScheduler):
    scheduler.texts = ["Well."]
    first = await respond(client)
    (item,) = first["output"]
    (given,) = (await client.get(f"/v1/responses/{first['id']}/input_items")).json()["data"]
    said = [{"type": "item_reference", "id": given["id"]}, {"id": item["id"]}, {"role": "user", "content": "world"}]
    await respond(client, input=said)
    assert prompts(scheduler)[-1] == "user: hello\nassistant: Well.\nuser: world\nassistant:"
    await client.delete(f"/v1/responses/{first['id']}")
    response = await client.post("/v1/responses", json={"input": said})
    assert (response.status_code, response.json()["error"]["code"]) == (400, "item_not_found")
    assert given["id"] in response.json()["error"]["message"]


async def test_the_input_of_a_stored_response_in_pages(client: httpx.AsyncClient):
    said = [{"role": "user", "content": text} for text in "abc"]
    url = f"/v1/responses/{(await respond(client, input=said))['id']}/input_items"
    whole = (await client.get(url)).json()
    assert [each["content"][0]["text"] for each in whole["data"]] == ["c", "b", "a"]
    assert (whole["first_id"], whole["has_more"]) == (whole["data"][0]["id"], False)
    page = (await client.get(url, params={"order": "asc", "limit": 1, "after": whole["last_id"]})).json()
    assert [each["content"][0] for each in page["data"]] == [{"type": "input_text", "text": "b"}]
    assert page["has_more"]
    for query in ({"limit": 0}, {"order": "up"}, {"after": "absent"}):
        assert (await client.get(url, params=query)).status_code == 400
    assert (await client.get("/v1/responses/absent/input_items")).status_code == 404


async def test_known_fields_are_not_reported(client: httpx.AsyncClient):
    body = {
        "input": "hello",
        "tools": [FUNCTION],
        "tool_choice": {"type": "function", "name": "read"},
        "reasoning": {"effort": "low", "summary": "auto"},
        "stream_options": {"include_obfuscation": False},
        "max_tool_calls": 3,
    }
    assert "x-ignored-fields" not in (await client.post("/v1/responses", json=body)).headers


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        ("/v1/responses", {"input": "hello", "text": {"verbosity": "low"}}, "text.verbosity"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "verbosity": "low"}, "verbosity"),
    ],
)
async def test_verbosity_is_taken_and_reported(client: httpx.AsyncClient, path: str, body: dict[str, Any], named: str):
    response = await client.post(path, json=body)
    assert (response.status_code, response.headers["x-ignored-fields"]) == (200, named)


async def test_what_is_not_supported_is_refused_by_name(client: httpx.AsyncClient):
    for field in ({"background": True}, {"conversation": "conv_1"}, {"moderation": {"model": "m"}}):
        response = await client.post("/v1/responses", json={"input": "hello", **field})
        assert response.status_code == 400
        assert f"`{next(iter(field))}` is not supported" in response.json()["error"]["message"]
    response = await client.post("/v1/responses", json={"input": "hello", "n": 2, "prompt": {"id": "p"}})
    assert response.json()["error"]["message"] == "`n` is not supported here, nor `prompt`; leave them out"
    for path in ("/v1/conversations", "/v1/conversations/conv_1/items", "/v1/responses/resp_1/cancel"):
        response = await client.post(path, json={})
        assert (response.status_code, response.headers["x-should-retry"]) == (404, "false")
        assert "not supported" in response.json()["error"]["message"]
    file = {"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}
    response = await client.post("/v1/responses", json={"input": [file]})
    assert "'input_file' is not supported" in response.json()["error"]["message"]


async def test_strict_fields_refuse_what_would_be_left_out():
    router = RouterService(policy=RequestPolicy(PAYLOAD_LIMIT, 1, max_stored_responses=10, strict_fields=True))
    async with router.client() as client:
        for body, named in (
            ({"tools": [FUNCTION, {"type": "web_search"}]}, "web_search"),
            ({"input": [{"type": "web_search_call", "id": "1"}]}, "web_search_call"),
            ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ):
            response = await client.post("/v1/responses", json={"input": "hello", **body})
            assert response.status_code == 400
            assert named in response.json()["error"]["message"]
        choice = {"type": "function", "name": "read"}
        body = {"input": "hello", "tools": [FUNCTION], "tool_choice": choice, "reasoning": {"summary": "auto"}}
        assert (await client.post("/v1/responses", json=body)).status_code == 200
