"""A server that is too busy says so at once, and when to come again."""

import asyncio
from typing import Any

import pytest

from tests.integration.router.conftest import Router, RouterFactory

BODY: dict[str, Any] = {"prompt": "Hi", "max_tokens": 400}


async def measured(router: Router) -> Router:
    """Returns the router once it knows what steps cost."""
    router.say("Rinse the rice. " * 500, end=False)
    for _ in range(2):
        await asyncio.gather(
            *(router.post("/v1/completions", prompt=f"Hi {each}" * 8, max_tokens=8) for each in range(2))
        )
    return router


async def test_a_request_that_cannot_be_in_time_is_refused(routers: RouterFactory) -> None:
    router = await measured(await routers(shard={"step_seconds": 0.01}))
    refused = await router.post("/v1/completions", **BODY, timeout_ms=1000)
    assert refused.status_code == 503
    assert int(refused.headers["retry-after"]) >= 1
    error = refused.json()["error"]
    assert (error["type"], error["code"]) == ("overloaded", "deadline_unreachable")
    assert "after its deadline" in error["message"]
    refused = await router.post(
        "/generate", inputs="Hi", parameters={"max_new_tokens": 400, "timeout_ms": 1000, "do_sample": False}
    )
    assert (refused.status_code, refused.json()["error_type"]) == (503, "overloaded")
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 400, "timeout_ms": 1000}
    refused = await router.post("/v1/messages", **body)
    assert (refused.status_code, refused.json()["error"]["type"]) == (503, "overloaded_error")
    assert await router.metric('tgi_request_failure{err="overloaded"}') == 3
    assert await router.metric("tgi_batch_current_size") == 0


async def test_a_stream_that_cannot_be_in_time_is_refused_with_a_status(routers: RouterFactory) -> None:
    router = await measured(await routers(shard={"step_seconds": 0.01}))
    limits = {"max_tokens": 400, "timeout_ms": 1000, "stream": True}
    chat = {"messages": [{"role": "user", "content": "Hi"}]}
    parameters = {"max_new_tokens": 400, "timeout_ms": 1000, "do_sample": False}
    bodies: dict[str, dict[str, Any]] = {
        "/v1/completions": {"prompt": ["Hi", "Ho"], **limits},
        "/v1/chat/completions": chat | limits,
        "/v1/responses": {"input": "Hi", "max_output_tokens": 400, "timeout_ms": 1000, "stream": True},
        "/v1/messages": chat | limits,
        "/generate_stream": {"inputs": "Hi", "parameters": parameters},
    }
    for path, body in bodies.items():
        refused = await router.post(path, **body)
        assert (refused.status_code, refused.headers["content-type"]) == (503, "application/json"), path
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.headers["x-error-code"] == "deadline_unreachable"
    assert await router.metric('tgi_request_failure{err="overloaded"}') == len(bodies)
    assert await router.metric("tgi_queue_size") == 0


@pytest.mark.parametrize("settings", [{"admission": "off"}, {}])
async def test_without_admission_or_deadline_it_is_tried(routers: RouterFactory, settings: dict[str, str]) -> None:
    router = await measured(await routers(shard={"step_seconds": 0.002}, **settings))
    limit = {"timeout_ms": 60} if settings else {"max_tokens": 40}
    response = await router.post("/v1/completions", **BODY | limit)
    assert response.status_code == (504 if settings else 200)
