"""/tokenize and /chat_tokenize tell the tokens of a prompt, and where they stand in its text."""

import httpx
import pytest

from tests.fakes.router_service import RouterService
from tgi_server.router.api.routes import tokenize


async def test_tokens_have_their_places_in_the_text(client: httpx.AsyncClient):
    tokens = (await client.post("/tokenize", json={"inputs": "hello world"})).json()
    assert [(each["text"], each["start"], each["stop"]) for each in tokens] == [("hello", 0, 5), (" world", 5, 11)]


async def test_a_conversation_is_told_as_the_template_writes_it(client: httpx.AsyncClient):
    messages = [{"role": "user", "content": "hello"}]
    told = (await client.post("/chat_tokenize", json={"model": "m", "messages": messages})).json()
    assert told["templated_text"] == "user: hello\nassistant:"
    assert "".join(each["text"] for each in told["tokenize_response"]) == told["templated_text"]


async def test_requests_are_logged_and_counted(
    client: httpx.AsyncClient, router: RouterService, caplog: pytest.LogCaptureFixture
):
    with caplog.at_level("INFO", "tgi_server"):
        for path, body in (
            ("/tokenize", {"inputs": "hello"}),
            ("/tokenize", {"prompt": "hello"}),
            ("/chat_tokenize", {"messages": [{"role": "user", "content": "hello"}]}),
            ("/detokenize", {"tokens": [7]}),
            ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "hello"}]}),
        ):
            assert (await client.post(path, json=body)).status_code == 200
            assert caplog.messages[-1] == f"{path} answered"
    assert "tgi_request_success 5.0" in (await client.get("/metrics")).text
    await client.post("/tokenize", json={"inputs": 5})
    assert caplog.messages[-1] == "/tokenize failed: `inputs`: Input should be a valid string"


async def test_an_empty_prompt_is_refused(client: httpx.AsyncClient):
    response = await client.post("/tokenize", json={"inputs": ""})
    assert (response.status_code, response.json()["error_type"]) == (422, "validation")


async def test_more_tokens_than_a_response_may_have_are_refused(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(tokenize, "MOST_TOKENS", 10)
    response = await client.post("/tokenize", json={"inputs": "x" * 301})
    assert response.status_code == 422
    assert "the text has more than 300 tokens; cut it into pieces" in response.json()["error"]
    assert len((await client.post("/tokenize", json={"inputs": "x" * 300})).json()) == 300
