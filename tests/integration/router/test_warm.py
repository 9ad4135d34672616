"""Prompts that are computed before they are needed, and kept."""

from typing import Any

import pytest

from tests.integration.router.conftest import Router, RouterFactory

TEXT = "Rinse the rice until the water is clear, then let it stand for ten minutes. " * 12
CHAT = {"messages": [{"role": "user", "content": TEXT}]}


async def cached(router: Router, path: str, **body: Any) -> int:
    """Returns how many tokens of a prompt had been computed before."""
    response = await router.post(path, **body, max_tokens=2)
    assert response.status_code == 200, response.text
    found: int = response.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return found


@pytest.mark.parametrize(("path", "body"), [("/v1/completions", {"prompt": TEXT}), ("/v1/chat/completions", CHAT)])
async def test_a_warm_prompt_is_found(router: Router, path: str, body: dict[str, Any]) -> None:
    response = await router.post("/v1/warm", **body, ttl_seconds=60)
    assert response.status_code == 200, response.text
    warm = response.json()
    assert (warm["object"], warm["cached_tokens"], warm["ttl_seconds"]) == ("warm", 0, 60)
    assert warm["prompt_tokens"] > 128
    assert await cached(router, path, **body) >= 128
    assert (await router.post("/v1/warm", **body)).json()["cached_tokens"] >= 128
    (request, *_) = router.shard.received
    assert request.max_new_tokens == 1


async def test_the_beginning_of_a_message_is_a_beginning_of_the_prompt(router: Router) -> None:
    assert (await router.post("/v1/warm", **CHAT)).status_code == 200
    whole = {"messages": [{"role": "user", "content": TEXT + "What comes next?"}]}
    assert await cached(router, "/v1/chat/completions", **whole) >= 128


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"prompt": ["a", "b"]},
        {"prompt": [1, 2]},
        {"prompt": "Hi", "ttl_seconds": 0},
        {"prompt": "Hi", "ttl_seconds": 1e9},
    ],
)
async def test_what_cannot_be_warmed_is_refused(router: Router, body: dict[str, Any]) -> None:
    assert (await router.post("/v1/warm", **body)).status_code == 400


@pytest.mark.parametrize("keep", [pytest.param("warm", marks=pytest.mark.slow), "key", None])
async def test_a_kept_prompt_is_given_up_after_others(routers: RouterFactory, keep: str | None) -> None:
    router = await routers(shard={"num_blocks": 40})
    match keep:
        case "warm":
            await router.post("/v1/warm", prompt=TEXT)
        case "key":
            await router.post("/v1/completions", prompt=TEXT, max_tokens=1, prompt_cache_key="k")
        case _:
            await router.post("/v1/completions", prompt=TEXT, max_tokens=1)
    for number in range(12):
        await router.post("/v1/completions", prompt=f"{number} " + TEXT[: len(TEXT) // 2], max_tokens=1)
    assert (await cached(router, "/v1/completions", prompt=TEXT) >= 128) is (keep is not None)


async def test_what_is_cached_of_a_salt_is_forgotten(router: Router) -> None:
    for salt in ("a", "b"):
        await router.post("/v1/warm", prompt=TEXT, cache_salt=salt)
    response = await router.post("/v1/forget", cache_salt="a")
    assert (response.status_code, response.json()) == (200, {"object": "forgotten", "files": 0})
    assert await cached(router, "/v1/completions", prompt=TEXT, cache_salt="a") == 0
    assert await cached(router, "/v1/completions", prompt=TEXT, cache_salt="b") >= 128
    for body in ({}, {"cache_salt": ""}):
        assert (await router.post("/v1/forget", **body)).status_code == 400
