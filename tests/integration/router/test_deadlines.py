"""A request ends when its caller stops waiting, however the caller says so."""

import json
from typing import Any

import pytest

from tests.integration.router.conftest import Router, RouterFactory, events

MESSAGES = [{"role": "user", "content": "Hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/generate": {"inputs": "Hi", "parameters": {"max_new_tokens": 2000}},
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 2000},
    "/v1/completions": {"prompt": "Hi", "max_tokens": 2000},
    "/v1/responses": {"input": "Hi", "max_output_tokens": 2000},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 2000},
}
STREAMS = {
    "/generate_stream": BODIES["/generate"],
    **{path: body | {"stream": True} for path, body in BODIES.items() if path != "/generate"},
}


@pytest.fixture
async def slow_router(routers: RouterFactory) -> Router:
    """A router whose answers take minutes."""
    router: Router = await routers(shard={"step_seconds": 0.02}, admission="off")
    router.say("Rinse the rice. " * 500, end=False)
    return router


async def ended(router: Router) -> None:
    """Waits until no KV block is in use."""

    async def free() -> bool:
        return await router.metric("tgi_batch_current_max_tokens") == 0

    await router.until(free)
    await router.idle()


def with_timeout(body: dict[str, Any], timeout_ms: int) -> dict[str, Any]:
    if "parameters" in body:
        return body | {"parameters": body["parameters"] | {"timeout_ms": timeout_ms}}
    return body | {"timeout_ms": timeout_ms}


async def test_every_route_has_a_time_limit(slow_router: Router) -> None:
    for path, body in BODIES.items():
        response = await slow_router.post(path, **with_timeout(body, 60))
        assert response.status_code == 504, path
        assert (response.headers["x-should-retry"], response.headers["x-error-code"]) == ("false", "deadline_exceeded")
        answer = response.json()
        if path == "/generate":
            assert answer["error_type"] == "timeout"
        elif path == "/v1/messages":
            assert answer["error"]["type"] == "timeout_error"
        else:
            assert (answer["error"]["type"], answer["error"]["code"]) == ("timeout", "deadline_exceeded")
        assert "the deadline of the request has passed" in response.text
    await ended(slow_router)
    assert await slow_router.metric('tgi_request_failure{err="timeout"}') == len(BODIES)


async def test_a_stream_ends_with_an_error_event(slow_router: Router) -> None:
    for path, body in STREAMS.items():
        response = await slow_router.post(path, **with_timeout(body, 500))
        assert response.status_code == 200, path
        last = [each for each in events(response.text.replace("\r", "")) if each != "[DONE]"]
        text = last[-1] if last else response.text.split("data: ")[-1].split("\n")[0]
        assert "error" in json.loads(text.split("data: ")[-1]), path
        assert "the deadline of the request has passed" in response.text
    await ended(slow_router)


@pytest.mark.parametrize(
    "headers", [{"x-stainless-read-timeout": "0.06"}, {"x-envoy-expected-rq-timeout-ms": "60"}], ids=["openai", "envoy"]
)
async def test_headers_have_the_limit(slow_router: Router, headers: dict[str, str]) -> None:
    response = await slow_router.http.post("/v1/completions", json=BODIES["/v1/completions"], headers=headers)
    assert response.status_code == 504
    await ended(slow_router)


async def test_the_soonest_limit_counts(slow_router: Router) -> None:
    headers = {"x-stainless-read-timeout": "600", "x-envoy-expected-rq-timeout-ms": "0"}
    body = with_timeout(BODIES["/v1/completions"], 60)
    assert (await slow_router.http.post("/v1/completions", json=body, headers=headers)).status_code == 504


@pytest.mark.parametrize("value", ["", "NaN", "-1", "soon", "inf"])
async def test_a_header_that_is_no_time_is_no_limit(router: Router, value: str) -> None:
    headers = {"x-stainless-read-timeout": value, "x-envoy-expected-rq-timeout-ms": value}
    body = {"prompt": "Hi", "max_tokens": 3}
    assert (await router.http.post("/v1/completions", json=body, headers=headers)).status_code == 200


async def test_a_request_that_waits_too_long_leaves_the_queue(routers: RouterFactory) -> None:
    router = await routers(shard={"step_seconds": 0.02}, max_batch_size=1, admission="off")
    router.say("Rinse the rice. " * 500, end=False)
    async with router.http.stream("POST", "/generate_stream", json=BODIES["/generate"]) as running:
        lines = running.aiter_lines()
        await anext(lines)
        response = await router.post("/v1/completions", **with_timeout(BODIES["/v1/completions"], 60))
        assert response.status_code == 504
        assert "it waited for a place in a batch" in response.text
        assert await router.metric("tgi_queue_size") == 0
        assert await router.metric("tgi_batch_current_size") == 1


@pytest.mark.parametrize("value", [0, -1, 1.5, "1000", 2**31])
async def test_a_limit_that_is_none_is_refused(router: Router, value: object) -> None:
    response = await router.post("/v1/completions", prompt="Hi", timeout_ms=value)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "timeout_ms"
