"""The load generator against a server whose timing is known."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import web

from benchmarks.api import OpenAi, Tgi
from benchmarks.connection import Connection, ServerUnavailable
from benchmarks.load import Target, run_workload
from benchmarks.report import summarise
from benchmarks.workloads import GREETING, Workload

# Seconds before every token.
DELAY = 0.03


class SlowServer:
    """Answers every prompt with as many `tok`s as asked for, one each DELAY; remembers what it was asked."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.most_at_once = 0
        self._running = 0
        self.app = web.Application()
        for path in ("/v1/completions", "/v1/chat/completions", "/generate", "/generate_stream"):
            self.app.router.add_post(path, self._answer)

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self._running += 1
        self.most_at_once = max(self.most_at_once, self._running)
        try:
            if request.path == "/generate_stream":
                return await self._stream(request, self._tgi_events(body["parameters"]["max_new_tokens"]))
            if body.get("stream"):
                return await self._stream(request, self._openai_events(body, "chat" in request.path))
            await asyncio.sleep(DELAY)
            return self._whole(request.path, body)
        finally:
            self._running -= 1

    def _whole(self, path: str, body: dict[str, Any]) -> web.Response:
        if path == "/generate":
            count = body["parameters"]["max_new_tokens"]
            answer = {"generated_text": " tok" * count, "details": {"generated_tokens": count}}
            return web.json_response(answer, headers={"x-prompt-tokens": "9"})
        count = body["max_tokens"]
        usage = {"prompt_tokens": 9, "completion_tokens": count}
        return web.json_response({"choices": [{"text": " tok" * count}], "usage": usage})

    async def _stream(self, request: web.Request, events: AsyncIterator[dict[str, Any] | str]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        async for event in events:
            data = event if isinstance(event, str) else json.dumps(event)
            half = len(data) // 2
            await response.write(f"data: {data[:half]}".encode())
            await response.write(f"{data[half:]}\n\n".encode())
        return response

    async def _openai_events(self, body: dict[str, Any], chat: bool) -> AsyncIterator[dict[str, Any] | str]:
        if chat:
            yield {"choices": [{"delta": {"role": "assistant", "content": ""}}]}
        for _ in range(body["max_tokens"]):
            await asyncio.sleep(DELAY)
            yield {"choices": [{"delta": {"content": " tok"}} if chat else {"text": " tok"}]}
        yield {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": body["max_tokens"]}}
        yield "[DONE]"

    async def _tgi_events(self, count: int) -> AsyncIterator[dict[str, Any] | str]:
        for index in range(count):
            await asyncio.sleep(DELAY)
            details = {"generated_tokens": count, "input_length": 7} if index == count - 1 else None
            yield {"token": {"text": " tok"}, "details": details}


@pytest.fixture
async def serve() -> AsyncIterator[Any]:
    runners: list[web.AppRunner] = []

    async def start(app: web.Application) -> str:
        runner = web.AppRunner(app)
        runners.append(runner)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        return f"http://127.0.0.1:{runner.addresses[0][1]}"

    yield start
    for runner in runners:
        await runner.cleanup()


@pytest.mark.parametrize("api", [OpenAi("m"), Tgi("m")], ids=["openai", "tgi"])
@pytest.mark.parametrize("turns", [1, 2], ids=["prompts", "chats"])
async def test_times_and_tokens_of_streams(serve: Any, api: OpenAi, turns: int) -> None:
    url = await serve(SlowServer().app)
    workload = Workload("X", users=3, words=5, new_tokens=4, turns=turns, repeat=2)
    outcome = await run_workload(Target(url, api), workload, warm_up=False)
    assert outcome.failures == []
    assert [record.new_tokens for record in outcome.records] == [4] * 3 * 2 * turns
    for record in outcome.records:
        assert record.prompt_tokens == 7
        assert record.first_token is not None
        assert DELAY * 0.9 <= record.first_token < record.latency
        assert len(record.gaps) == 3
        assert sum(record.gaps) + record.first_token <= record.latency
        assert sum(record.gaps) >= 2 * DELAY
    assert outcome.seconds >= 4 * DELAY * 2 * turns
    assert 0 < outcome.cpu_seconds < outcome.seconds


@pytest.mark.parametrize("api", [OpenAi("m"), Tgi("m")], ids=["openai", "tgi"])
async def test_whole_replies_have_no_token_times(serve: Any, api: OpenAi) -> None:
    url = await serve(SlowServer().app)
    workload = Workload("X", users=2, words=None, new_tokens=4, repeat=2, stream=False)
    outcome = await run_workload(Target(url, api), workload)
    assert len(outcome.records) == 4, "what warms up is not counted"
    assert {(record.first_token, record.new_tokens, record.prompt_tokens) for record in outcome.records} == {
        (None, 4, 9)
    }


@pytest.mark.parametrize("api", [OpenAi("m"), Tgi("m")], ids=["openai", "tgi"])
@pytest.mark.parametrize("turns", [1, 2], ids=["prompts", "chats"])
async def test_sampled_loads_send_other_requests_than_greedy_ones(serve: Any, api: OpenAi, turns: int) -> None:
    server = SlowServer()
    url = await serve(server.app)
    greedy = Workload("X", users=1, words=3, new_tokens=1, turns=turns, repeat=1)
    for workload in (greedy, replace(greedy, sampled=True), replace(greedy, sampled=True, top_k=50)):
        await run_workload(Target(url, api), workload, warm_up=False)
    bodies = [body.get("parameters", body) for body in server.bodies]
    sampled = [body for body in bodies if body.get("temperature")]
    assert len(bodies) == 3 * turns
    assert all((body["temperature"], body["top_p"]) == (0.7, 0.9) for body in sampled)
    assert [body.get("top_k") for body in sampled] == [None] * turns + [50] * turns


async def test_all_users_wait_for_their_own_replies_only(serve: Any) -> None:
    server = SlowServer()
    url = await serve(server.app)
    await run_workload(Target(url, OpenAi("m")), Workload("X", users=5, words=3, new_tokens=2, repeat=3))
    assert server.most_at_once == 5


async def test_requests_ask_for_greedy_replies_of_full_length(serve: Any) -> None:
    server = SlowServer()
    url = await serve(server.app)
    workload = Workload("X", users=1, words=None, new_tokens=2, repeat=1, stream=False)
    await run_workload(Target(url, OpenAi("m")), workload, warm_up=False)
    await run_workload(Target(url, Tgi("m")), workload, warm_up=False)
    openai, tgi = server.bodies
    assert openai == {"model": "m", "prompt": GREETING, "max_tokens": 2, "temperature": 0, "ignore_eos": True}
    assert tgi["inputs"] == GREETING
    assert tgi["parameters"] == {"max_new_tokens": 2, "do_sample": False, "ignore_eos": True, "details": True}


async def test_a_chat_sends_its_history_along(serve: Any) -> None:
    server = SlowServer()
    url = await serve(server.app)
    workload = Workload("X", users=1, words=3, new_tokens=2, turns=3, repeat=1)
    await run_workload(Target(url, OpenAi("m")), workload, warm_up=False)
    (said,) = workload.prompts(0, 0)
    reply = {"role": "assistant", "content": " tok tok"}
    messages = [{"role": "user", "content": text} for text in said]
    assert server.bodies[2]["messages"] == [messages[0], reply, messages[1], reply, messages[2]]


async def test_refusals_and_errors_within_streams_are_failures(serve: Any) -> None:
    async def refuse(_: web.Request) -> web.Response:
        return web.json_response({"error": "too busy"}, status=429)

    async def break_off(_: web.Request) -> web.Response:
        text = 'data: {"choices": [{"text": "a"}]}\n\ndata: {"error": {"message": "the shard is gone"}}\n\n'
        return web.Response(text=text, content_type="text/event-stream")

    workload = Workload("X", users=2, words=3, new_tokens=2, repeat=2)
    for handler, message in ((refuse, "status 429: .*too busy"), (break_off, "the shard is gone")):
        app = web.Application()
        app.router.add_post("/v1/completions", handler)
        outcome = await run_workload(Target(await serve(app), OpenAi("m")), workload, warm_up=False)
        assert outcome.records == []
        assert len(outcome.failures) == 4
        assert re.search(message, outcome.failures[0])


async def test_short_replies_are_counted(serve: Any) -> None:
    async def be_brief(_: web.Request) -> web.Response:
        return web.json_response({"choices": [{"text": "a"}], "usage": {"completion_tokens": 1}})

    app = web.Application()
    app.router.add_post("/v1/completions", be_brief)
    workload = Workload("X", users=1, words=3, new_tokens=2, repeat=2, stream=False)
    outcome = await run_workload(Target(await serve(app), OpenAi("m")), workload, warm_up=False)
    summary = summarise(outcome)
    assert (summary.requests, summary.short_replies, summary.prompt_tokens) == (2, 2, None)


async def test_a_server_that_closes_connections_is_asked_over_a_new_one(serve: Any) -> None:
    async def answer(_: web.Request) -> web.Response:
        return web.json_response(
            {"choices": [{"text": "a"}], "usage": {"completion_tokens": 2}}, headers={"connection": "close"}
        )

    app = web.Application()
    app.router.add_post("/v1/completions", answer)
    workload = Workload("X", users=2, words=3, new_tokens=2, repeat=3, stream=False)
    outcome = await run_workload(Target(await serve(app), OpenAi("m")), workload, warm_up=False)
    assert (len(outcome.records), outcome.failures) == (6, [])


async def test_no_server_and_a_slow_one_are_told_apart(serve: Any, unused_tcp_port: int) -> None:
    with pytest.raises(ServerUnavailable, match="cannot be reached"):
        await Connection(f"http://127.0.0.1:{unused_tcp_port}").request("GET", "/health")

    async def sleep(_: web.Request) -> web.Response:
        await asyncio.sleep(0.5)
        return web.Response()

    app = web.Application()
    app.router.add_get("/health", sleep)
    with pytest.raises(ServerUnavailable, match=r"did not answer /health within 0\.05 s"):
        await Connection(await serve(app)).request("GET", "/health", limit=0.05)


def test_what_is_not_a_url_is_refused() -> None:
    with pytest.raises(ValueError, match="is not a URL"):
        Connection("127.0.0.1:80")


async def test_a_connection_that_the_server_gives_up_between_two_requests_is_opened_anew() -> None:
    """Such as llama.cpp's after a stream: the next request and the end of the connection cross."""
    requests = 0

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal requests
        await reader.readuntil(b"\r\n\r\n")
        requests += 1
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
        await reader.readuntil(b"\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        connection = Connection(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        for _ in range(3):
            assert (await connection.request("GET", "/health")).body == b"ok"
        assert requests == 3
        connection.close()
