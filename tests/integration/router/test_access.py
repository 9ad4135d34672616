"""Keys, tenants, and pages that have a browser call the server."""

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.integration.router.conftest import Router, RouterFactory, in_one_loop
from tests.integration.router.process import Start
from tgi_server import demo_model
from tgi_server.router.settings import RouterSettings

PROMPT = "Rinse the rice until the water is clear, then let it stand for ten minutes. " * 4
MESSAGES = [{"role": "user", "content": PROMPT}]
BODIES: dict[str, dict[str, Any]] = {
    "/generate": {"inputs": PROMPT},
    "/generate_stream": {"inputs": PROMPT},
    "/": {"inputs": PROMPT},
    "/v1/completions": {"prompt": PROMPT},
    "/v1/chat/completions": {"messages": MESSAGES},
    "/invocations": {"inputs": PROMPT},
}
KEYS = ("first-key", "second-key")


async def hits(router: Router) -> float:
    return await router.metric("tgi_prefix_cache_hit_tokens_total")


async def found(router: Router, path: str, body: dict[str, Any], key: str | None = None) -> float:
    """Tokens of the prompt that were in the prefix cache."""
    before = await hits(router)
    headers = {"authorization": f"Bearer {key}"} if key else {}
    response = await router.http.post(path, json=body, headers=headers)
    assert response.status_code == 200, response.text
    await router.idle()
    return await hits(router) - before


@pytest.mark.parametrize("path", BODIES)
async def test_prompts_with_different_salts_share_nothing(router: Router, path: str):
    body = BODIES[path]
    assert await found(router, path, body) == 0
    assert await found(router, path, body) > 10
    assert await found(router, path, body | {"cache_salt": "a"}) == 0
    assert await found(router, path, body | {"cache_salt": "b"}) == 0
    assert await found(router, path, body | {"cache_salt": "a"}) > 10


async def test_a_salt_among_tgis_parameters(router: Router):
    for salt in ("a", "b"):
        body = {"inputs": PROMPT, "parameters": {"cache_salt": salt}}
        assert await found(router, "/generate", body) == 0
        assert await found(router, "/generate", body | {"cache_salt": salt}) > 10
        assert await found(router, "/vertex", {"instances": [body]}) > 10


@pytest.mark.parametrize("salt", ["", 3, "x" * 1025])
async def test_a_cache_salt_of_a_wrong_type_or_length_is_refused(router: Router, salt: Any):
    response = await router.post("/v1/chat/completions", messages=MESSAGES, cache_salt=salt)
    assert response.status_code == 400
    assert "cache_salt" in response.text


def key_file(folder: Path, content: str) -> Path:
    file = folder / "keys"
    file.write_text(content)
    return file


async def test_each_of_several_keys_has_a_prefix_cache_of_its_own(routers: RouterFactory, tmp_path: Path):
    router = await routers(api_key="third-key", api_key_file=key_file(tmp_path, "first-key\n\nsecond-key\n"))
    body = {"inputs": PROMPT}
    for key in (*KEYS, "third-key"):
        assert await found(router, "/generate", body, key) == 0
        assert await found(router, "/generate", body, key) > 10
        assert await found(router, "/generate", body | {"cache_salt": "a"}, key) == 0
    values = ("Bearer", "Bearer first", "Bearer first-keys", "Basic first-key", "first-key", "Bearer first-key second")
    for value in values:
        refused = await router.http.post("/generate", json=body, headers={"authorization": value})
        assert refused.status_code == 401, value


async def test_a_request_without_a_key_is_logged_and_counted(routers: RouterFactory, caplog: pytest.LogCaptureFixture):
    router = await routers(api_key="secret")
    assert (await router.http.post("/generate", json={"inputs": "Hello"})).status_code == 401
    assert 'tgi_requests_refused_total{err="unauthorized"} 1' in (await router.http.get("/metrics")).text
    assert "refused POST /generate from 127.0.0.1: the API key is missing or wrong" in caplog.text


async def test_keys_are_taken_as_bytes(routers: RouterFactory):
    router = await routers(api_key="clé")
    headers = {"authorization": "bearer clé".encode()}
    assert (await router.http.post("/generate", json={"inputs": "Hello"}, headers=headers)).status_code == 200


@pytest.mark.parametrize(
    ("content", "fault"),
    [("", "has no keys"), ("\n\n", "has no keys"), ("one\ntwo words\n", "line 2 "), ("a\x00b", "line 1 ")],
)
def test_a_file_without_keys_is_refused(tmp_path: Path, content: str, fault: str):
    with pytest.raises(ValueError, match=fault) as refusal:
        RouterSettings(tokenizer_name=demo_model.PATH, api_key_file=key_file(tmp_path, content))
    assert "two words" not in str(refusal.value)


def test_a_file_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match="No such file"):
        RouterSettings(tokenizer_name=demo_model.PATH, api_key_file="/nowhere/keys")


def test_keys_are_in_no_log(start: Start, flags: tuple[str, list[str]], tmp_path: Path):
    url, given = flags
    file = key_file(tmp_path, "first-key\nsecond-key\n")
    process = start(*given, f"--api-key-file={file}", "--log-level=DEBUG").until_ready(url)
    for key in (*KEYS, "wrong-key"):
        headers = {"authorization": f"Bearer {key}"}
        body = {"inputs": "Hello", "parameters": {"max_new_tokens": 2}}
        httpx.post(f"{url}/generate", json=body, headers=headers, timeout=30)
        httpx.post(f"{url}/generate", content=b"{", headers=headers, timeout=30)
    process.popen.terminate()
    process.wait()
    assert "-key" not in "\n".join(process.lines()).replace("api_key", "").replace("api-key", "")


PAGES = [
    {"origin": "https://evil.example"},
    {"origin": "null"},
    {"origin": "http://localhost:1"},
    {"sec-fetch-site": "cross-site"},
    {"sec-fetch-site": "same-site", "origin": "http://a.here"},
]
TYPES = [None, "application/json", "text/plain", "text/plain;charset=UTF-8", "application/x-www-form-urlencoded"]


@in_one_loop
@pytest.mark.parametrize("page", PAGES, ids=str)
@pytest.mark.parametrize("media_type", TYPES)
async def test_pages_of_other_sites_may_not_post(shared_router: Router, page: dict[str, str], media_type: str | None):
    headers = page | ({"content-type": media_type} if media_type else {})
    response = await shared_router.http.post("/generate", content=b'{"inputs": "Hello"}', headers=headers)
    assert response.status_code == 403
    assert response.json()["error_type"] == "forbidden"
    assert "--cors-allow-origin" in response.json()["error"]
    assert shared_router.service.capacity.in_flight == 0
    assert await shared_router.metric("tgi_request_count") == 0


async def test_the_servers_own_page_and_programs_may_post(router: Router):
    host = router.url.removeprefix("http://")
    callers: list[dict[str, str]] = [
        {},
        {"content-type": "application/json; charset=utf-8"},
        {"content-type": "application/x-www-form-urlencoded"},
        {"content-type": "application/octet-stream"},
        {"origin": f"http://{host}"},
        {"origin": "https://behind.a.proxy", "host": "behind.a.proxy"},
        {"origin": "https://behind.a.proxy", "sec-fetch-site": "same-origin"},
        {"sec-fetch-site": "none"},
    ]
    for headers in callers:
        response = await router.http.post("/generate", content=b'{"inputs": "Hello"}', headers=headers)
        assert response.status_code == 200, headers


@pytest.mark.parametrize(
    "headers",
    [
        {"content-type": "text/plain"},
        {"content-type": "TEXT/PLAIN; charset=x"},
        {"content-type": "multipart/form-data; boundary=x"},
        {"content-encoding": "gzip"},
    ],
)
async def test_what_only_pages_send_is_no_request_nor_what_is_compressed(router: Router, headers: dict[str, str]):
    response = await router.http.post("/v1/completions", content=b'{"prompt": "Hello"}', headers=headers)
    assert response.status_code == 415
    assert response.json()["error"]["type"] == "unsupported_media_type"
    (sent,) = headers.values()
    assert sent.partition(";")[0].lower() in response.json()["error"]["message"]


async def test_a_page_that_is_allowed_may_post(routers: RouterFactory):
    router = await routers(cors_allow_origin=["https://page.example"])
    headers = {"origin": "https://page.example", "sec-fetch-site": "cross-site"}
    assert (await router.http.post("/generate", json={"inputs": "Hello"}, headers=headers)).status_code == 200
    headers["origin"] = "https://other.example"
    assert (await router.http.post("/generate", json={"inputs": "Hello"}, headers=headers)).status_code == 403


@pytest.mark.parametrize("known_by", ["key", "address"])
async def test_a_client_with_all_places_has_nobody_elses_requests_refused(
    routers: RouterFactory, tmp_path: Path, known_by: str
):
    by_key = known_by == "key"
    given = {"api_key_file": key_file(tmp_path, "first-key\nsecond-key\n")} if by_key else {}
    router = await routers(max_concurrent_requests=4, max_batch_size=8, shard={"step_seconds": 0.02}, **given)
    greedy, other = (
        httpx.AsyncClient(
            base_url=router.url,
            headers={"authorization": f"Bearer {key}"} if by_key else {},
            transport=httpx.AsyncHTTPTransport(local_address="127.0.0.1" if by_key else address),
            timeout=30,
        )
        for key, address in zip(KEYS, ("127.0.0.1", "127.0.0.2"), strict=True)
    )
    long = {"inputs": "Hello", "parameters": {"max_new_tokens": 2_000, "ignore_eos": True}}
    async with greedy, other:
        running = [asyncio.create_task(greedy.post("/generate", json=long)) for _ in range(4)]
        await router.until(lambda: router.service.capacity.in_flight == 4)
        assert (await greedy.post("/generate", json=long)).status_code == 429
        for path in ("/generate", "/tokenize") * 3:
            assert (await other.post(path, json={"inputs": "Hello"})).status_code == 200
        for each in running:
            each.cancel()


async def test_with_a_key_the_key_decides(routers: RouterFactory):
    router = await routers(api_key="secret", hostname="127.0.0.1")
    headers = {"authorization": "Bearer secret", "origin": "https://page.example", "host": "any.name"}
    assert (await router.http.post("/generate", json={"inputs": "Hello"}, headers=headers)).status_code == 200


HERE = [
    "localhost",
    "localhost:8080",
    "127.0.0.1:8080",
    "[::1]:8080",
    "LOCALHOST.",
    "a.localhost",
    "oatmill.internal",
]
ELSEWHERE = ["evil.example", "evil.example:8080", "localhost.evil.example", "127.0.0.1.evil.example", ""]


async def test_names_that_lead_to_loopback_are_not_the_servers(routers: RouterFactory):
    router = await routers(hostname="127.0.0.1", allowed_hosts=["oatmill.internal"])
    for host in HERE:
        assert (await router.http.get("/info", headers={"host": host})).status_code == 200, host
        allowed = await router.http.post("/generate", json={"inputs": "Hello"}, headers={"host": host})
        assert allowed.status_code == 200, host
    for host in ELSEWHERE:
        for path in ("/info", "/", "/metrics"):
            assert (await router.http.get(path, headers={"host": host})).status_code == 403, (host, path)
        refused = await router.http.post("/generate", json={"inputs": "Hello"}, headers={"host": host})
        assert refused.status_code == 403, host
        assert "--allowed-hosts" in refused.json()["error"]


async def test_any_name_may_be_allowed(routers: RouterFactory):
    router = await routers(allowed_hosts=["*"])
    assert (await router.http.get("/info", headers={"host": "any.name"})).status_code == 200


def test_a_server_that_others_reach_is_no_pages_of_another_name(start: Start, flags: tuple[str, list[str]]):
    """A page of evil.example, whose name leads here by now, gets nothing; services get what they ask for."""
    url, given = flags
    start(*given, "--hostname=0.0.0.0").until_ready(url)
    body = {"inputs": "Hello", "parameters": {"max_new_tokens": 2}}
    browser = {"user-agent": "Mozilla/5.0", "accept-language": "en"}
    for host, headers, code in (
        ("evil.example:8080", browser | {"origin": "http://evil.example:8080"}, 403),
        ("evil.example:8080", browser, 403),
        ("evil.example:8080", {}, 200),
        ("tgi:80", {}, 200),
        ("tgi:80", browser | {"origin": "http://tgi:80"}, 200),
        (url.removeprefix("http://"), browser | {"origin": url}, 200),
        ("tgi.models.svc.cluster.local", {}, 200),
    ):
        answer = httpx.post(f"{url}/generate", json=body, headers={"host": host, **headers}, timeout=30)
        assert answer.status_code == code, (host, headers)
        assert httpx.get(f"{url}/info", headers={"host": host, **browser}).status_code == (
            403 if "evil" in host else 200
        )


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        ("one\ntwo weight=0\n", "line 2 .*weight is 0"),
        ("one weight=x\n", "line 1 .*numbers"),
        ("one weight=nan\n", "line 1 "),
        ("one max-priority=0.5\n", "line 1 "),
        ("one priority=5\n", "line 1 "),
    ],
)
def test_settings_of_a_key_that_are_wrong_are_refused(tmp_path: Path, content: str, fault: str):
    with pytest.raises(ValueError, match=fault):
        RouterSettings(tokenizer_name=demo_model.PATH, api_key_file=key_file(tmp_path, content))


def test_shares_need_several_keys():
    with pytest.raises(ValueError, match="--fairness=key needs several keys"):
        RouterSettings(tokenizer_name=demo_model.PATH, api_key="one", fairness="key")


async def test_a_key_may_use_the_classes_that_it_is_given(routers: RouterFactory, tmp_path: Path):
    keys = key_file(tmp_path, "first-key\nsecond-key max-priority=-3\n")
    router = await routers(api_key_file=keys, max_priority=2)

    async def status(key: str, priority: int) -> int:
        body = {"prompt": "Hi", "max_tokens": 2, "priority": priority}
        response = await router.http.post("/v1/completions", json=body, headers={"authorization": f"Bearer {key}"})
        if response.status_code != 200:
            assert response.json()["error"]["param"] == "priority"
        return response.status_code

    assert [await status("first-key", each) for each in (1, 2, 9)] == [400, 200, 200]
    assert [await status("second-key", each) for each in (-4, -3, 0)] == [400, 200, 200]


async def test_no_request_is_above_the_default_class_unless_it_may_be(router: Router):
    body = {"inputs": "Hi", "parameters": {"priority": -1}}
    response = await router.post("/generate", **body)
    assert response.status_code == 422
    assert "`parameters.priority` is -1; the lowest that this request may have is 0 (--max-priority)" in response.text


async def test_the_requests_of_one_key_do_not_hold_up_those_of_another(routers: RouterFactory, tmp_path: Path):
    keys = key_file(tmp_path, "first-key weight=2\nsecond-key\n")
    router = await routers(api_key_file=keys, fairness="key", max_batch_size=2, shard={"step_seconds": 0.01})
    router.say("Rinse the rice. " * 500, end=False)

    async def ask(key: str, tokens: int) -> httpx.Response:
        body = {"prompt": PROMPT, "max_tokens": tokens}
        return await router.http.post("/v1/completions", json=body, headers={"authorization": f"Bearer {key}"})

    crowd = [asyncio.create_task(ask("second-key", 2000)) for _ in range(12)]
    await router.until(lambda: len(router.shard.received) == 2)
    assert (await ask("first-key", 3)).json()["usage"]["completion_tokens"] == 3
    assert not any(each.done() for each in crowd)
    for each in crowd:
        each.cancel()
