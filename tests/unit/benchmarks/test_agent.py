"""Agents against a server whose answers and cache are known."""

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web

from benchmarks.agent import MeasuredAgents, Plan, Request, measure

PLAN = Plan(turns=2, tools=12, system_words=20, user_words=3, result_words=5, new_tokens=8)


class Calling:
    """Answers with a call where one is required, and else with a text. The prompt has as many tokens as messages."""

    def __init__(self, arguments: str = '{"path": "a.py"}', *, reports: bool = True) -> None:
        self.bodies: list[dict[str, Any]] = []
        self._arguments = arguments
        self._reports = reports

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for event in self._events(body):
            await response.write(f"data: {json.dumps(event)}\n\n".encode())
        return response

    def _events(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        call = [
            {"index": 0, "id": "x", "function": {"name": "read_files", "arguments": ""}},
            {"index": 0, "function": {"arguments": self._arguments}},
        ]
        deltas = [{"tool_calls": [each]} for each in call]
        if body["tool_choice"] != "required":
            deltas = [{"content": "Well."}]
        tokens = len(body["messages"])
        usage: dict[str, Any] = {"prompt_tokens": tokens, "completion_tokens": 1}
        if self._reports:
            usage["prompt_tokens_details"] = {"cached_tokens": tokens - 1}
        return [*({"choices": [{"delta": each}]} for each in deltas), {"choices": [], "usage": usage}]


@pytest.fixture
async def serve() -> AsyncIterator[Any]:
    runners: list[web.AppRunner] = []

    async def start(server: Calling) -> str:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", server.answer)
        runners.append(web.AppRunner(app))
        await runners[-1].setup()
        await web.TCPSite(runners[-1], "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{runners[-1].addresses[0][1]}"

    yield start
    for runner in runners:
        await runner.cleanup()


async def test_calls_and_texts_are_sent_back_and_what_repeats_is_counted(serve: Any) -> None:
    server = Calling()
    result = await measure("server", await serve(server), "m", 1, PLAN, "0", 10)
    assert (result.failures, result.called, result.asked) == ([], 2, 2)
    roles = [each["role"] for each in server.bodies[-1]["messages"]]
    assert roles == ["system", "user", "assistant", "tool", "assistant", "user", "assistant", "tool"]
    assert server.bodies[-1]["messages"][2]["tool_calls"][0]["function"]["name"] == "read_files"
    assert len(server.bodies[-1]["tools"]) == 12
    # Prompts of 2, 4, 6 and 8 tokens, of which all but one are cached; answers have one.
    assert [(each.prompt_tokens, each.repeats) for each in result.requests] == [(2, None), (4, 3), (6, 5), (8, 7)]
    assert result.cached_share() == 1


async def test_a_call_that_is_cut_off_is_replaced(serve: Any) -> None:
    server = Calling('{"path": "a')
    result = await measure("server", await serve(server), "m", 2, PLAN, "0", 10)
    assert (result.failures, result.called, result.asked) == ([], 0, 4)
    call = server.bodies[-1]["messages"][2]["tool_calls"][0]["function"]
    assert json.loads(call["arguments"])["path"].endswith(".py")


async def test_agents_of_one_number_share_a_system_prompt_that_is_new(serve: Any) -> None:
    server = Calling()
    url = await serve(server)
    for agents in (1, 2):
        await measure("server", url, "m", agents, PLAN, str(agents), 10)
    assert len({body["messages"][0]["content"] for body in server.bodies}) == 2


def test_cached_tokens_that_are_not_reported_are_estimated() -> None:
    result = MeasuredAgents("server", 1, cold=10.0, cold_tokens=1000)
    result.requests = [Request(2.0, 1000, None, None), Request(1.0, 1100, None, 1000), Request(6.0, 1100, None, 1000)]
    assert result.cached_share() == pytest.approx((1000 + 500) / 2000)
    assert "~75.0" in result.row()
