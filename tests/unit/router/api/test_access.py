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
from tgi_server.router.settings import ApiKey

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
    app = ApiKeyMiddleware(tell_tenant, AccessRules(keys=[ApiKey("s3cret")]), lambda _: None)
    assert await status(app, authorization=authorization) == (200, "")


@pytest.mark.parametrize("headers", [{}, {"authorization": "Bearer s3cre"}, {"authorization": "Basic s3cret"}])
async def test_a_post_without_the_key_is_refused_and_a_get_is_not(headers: Headers):
    app = ApiKeyMiddleware(tell_tenant, AccessRules(keys=[ApiKey("s3cret")]), lambda _: None)
    code, body = await status(app, **headers)
    assert code == 401
    assert "the API key is missing or wrong" in body
    assert await status(app, "GET", **headers) == (200, "")


async def test_each_of_several_keys_is_a_tenant_whose_name_hides_the_key():
    app = ApiKeyMiddleware(tell_tenant, AccessRules(keys=[ApiKey("first"), ApiKey("second")]), lambda _: None)
    tenants = [(await status(app, authorization=f"Bearer {key}"))[1] for key in ("first", "second", "first")]
    assert tenants[0] == tenants[2] != tenants[1]
    assert all(tenants)
    assert "first" not in tenants[0]


def test_a_prompt_is_cached_for_its_tenant_and_salt_only():
    assert cache_namespace("", None) == ""
    names = {cache_namespace(tenant, salt) for tenant in ("", "a", "b") for salt in (None, "x", "y")}
    assert len(names) == 9
    assert cache_namespace("a", "x") == cache_namespace("a", "x")


BROWSER: Headers = {"accept_language": "en", "user_agent": "Mozilla/5.0"}
OWN = [
    *("localhost:8080", "LOCALHOST.", "app.localhost", "127.0.0.1:3000", "192.168.1.5", "[::1]", "[::1]:3000"),
    *("[fe80::1%eth0]:80", "tgi.example", "TGI.EXAMPLE.:80", "eu.llm.example", "a.b.llm.example:8080"),
]
# Of container networks, Kubernetes, clouds, and networks at home.
PRIVATE = [
    *("tgi", "tgi:80", "gpu-box:8080", "tgi.models.svc", "tgi.models.svc.cluster.local:80", "host.docker.internal"),
    *("ip-10-0-0-1.ec2.internal", "printer.local", "box.lan", "box.home.arpa:8080"),
]
PUBLIC = [
    *("evil.example", "evil.example:8080", "127.0.0.1.evil.example", "localhost.evil.example", "llm.example"),
    *("tgi.example.evil.example", "eviltgi.example", "local.evil.example", "tgi.dev"),
]


def server(*, only_here: bool) -> ForeignPageMiddleware:
    rules = AccessRules(hosts=["tgi.example", "*.llm.example"], origins=["http://page.example"], only_here=only_here)
    return ForeignPageMiddleware(tell_tenant, rules, lambda _: None)


@pytest.mark.parametrize("headers", [{}, BROWSER], ids=["program", "browser"])
@pytest.mark.parametrize(
    ("hosts", "code"), [(OWN, 200), (PRIVATE, 403), (PUBLIC, 403)], ids=["own", "private", "public"]
)
async def test_a_server_on_loopback_answers_only_to_its_own_names(hosts: list[str], code: int, headers: Headers):
    for host in hosts:
        assert (await status(server(only_here=True), "GET", host=host, **headers))[0] == code, host


@pytest.mark.parametrize(
    "headers",
    [
        BROWSER,
        {"accept_language": ""},
        {"accept_language": "*", "referer": "http://evil.example"},
        {"sec_fetch_site": "same-origin", "sec_fetch_mode": "cors"},
        {"sec_fetch_site": "none", "sec_fetch_mode": "navigate"},
    ],
    ids=str,
)
async def test_browsers_call_a_server_without_a_key_by_names_that_no_page_of_the_web_has(headers: Headers):
    for method in ("GET", "POST", "DELETE"):
        for host in (*OWN, *PRIVATE):
            assert (await status(server(only_here=False), method, host=host, **headers))[0] == 200, host
        for host in PUBLIC:
            code, body = await status(server(only_here=False), method, host=host, **headers)
            assert code == 403, host
            assert "--allowed-hosts" in body


async def test_a_page_whose_name_was_made_to_lead_here_may_not_post_to_itself():
    for host in PUBLIC:
        assert (await status(server(only_here=False), host=host, origin=f"http://{host}"))[0] == 403, host


@pytest.mark.parametrize(
    "headers",
    [{}, {"user_agent": "Mozilla/5.0 (compatible; a program)"}, {"accept_language": "*", "sec_fetch_mode": "cors"}],
    ids=["program", "program that calls itself a browser", "Node.js"],
)
async def test_programs_call_a_server_by_any_name(headers: Headers):
    for host in (*OWN, *PRIVATE, *PUBLIC):
        assert (await status(server(only_here=False), host=host, **headers))[0] == 200, host


async def test_pages_that_are_allowed_may_call_a_server_by_any_name():
    page = BROWSER | {"origin": "http://page.example", "sec_fetch_site": "cross-site"}
    assert (await status(server(only_here=False), host="llm.example", **page))[0] == 200
    for rules in (AccessRules(), AccessRules(hosts=["*"], only_here=True)):
        assert (await status(ForeignPageMiddleware(tell_tenant, rules, lambda _: None), host="any.example", **BROWSER))[
            0
        ] == 200


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
    app = ForeignPageMiddleware(tell_tenant, AccessRules(origins=["http://friend.example"]), lambda _: None)
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
    app = ForeignPageMiddleware(tell_tenant, AccessRules(), lambda _: None)
    assert (await status(app, content_type=content_type))[0] == code
    assert (await status(app, "GET", content_type=content_type))[0] == 200
