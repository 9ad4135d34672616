"""Mixed load on a text-generation server over HTTP: all routes, those who leave, those who do not read, bad input."""

import asyncio
import contextlib
import json
import socket
from collections.abc import Coroutine, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from tests import hostile_grammars as hostile
from tests.integration.soak.tally import Tally
from tests.integration.soak.turns import Turn
from tests.integration.structured.test_chat import TOOLS
from tests.integration.structured.test_generate import GRAMMARS, PROMPT

WORKERS = 12
PAUSE_SECONDS = 0.3
# Share of the requests whose clients leave before they have their answer.
LEAVERS = 0.2
# They leave after as long at most.
STAY_SECONDS = 1.0
ANSWER_SECONDS = 120.0
# Idle connections are given up long before the server does so, which it might while a request is on its way.
KEPT_SECONDS = 0.5
SLOW_READER_SECONDS = 8.0
SMALL_BUFFER = 16_384
FINE = frozenset({200, 429})
REFUSED = frozenset({400, 413, 422, 429})
GRAMMAR = frozenset({200, 400, 422, 429, 503})

HELLO = [{"role": "user", "content": "How do I boil an egg?"}]
SAMPLED = {"do_sample": True, "temperature": 0.9, "top_k": 40, "top_p": 0.95, "max_new_tokens": 60}
COMPARED = {"inputs": PROMPT, "parameters": {"max_new_tokens": 60, "ignore_eos": True}}

_FIELDS = {
    "/generate": "generated_text",
    "/v1/chat/completions": "finish_reason",
    "/v1/completions": "finish_reason",
    "/v1/decisions": "answers",
}


@dataclass(frozen=True)
class Ask:
    """A request, the statuses that it may be answered with, and how often it comes beside others."""

    path: str
    # JSON, bytes as they are, or None for a GET.
    body: Any = None
    statuses: frozenset[int] = FINE
    share: int = 4
    headers: tuple[tuple[str, str], ...] = ()

    @property
    def field(self) -> str:
        """A field of a whole answer."""
        return "" if self.body is None else _FIELDS.get(self.path, "")

    @property
    def end(self) -> str:
        """The end of a whole stream."""
        return "data: [DONE]" if self.path.startswith("/v1/") else '"generated_text":"'

    @property
    def content(self) -> bytes | None:
        return self.body if isinstance(self.body, bytes | None) else json.dumps(self.body).encode()

    @property
    def streams(self) -> bool:
        return self.path == "/generate_stream" or (isinstance(self.body, dict) and bool(self.body.get("stream")))


def _chat(**fields: Any) -> dict[str, Any]:
    return {"messages": HELLO, "max_tokens": 60, **fields}


def _grammar(kind: str, value: Any) -> dict[str, Any]:
    return {"inputs": PROMPT, "parameters": {"max_new_tokens": 60, "grammar": {"type": kind, "value": value}}}


def _call(arguments: str) -> bytes:
    call = f'{{"id":"1","type":"function","function":{{"name":"set_timer","arguments":{arguments}}}}}'
    return f'{{"messages":[{{"role":"assistant","tool_calls":[{call}]}}],"max_tokens":5}}'.encode()


GOOD = {
    "generate, sampled": Ask("/generate", {"inputs": PROMPT, "parameters": SAMPLED}, share=8),
    "generate, best_of": Ask("/generate", {"inputs": PROMPT, "parameters": {**SAMPLED, "best_of": 2}}),
    "stream": Ask("/generate_stream", {"inputs": PROMPT, "parameters": {**SAMPLED, "top_n_tokens": 5}}, share=12),
    "compat, stream": Ask("/", {"inputs": PROMPT, "stream": True, "parameters": SAMPLED}),
    "compat": Ask("/", {"inputs": PROMPT, "parameters": SAMPLED}),
    "chat": Ask("/v1/chat/completions", _chat(), share=8),
    "chat, stream": Ask("/v1/chat/completions", _chat(stream=True, logprobs=True, top_logprobs=3), share=8),
    "chat, tools": Ask("/v1/chat/completions", _chat(tools=TOOLS, max_tokens=150)),
    "chat, tools, stream": Ask("/v1/chat/completions", _chat(tools=TOOLS, stream=True, tool_choice="required")),
    "chat, response_format": Ask("/v1/chat/completions", _chat(response_format=GRAMMARS["json"][0])),
    "completions": Ask("/v1/completions", {"prompt": [PROMPT, "Once"], "max_tokens": 40, "n": 2}),
    "completions, stream": Ask("/v1/completions", {"prompt": PROMPT, "max_tokens": 40, "stream": True}),
    "tokenize": Ask("/tokenize", {"inputs": PROMPT * 20}),
    "chat_tokenize": Ask("/chat_tokenize", {"messages": HELLO}),
    "invocations": Ask("/invocations", {"inputs": PROMPT, "parameters": SAMPLED}),
    "vertex": Ask("/vertex", {"instances": [{"inputs": PROMPT, "parameters": SAMPLED}]}),
    **{
        f"grammar, {name}": Ask("/generate", _grammar(grammar["type"], grammar["value"]), GRAMMAR, 2)
        for name, (grammar, _) in GRAMMARS.items()
    },
    "page": Ask("/", headers=(("accept", "text/html"),)),
    **{path[1:]: Ask(path, share=1) for path in ("/static/main.js", "/docs", "/openapi.json", "/v1/models", "/ping")},
    **{path[1:]: Ask(path) for path in ("/info", "/metrics", "/health")},
}

BAD = {
    "bad: chain of references": Ask("/generate", _grammar("json", hostile.references(1_000)), GRAMMAR, 1),
    "bad: chain of rules": Ask("/generate", _grammar("lark", hostile.rules(2_750)), GRAMMAR, 1),
    "bad: 3,000 spans": Ask("/generate", _grammar("json", hostile.spans(3_000)), GRAMMAR, 1),
    "bad: mutual definitions": Ask("/generate", _grammar("json", hostile.mutual(11)), GRAMMAR, 1),
    "bad: 300,000 optional letters": Ask("/generate", _grammar("regex", hostile.optional_letters(300_000)), GRAMMAR, 1),
    "bad: grammar type": Ask("/generate", _grammar("x\nforged: line", ""), REFUSED, 1),
    "bad: top_k": Ask("/v1/chat/completions", _chat(top_k=2**32), REFUSED, 2),
    "bad: top_k of 300 digits": Ask("/v1/completions", {"prompt": "a", "top_k": 10**300}, REFUSED, 2),
    "bad: 20,000 messages": Ask("/v1/chat/completions", {"messages": [{"role": 1}] * 20_000}, REFUSED, 1),
    "bad: long text": Ask("/tokenize", {"inputs": "rice and beans " * 126_000}, REFUSED, 1),
    "bad: deep arguments": Ask("/v1/chat/completions", _call(json.dumps("[" * 5_000)), FINE | REFUSED, 1),
    "bad: lone surrogate": Ask("/v1/chat/completions", _call('"\\ud800"'), FINE | REFUSED, 1),
    "bad: newline in a key": Ask("/v1/completions", {"prompt": "a", "logit_bias": {"1\nforged: line": 1}}, REFUSED, 1),
    "bad: too large": Ask("/generate", b" " * 2_000_001, frozenset({413}), 1),
    "bad: no JSON": Ask("/generate", b'{"inputs": "a', REFUSED, 2),
    "bad: text/plain": Ask("/generate", {"inputs": "a"}, frozenset({415}), 1, (("content-type", "text/plain"),)),
    "bad: another host": Ask("/generate", {"inputs": "a"}, frozenset({403}), 1, (("host", "rebound.example"),)),
    "bad: no such route": Ask("/nowhere", {"inputs": "a"}, frozenset({404}), 1),
}
ASKS = GOOD | BAD


class _Wrong(Exception):
    """An answer that must not be."""


class HttpLoad:
    """Workers that each send one request after the other; `tally` is what came back.

    asks: the requests, by their kinds. there: unset while the server may be gone, when nothing is expected of it.
    """

    def __init__(self, url: str, asks: Mapping[str, Ask] = ASKS) -> None:
        self.there = asyncio.Event()
        self.there.set()
        self._asks = list(asks.items())
        self.tally = Tally()
        self._url = url
        limits = httpx.Limits(max_connections=None, keepalive_expiry=KEPT_SECONDS)
        self._http = httpx.AsyncClient(base_url=url, timeout=ANSWER_SECONDS, limits=limits)
        # What the request that is made time and again was answered with when nobody else asked.
        self._compared = ""

    async def begin(self) -> None:
        self._compared = (await self._http.post("/generate", json=COMPARED)).json()["generated_text"]

    async def run(self, given: Iterator[Turn]) -> None:
        """Returns when all workers have their last answers."""
        await asyncio.gather(*(self._work(given) for _ in range(WORKERS)))

    async def close(self) -> None:
        await self._http.aclose()

    async def _work(self, given: Iterator[Turn]) -> None:
        shares = [ask.share for _, ask in self._asks]
        for turn in given:
            kind = turn.random()
            if kind < 0.06:
                await self._unless_gone("slow reader", self._read_slowly(turn))
            elif kind < 0.1:
                await self._unless_gone("half a request", self._send_half(turn))
            elif kind < 0.2:
                await self._unless_gone("generate, compared", self._compare())
            else:
                ((name, ask),) = turn.choices(self._asks, shares)
                await self._unless_gone(name, self._ask(name, ask, turn))
            await asyncio.sleep(turn.uniform(0, PAUSE_SECONDS))

    async def _unless_gone(self, kind: str, request: Coroutine[Any, Any, None]) -> None:
        there = self.there.is_set()
        try:
            await request
        except (_Wrong, httpx.HTTPError, OSError) as error:
            if there and self.there.is_set():
                self.tally.fault(kind, str(error) if isinstance(error, _Wrong) else repr(error))
                return
            self.tally.note(kind, "the server went")
            await self.there.wait()

    async def _ask(self, kind: str, ask: Ask, turn: Turn) -> None:
        leaves = turn.random() < LEAVERS
        stays = turn.uniform(0, STAY_SECONDS) ** 2 if leaves else ANSWER_SECONDS
        try:
            async with asyncio.timeout(stays):
                self._check(kind, ask, *await self._answer(ask))
        except TimeoutError:
            if leaves:
                self.tally.note(kind, "left")
            else:
                self.tally.fault(kind, f"no answer within {ANSWER_SECONDS} s")

    async def _answer(self, ask: Ask) -> tuple[int, str]:
        method = "GET" if ask.body is None else "POST"
        async with self._http.stream(method, ask.path, content=ask.content, headers=dict(ask.headers)) as response:
            return response.status_code, (await response.aread()).decode()

    def _check(self, kind: str, ask: Ask, status: int, text: str) -> None:
        whole = ask.end in text if ask.streams else not ask.field or f'"{ask.field}":' in text
        failed = status == 200 and (not whole or (ask.streams and '"error_type"' in text))
        if status not in ask.statuses or failed:
            raise _Wrong(f"{status} {text[-500:]}")
        self.tally.note(kind, str(status))

    async def _compare(self) -> None:
        """Checks that an answer does not depend on the other requests that run."""
        response = await self._http.post("/generate", json=COMPARED)
        if response.status_code == 429:
            self.tally.note("generate, compared", "429")
        elif response.status_code == 200 and response.json()["generated_text"] == self._compared:
            self.tally.note("generate, compared", "the same")
        else:
            raise _Wrong(response.text)

    async def _connection(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """One that takes in little, so that the server has to keep what is not read."""
        host, port = self._url.removeprefix("http://").split(":")
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_BUFFER)
        connection.setblocking(False)
        await asyncio.get_running_loop().sock_connect(connection, (host, int(port)))
        return await asyncio.open_connection(sock=connection, limit=SMALL_BUFFER)

    async def _read_slowly(self, turn: Turn) -> None:
        reader, writer = await self._connection()
        parameters = {"max_new_tokens": 300, "ignore_eos": True, "top_n_tokens": 5}
        body = json.dumps({"inputs": PROMPT, "parameters": parameters}).encode()
        writer.write(_head("/generate_stream", len(body)) + body)
        with contextlib.suppress(TimeoutError, ConnectionResetError):
            async with asyncio.timeout(turn.uniform(0, SLOW_READER_SECONDS)):
                async for _ in reader:
                    await asyncio.sleep(0.1)
        writer.transport.abort()
        self.tally.note("slow reader", "left")

    async def _send_half(self, turn: Turn) -> None:
        _, writer = await self._connection()
        request = _head("/generate", 100) + b'{"inputs": "a'
        for byte in request[: turn.randrange(len(request))]:
            if writer.transport.is_closing():  # the server waits no longer than it says
                break
            writer.write(bytes([byte]))
            await asyncio.sleep(0.01)
        with contextlib.suppress(OSError):
            writer.transport.abort()
        self.tally.note("half a request", "left")


def _head(path: str, length: int) -> bytes:
    return f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: {length}\r\n\r\n".encode()
