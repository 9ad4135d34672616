"""A body is read no further than the limit, and what is wrong with it is told in one line."""

from collections.abc import Sequence

import pytest
from pydantic import Field
from starlette.requests import Request
from starlette.types import Message

from tgi_server.router.api.admission import read_body, read_json
from tgi_server.router.api.memory import LEASE, Account, Lease
from tgi_server.router.errors import ClientGone, InvalidRequest, PayloadTooLarge, UnsupportedMediaType
from tgi_server.router.schemas.base import Items, RequestModel
from tgi_server.router.schemas.validation import validate

LIMIT = 10


class Order(RequestModel):
    name: str
    number: int = Field(ge=1, le=5)
    parts: Items[int] = []


class Client:
    """Sends a body in pieces; None: goes away instead. unread: the pieces that nobody has asked for."""

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
    assert await read_body(Client(*pieces).request, LIMIT) == b"".join(pieces)


async def test_the_memory_that_a_body_takes_is_counted():
    client = Client(b"[{},", b"{}]")
    await read_body(client.request, LIMIT)
    assert client.lease.held > 500
    with pytest.raises(PayloadTooLarge, match="--max-client-memory"):
        await read_body(Client(b"{" * 2_000).request, 2_000)


async def test_a_body_that_is_compressed_is_refused():
    assert await read_body(Client(b"{}", content_encoding="identity").request, LIMIT) == b"{}"
    with pytest.raises(UnsupportedMediaType, match="the content encoding is 'gzip'"):
        await read_body(Client(b"{}", content_encoding="GZIP").request, LIMIT)


async def test_a_body_that_is_announced_as_too_long_is_refused_after_it_has_come():
    client = Client(b"0" * 6, b"0" * 6, content_length="12")
    with pytest.raises(PayloadTooLarge, match=r"more than 10 bytes \(--payload-limit\)"):
        await read_body(client.request, LIMIT)
    assert not client.unread


async def test_a_body_that_turns_out_too_long_is_refused_after_it_has_come():
    client = Client(b"0" * 6, b"0" * 6, b"0")
    with pytest.raises(PayloadTooLarge):
        await read_body(client.request, LIMIT)
    assert not client.unread


async def test_a_client_that_waits_for_leave_is_refused_before_it_sends_a_body():
    client = Client(b"0" * 12, content_length="12", expect="100-continue")
    with pytest.raises(PayloadTooLarge):
        await read_body(client.request, LIMIT)
    assert client.unread


async def test_a_client_that_leaves_in_the_middle_of_its_body_is_gone():
    with pytest.raises(ClientGone, match="before its request was complete"):
        await read_body(Client(b"01", None).request, LIMIT)


@pytest.mark.parametrize("body", [b"", b"{", b"{'a': 1}", b"\xff", b"[" * 100_000])
def test_what_is_not_json_is_refused_in_one_line(body: bytes):
    with pytest.raises(InvalidRequest, match=r"^the request is not JSON: .+$"):
        read_json(body)


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (b"[]", "the request: Input should be an object"),
        (b'{"number": 1}', "`name`: Field required"),
        (b'{"name": "a", "number": 9}', "`number` is 9; it must be at most 5"),
        (b'{"name": "a", "number": 0}', "`number` is 0; it must be at least 1"),
        (b'{"name": 1, "number": "2"}', "`name`: Input should be a valid string; `number`: Input should be a valid "),
        (b'{"name": "a", "number": 1, "parts": [1, "x", "y"]}', "`parts[1]`: Input should be a valid integer"),
    ],
)
def test_each_fault_of_a_body_is_told_by_the_field_and_the_bound(body: bytes, told: str):
    with pytest.raises(InvalidRequest) as refusal:
        validate(Order, read_json(body))
    assert str(refusal.value).startswith(told)


def test_a_long_number_is_cut_and_texts_of_the_client_are_not_repeated():
    with pytest.raises(InvalidRequest) as refusal:
        validate(Order, read_json(b'{"name": ["secret"], "number": ' + b"9" * 1000 + b"}"))
    told = str(refusal.value)
    assert "secret" not in told
    assert len(told) < 200


def test_of_very_many_faults_the_first_ones_are_told():
    class Many(RequestModel):
        parts: list[Order]

    with pytest.raises(InvalidRequest) as refusal:
        validate(Many, read_json(b'{"parts": [' + b",".join([b"{}"] * 50) + b"]}"))
    assert str(refusal.value).count("Field required") == 10
    assert str(refusal.value).endswith("; and more")
