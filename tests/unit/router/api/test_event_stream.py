"""An event stream is sent as it is written, ends once, and gives up a client that does not read."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from starlette.types import Message

from tgi_server.router.api import event_stream
from tgi_server.router.api.connections import REFUSE, WATCH
from tgi_server.router.api.event_stream import EventStream, Outbox, StreamEnd
from tgi_server.router.errors import ClientGone, GenerationFailed, SlowReader


async def test_an_outbox_gives_everything_that_was_written_since_the_last_read():
    outbox = Outbox()
    outbox.write(b"a")
    outbox.write(b"b")
    assert await outbox.read() == b"ab"
    reading = asyncio.ensure_future(outbox.read())
    await asyncio.sleep(0)
    outbox.write(b"c")
    assert await reading == b"c"


async def test_a_closed_outbox_gives_what_is_left_and_then_nothing():
    outbox = Outbox()
    outbox.write(b"last")
    outbox.close()
    outbox.write(b"too late")
    assert [await outbox.read(), await outbox.read()] == [b"last", b""]


async def test_a_reader_that_leaves_too_much_unread_is_given_up():
    outbox = Outbox()
    overruns = []
    outbox.on_overrun = lambda: overruns.append(True)
    for _ in range(8):
        outbox.write(b"0" * (2**17 + 1))
        assert outbox.error is None
    outbox.write(b"1")
    assert isinstance(outbox.error, SlowReader)
    assert overruns == [True]
    assert await outbox.read() == b""


async def test_a_reader_may_leave_a_few_events_unread_however_large_they_are():
    outbox = Outbox()
    for _ in range(5):
        outbox.write(b"0" * 2**20)
    assert outbox.error is None
    outbox.write(b"1")
    assert isinstance(outbox.error, SlowReader)


class Told:
    """The end of a stream of two sequences, and how often it released what it held."""

    def __init__(self) -> None:
        self.outbox = Outbox()
        self.releases = 0
        self.end = StreamEnd(self.outbox, "/generate", self._release, 2, lambda: b"summary;", b"done;")

    def _release(self) -> None:
        self.releases += 1


async def test_a_stream_ends_after_its_last_sequence():
    told = Told()
    told.end(None)
    assert told.releases == 0
    told.end(None)
    assert (await told.outbox.read(), told.outbox.error, told.releases) == (b"summary;done;", None, 1)


async def test_the_first_failure_ends_a_stream_without_its_summary():
    told, error = Told(), GenerationFailed("the shards are gone")
    told.end(error)
    text = await told.outbox.read()
    assert b"the shards are gone" in text
    assert text.endswith(b"done;")
    assert b"summary" not in text
    assert (told.outbox.error, told.releases) == (error, 1)


class Client:
    """Receives a response; goes away when `leave` is called."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []
        self.times: list[float] = []
        self.ended = False
        self.has_comment = asyncio.Event()
        self._watcher: Callable[[], object] | None = None

    def leave(self) -> None:
        assert self._watcher is not None
        self._watcher()

    async def serve(self, response: EventStream) -> None:
        state = {REFUSE: lambda: None, WATCH: self._watch}
        await response({"type": "http", "state": state}, asyncio.Event().wait, self._send)  # type: ignore[arg-type]
        assert self._watcher is None

    def _watch(self, watcher: Callable[[], object] | None) -> None:
        self._watcher = watcher

    def sent_at(self, piece: bytes) -> list[float]:
        """Returns the times at which the piece was sent, by the event loop's clock."""
        return [at for at, sent in zip(self.times, self.pieces, strict=True) if sent == piece]

    async def _send(self, message: Message) -> None:
        self.pieces.append(message.get("body", b""))
        self.times.append(asyncio.get_running_loop().time())
        self.ended = message["type"] == "http.response.body" and not message["more_body"]
        if b":\n\n" in self.pieces:
            self.has_comment.set()


def streaming(outbox: Outbox) -> tuple[EventStream, list[Any]]:
    """Returns a response, and the reasons that it gives for its end."""
    reasons: list[Any] = []
    return EventStream(outbox, {"x-compute-type": "cpu"}, reasons.append), reasons


async def test_a_stream_is_sent_to_its_end():
    outbox, client = Outbox(), Client()
    response, reasons = streaming(outbox)
    assert response.headers["x-compute-type"] == "cpu"
    assert response.headers["cache-control"] == "no-cache"
    outbox.write(b"data:1\n\n")
    outbox.close()
    await client.serve(response)
    assert b"".join(client.pieces) == b"data:1\n\n"
    assert client.ended
    assert reasons == [None]


async def test_a_client_that_leaves_ends_its_stream():
    outbox, client = Outbox(), Client()
    response, reasons = streaming(outbox)
    serving = asyncio.ensure_future(client.serve(response))
    outbox.write(b"data:1\n\n")
    await asyncio.sleep(0)
    client.leave()
    await serving
    (reason,) = reasons
    assert isinstance(reason, ClientGone)


async def test_a_broken_connection_ends_its_stream_with_the_error():
    outbox = Outbox()
    response, reasons = streaming(outbox)
    broken = OSError("broken pipe")

    async def send(_: Message) -> None:
        raise broken

    state = {REFUSE: lambda: None, WATCH: lambda watcher: None}
    with pytest.raises(OSError, match="broken pipe"):
        await response({"type": "http", "state": state}, asyncio.Event().wait, send)  # type: ignore[arg-type]
    assert reasons == [broken]
    assert isinstance(outbox.error, ClientGone)


def in_simulated_time(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Runs the test on an event loop whose clock jumps to the next timer in place of waiting for it."""
    loop, seconds = asyncio.SelectorEventLoop(), 0.0
    select = loop._selector.select  # type: ignore[attr-defined]

    def jump(timeout: float | None) -> Any:
        nonlocal seconds
        seconds += timeout or 0.0
        return select(0)

    loop.time = lambda: seconds  # type: ignore[method-assign]
    loop._selector.select = jump  # type: ignore[attr-defined]
    try:
        loop.run_until_complete(test())
    finally:
        loop.close()


@pytest.mark.parametrize("sign", [b":\n\n", b'event: ping\ndata: {"type": "ping"}\n\n'])
def test_a_silent_stream_sends_a_sign_of_life_every_fifteen_seconds(sign: bytes):
    async def test() -> None:
        outbox, client = Outbox(sign), Client()
        response, _ = streaming(outbox)
        serving = asyncio.ensure_future(client.serve(response))
        await asyncio.sleep(61)
        assert client.sent_at(sign) == [15, 30, 45, 60]
        outbox.close()
        await serving

    in_simulated_time(test)


def test_while_an_answer_progresses_there_are_no_signs_of_life():
    async def test() -> None:
        outbox, client = Outbox(), Client()
        response, _ = streaming(outbox)
        serving = asyncio.ensure_future(client.serve(response))
        for _ in range(4):
            await asyncio.sleep(10)
            outbox.write(b"data: 1\n\n")
        await asyncio.sleep(16)
        assert client.sent_at(b":\n\n") == [55]
        outbox.close()
        await serving

    in_simulated_time(test)


async def test_a_silent_stream_sends_comments_so_that_no_proxy_closes_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(event_stream, "_KEEP_ALIVE_SECONDS", 0.01)
    outbox, client = Outbox(), Client()
    response, _ = streaming(outbox)
    serving = asyncio.ensure_future(client.serve(response))
    await asyncio.wait_for(client.has_comment.wait(), 5)
    outbox.close()
    await serving
