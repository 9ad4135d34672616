"""A key is wanted of every POST where the server has one; without one, pages of other sites are kept out."""

import pytest
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tgi_server.router.api.access import (
    AccessRules,
    ApiKeyMiddleware,
    ForeignPageMiddleware,
    cache_namespace,
    tenant_of,
)

Headers = dict[str, str]


async def status(app: ASGIApp, method: str = "POST", **headers: str) -> tuple[int, str]:
    """Returns the status and the body of a response. headers: with `_` for `-`."""
    sent: list[Message] = []

    async def receive() -> Message:
        return {"type": "http.request", "body": b"{}", "more_body": False}

    async def send(message: Message) -> None:
        sent.append(message)

    encoded = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    scope = {"type": "http", "method": method, "path": "/generate", "headers": encoded, "state": {}}
    await app(scope, receive, send)
    return sent[0]["status"], sent[1]["body"].decode()


async def tell_tenant(scope: Scope, receive: Receive, send: Send) -> None:
    response: Response = PlainTextResponse(tenant_of(Request(scope)))
    await response(scope, receive, send)


@pytest.mark.parametrize("authorization", ["Bearer s3cret", "bearer s3cret", "BEARER  s3cret "])
async def test_the_key_opens_the_door_however_the_scheme_is_written(authorization: str):
    app = ApiKeyMiddleware(tell_tenant, AccessRules(keys=["s3cret"]))
    assert await status(app, authorization=authorization) == (200, "")


@pytest.mark.parametrize("headers", [{}, {"authorization": "Bearer s3cre"}, {"authorization": "Basic s3cret"}])
async def test_a_post_without_the_key_is_refused_and_a_get_is_not(headers: Headers):
    app = ApiKeyMiddleware(tell_tenant, AccessRules(keys=["s3cret"]))
    code, body = await status(app, **headers)
    assert code == 401
    assert "the API key is missing or wrong" in body
    assert await status(app, "GET", **headers) == (200, "")


async def test_each_of_several_keys_is_a_tenant_whose_name_hides_the_key():
    app = ApiKeyMiddleware(tell_tenant, AccessRules(keys=["first", "second"]))
    tenants = [(await status(app, authorization=f"Bearer {key}"))[1] for key in ("first", "second", "first")]
    assert tenants[0] == tenants[2] != tenants[1]
    assert all(tenants)
    assert "first" not in tenants[0]


def test_a_prompt_is_cached_for_its_tenant_and_salt_only():
    assert cache_namespace("", None) == ""
    names = {cache_namespace(tenant, salt) for tenant in ("", "a", "b") for salt in (None, "x", "y")}
    assert len(names) == 9
    assert cache_namespace("a", "x") == cache_namespace("a", "x")


@pytest.mark.parametrize(
    ("host", "allowed"),
    [
        ("localhost:8080", True),
        ("app.localhost", True),
        ("127.0.0.1:3000", True),
        ("[::1]:3000", True),
        ("tgi", True),
        ("TGI.:80", True),
        ("evil.example", False),
        ("127.0.0.1.evil.example", False),
    ],
)
async def test_a_server_on_loopback_answers_only_to_its_own_names(host: str, allowed: bool):
    app = ForeignPageMiddleware(tell_tenant, AccessRules(hosts=["tgi"]))
    code, body = await status(app, "GET", host=host)
    assert code == (200 if allowed else 403)
    assert allowed or "--allowed-hosts" in body


async def test_any_name_is_answered_to_where_the_server_listens_for_others():
    assert (await status(ForeignPageMiddleware(tell_tenant, AccessRules()), host="tgi.example"))[0] == 200
    assert (await status(ForeignPageMiddleware(tell_tenant, AccessRules(hosts=["*"])), host="tgi.example"))[0] == 200


@pytest.mark.parametrize(
    ("headers", "allowed"),
    [
        ({}, True),
        ({"origin": "http://tgi:8080"}, True),
        ({"origin": "http://friend.example"}, True),
        ({"origin": "http://evil.example"}, False),
        ({"origin": "null"}, False),
        ({"origin": "http://evil.example", "sec_fetch_site": "same-origin"}, True),
        ({"sec_fetch_site": "cross-site"}, False),
        ({"sec_fetch_site": "same-site"}, False),
    ],
)
async def test_a_browser_may_post_for_pages_of_this_server_and_for_origins_that_are_allowed(
    headers: Headers, allowed: bool
):
    app = ForeignPageMiddleware(tell_tenant, AccessRules(origins=["http://friend.example"]))
    code, body = await status(app, host="tgi:8080", **headers)
    assert code == (200 if allowed else 403)
    assert allowed or "--cors-allow-origin" in body


@pytest.mark.parametrize(
    ("content_type", "code"),
    [
        ("application/json", 200),
        ("application/x-www-form-urlencoded", 200),
        ("text/plain; charset=utf-8", 415),
        ("Multipart/Form-Data", 415),
    ],
)
async def test_types_that_pages_may_send_anywhere_are_refused(content_type: str, code: int):
    app = ForeignPageMiddleware(tell_tenant, AccessRules())
    assert (await status(app, content_type=content_type))[0] == code
    assert (await status(app, "GET", content_type=content_type))[0] == 200
