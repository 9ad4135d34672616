"""A request is admitted, generates, and gives everything back once, however it ends.

Its body is read no further than the limit.
"""

import asyncio
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message

from tests.fakes.router_service import RouterService, ScriptedScheduler
from tgi_server.router.api.admission import Admission, read_body, read_json, respond_to
from tgi_server.router.api.connections import WATCH
from tgi_server.router.api.generation import RequestGeneration
from tgi_server.router.api.memory import LEASE, Account, Lease
from tgi_server.router.api.routes.generate import prepare_tgi
from tgi_server.router.errors import (
    ClientGone,
    GenerationFailed,
    InvalidRequest,
    Overloaded,
    PayloadTooLarge,
    RouterError,
    UnsupportedMediaType,
)
from tgi_server.router.schemas.generate import GenerateRequest
from tgi_server.router.text.chat_template import ChatTemplate
from tgi_server.router.text.tokenizer_config import DEFAULT_TEMPLATE, TokenizerConfig


class Client:
    """Sends one request, and then waits for its response until it leaves."""

    def __init__(self, body: bytes = b'{"inputs": "hello"}') -> None:
        self._body: bytes | None = body
        self._watcher: Callable[[], object] | None = None
        self.lease = Lease(Account(2**20, 1.0), "", lambda: None)
        state = {LEASE: self.lease, WATCH: self._watch}
        scope = {"type": "http", "path": "/generate", "headers": [], "state": state}
        self.request = Request(scope, self._receive)

    async def _receive(self) -> Message:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await asyncio.Event().wait()
        raise AssertionError("it never ends")

    def leave(self) -> None:
        assert self._watcher is not None
        self._watcher()

    def _watch(self, watcher: Callable[[], object] | None) -> None:
        self._watcher = watcher


async def collect(admission: Admission, asked: GenerateRequest) -> Response:
    """Responds with the text that is generated for the request's prompt."""
    prepared = await prepare_tgi(admission, asked.inputs, asked.parameters)
    generation = RequestGeneration(admission)
    (stream,) = await generation.collect([prepared])
    return generation.respond(stream.output.text, characters=len(asked.inputs), streams=[stream])


async def respond(router: RouterService, client: Client) -> Response:
    return await respond_to(router.service, client.request, GenerateRequest, collect)


async def test_a_request_that_succeeds_gives_its_place_back_and_is_counted(
    router: RouterService, caplog: pytest.LogCaptureFixture
):
    with caplog.at_level(logging.INFO):
        response = await respond(router, Client())
    assert response.body == b'"hello world"'
    assert response.headers["x-generated-tokens"] == "3"
    assert router.service.capacity.in_flight == 0
    assert "tgi_request_success 1.0" in router.service.metrics.expose().decode()
    (line,) = [record for record in caplog.records if record.message == "/generate answered"]
    assert line.generated_tokens == 3
    assert (line.status, line.model, line.request_id) == (200, "maker/model", response.headers["x-request-id"])
    assert f"{line.total_time}".endswith("ms")
    assert json.loads(json.dumps(line.total_time)) > 0
    assert "tgi_request_time_to_first_token_duration_count 1.0" in router.service.metrics.expose().decode()
    assert "tgi_request_inter_token_duration_count 2.0" in router.service.metrics.expose().decode()


@pytest.mark.parametrize(("given", "kept"), [("a-b_c.1", True), ("x" * 128, True), ("x" * 129, False), ("a b", False)])
async def test_a_request_has_the_id_that_its_caller_gave_it(
    client: httpx.AsyncClient, caplog: pytest.LogCaptureFixture, given: str, kept: bool
):
    caplog.set_level(logging.INFO)
    headers = {"x-request-id": given}
    for body, status in (({"inputs": "hello"}, 200), ({"inputs": ""}, 422), ({"inputs": 1}, 422)):
        response = await client.post("/generate", json=body, headers=headers)
        assert response.status_code == status
        told = response.headers["x-request-id"]
        assert (told == given) is kept
        (record,) = (each for each in caplog.records if each.name.startswith("tgi_server"))
        assert (record.request_id, record.status) == (told, status)
        assert record.levelname == ("INFO" if status == 200 else "WARNING")
        caplog.clear()


async def test_a_request_that_fails_in_the_shards_is_counted_by_its_error(
    router: RouterService, scheduler: ScriptedScheduler, caplog: pytest.LogCaptureFixture
):
    scheduler.error = GenerationFailed("the shards are gone")
    with pytest.raises(GenerationFailed, match="the shards are gone"):
        await respond(router, Client())
    assert router.service.capacity.in_flight == 0
    assert 'tgi_request_failure{err="generation"} 1.0' in router.service.metrics.expose().decode()
    assert "/generate failed: the shards are gone" in caplog.messages


async def test_a_client_that_leaves_has_its_generation_cancelled(
    router: RouterService, scheduler: ScriptedScheduler, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.INFO)
    scheduler.held, scheduler.progress = True, "512 of 900 tokens of its prompt were computed"
    client = Client()
    responding = asyncio.ensure_future(respond(router, client))
    while not scheduler.submitted:  # noqa: ASYNC110
        await asyncio.sleep(0)
    client.leave()
    with pytest.raises(ClientGone):
        await responding
    assert scheduler.cancelled == [scheduler.submitted[0].id]
    assert f"/generate failed: the client disconnected; {scheduler.progress}" in caplog.messages
    assert router.service.capacity.in_flight == 0


async def test_a_request_that_is_cut_off_when_the_server_stops_is_not_said_to_have_left(
    router: RouterService, scheduler: ScriptedScheduler, caplog: pytest.LogCaptureFixture
):
    scheduler.held = True
    responding = asyncio.ensure_future(respond(router, Client()))
    while not scheduler.submitted:  # noqa: ASYNC110
        await asyncio.sleep(0)
    responding.cancel()
    with pytest.raises(asyncio.CancelledError):
        await responding
    assert "/generate failed: the server is shutting down" in caplog.messages
    assert 'tgi_request_failure{err="generation"} 1.0' in router.service.metrics.expose().decode()
    assert scheduler.cancelled == [scheduler.submitted[0].id]


async def test_beyond_the_limit_a_request_is_refused_and_takes_nothing(router: RouterService):
    router.service.capacity.take(8)
    with pytest.raises(Overloaded, match="8 requests are in flight"):
        await respond(router, Client())
    assert router.service.capacity.in_flight == 8


@pytest.mark.logs_tracebacks
async def test_a_fault_of_the_server_is_logged_and_tells_the_client_nothing_of_it(
    router: RouterService, caplog: pytest.LogCaptureFixture
):
    async def fail(admission: Admission, asked: GenerateRequest) -> Response:
        raise KeyError("a secret")

    with pytest.raises(RouterError) as told:
        await respond_to(router.service, Client().request, GenerateRequest, fail)
    assert str(told.value) == "the server failed to handle the request"
    (record,) = caplog.records
    assert record.message == "/generate failed: the server failed to handle the request"
    assert record.exc_info is not None
    assert isinstance(record.exc_info[1], KeyError)
    assert router.service.capacity.in_flight == 0


async def test_a_request_that_counts_no_tokens_has_succeeded(caplog: pytest.LogCaptureFixture):
    router = RouterService()
    texts = replace(
        router.service.text, template=ChatTemplate(TokenizerConfig({}, chat_templates={DEFAULT_TEMPLATE: ""}))
    )
    router.service = replace(router.service, text=texts)
    with caplog.at_level(logging.INFO):
        async with router.client() as client:
            response = await client.post("/v1/responses/input_tokens", json={"input": "hello"})
    assert response.json()["input_tokens"] == 0
    (line,) = [record for record in caplog.records if record.message.startswith("/v1/responses/input_tokens")]
    assert line.message.endswith("answered")
    assert line.prompt_tokens == 0
    assert "tgi_request_failure_total" not in router.service.metrics.expose().decode()


LIMIT = 10


class Sender:
    """Sends a body in pieces; None instead of a piece disconnects. unread: pieces that have not been received."""

    def __init__(self, *pieces: bytes | None, **headers: str) -> None:
        self.unread: list[bytes | None] = list(pieces)
        encoded = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
        self.lease = Lease(Account(2**20, 0.5), "10.0.0.1", lambda: None)
        scope = {"type": "http", "headers": encoded, "state": {LEASE: self.lease}}
        self.request = Request(scope, self._receive)

    async def _receive(self) -> Message:
        piece = self.unread.pop(0)
        if piece is None:
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": piece, "more_body": bool(self.unread)}


@pytest.mark.parametrize("pieces", [[b"0123456789"], [b"01234", b"", b"56789"], [b""]])
async def test_a_body_within_the_limit_is_read_whole(pieces: Sequence[bytes]):
    assert await read_body(Sender(*pieces).request, LIMIT) == b"".join(pieces)


async def test_the_memory_that_a_body_takes_is_counted():
    client = Sender(b"[{},", b"{}]")
    await read_body(client.request, LIMIT)
    assert client.lease.held > 500
    with pytest.raises(PayloadTooLarge, match="--max-client-memory"):
        await read_body(Sender(b"{" * 2_000).request, 2_000)


async def test_a_body_that_is_compressed_is_refused():
    assert await read_body(Sender(b"{}", content_encoding="identity").request, LIMIT) == b"{}"
    with pytest.raises(UnsupportedMediaType, match="the content encoding is 'gzip'"):
        await read_body(Sender(b"{}", content_encoding="GZIP").request, LIMIT)


async def test_a_body_that_is_announced_as_too_long_is_refused_after_it_has_come():
    client = Sender(b"0" * 6, b"0" * 6, content_length="12")
    with pytest.raises(PayloadTooLarge, match=r"more than 10 bytes \(--payload-limit\)"):
        await read_body(client.request, LIMIT)
    assert not client.unread


async def test_a_body_that_turns_out_too_long_is_refused_after_it_has_come():
    client = Sender(b"0" * 6, b"0" * 6, b"0")
    with pytest.raises(PayloadTooLarge):
        await read_body(client.request, LIMIT)
    assert not client.unread


async def test_a_client_that_waits_for_leave_is_refused_before_it_sends_a_body():
    client = Sender(b"0" * 12, content_length="12", expect="100-continue")
    with pytest.raises(PayloadTooLarge):
        await read_body(client.request, LIMIT)
    assert client.unread


async def test_a_client_that_leaves_in_the_middle_of_its_body_is_gone():
    with pytest.raises(ClientGone, match="before its request was complete"):
        await read_body(Sender(b"01", None).request, LIMIT)


@pytest.mark.parametrize("body", [b"", b"{", b"{'a': 1}", b"\xff", b"[" * 100_000])
def test_what_is_not_json_is_refused_in_one_line(body: bytes):
    with pytest.raises(InvalidRequest, match=r"^the request is not JSON: .+$"):
        read_json(body)
