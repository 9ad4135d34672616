"""The application has every route, and an error object for what is not there."""

import json

import httpx
import pytest

from tests.fakes.router_service import RouterService
from tgi_server.router.api.access import AccessRules
from tgi_server.router.settings import ApiKey


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/nothing", 404), ("DELETE", "/generate", 405), ("POST", "/v1/nothing", 404), ("GET", "/generate", 405)],
)
async def test_a_path_or_method_that_is_not_there_gets_an_error_object(
    client: httpx.AsyncClient, method: str, path: str, status: int
):
    response = await client.request(method, path)
    assert response.status_code == status
    told = response.json()
    assert told["error_type"] == "not_found"
    message = told["error"]["message"] if path.startswith("/v1/") else told["error"]
    assert message.startswith(f"{method} {path}: ")


async def test_pages_of_an_origin_that_is_allowed_may_read_and_others_may_not(router: RouterService):
    async with router.client(AccessRules(origins=["http://friend.example"])) as client:
        body = json.dumps({"inputs": "hello"})
        friend = await client.post("/generate", content=body, headers={"origin": "http://friend.example"})
        assert friend.headers["access-control-allow-origin"] == "http://friend.example"
        foe = await client.post("/generate", content=body, headers={"origin": "http://foe.example"})
        assert foe.status_code == 403
        assert "access-control-allow-origin" not in foe.headers


async def test_with_keys_a_page_needs_one_and_no_origin(router: RouterService):
    async with router.client(AccessRules(keys=[ApiKey("s3cret")])) as client:
        headers = {"authorization": "Bearer s3cret", "origin": "http://foe.example"}
        assert (await client.post("/generate", json={"inputs": "hello"}, headers=headers)).status_code == 200
        assert (await client.post("/generate", json={"inputs": "hello"})).status_code == 401
        compressed = {**headers, "content-encoding": "gzip"}
        assert (await client.post("/generate", content=b"\x1f\x8b", headers=compressed)).status_code == 415
        assert (await client.get("/info")).status_code == 200
