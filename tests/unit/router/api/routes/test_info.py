"""The server tells its health, its limits, its metrics and its one model."""

import httpx
import pytest

from tests.fakes.router_service import LIMITS, RouterService


@pytest.mark.parametrize("path", ["/health", "/ping", "/"])
async def test_health_follows_the_shards(router: RouterService, client: httpx.AsyncClient, path: str):
    assert (await client.get(path)).status_code == 200
    assert (await client.head(path)).status_code == 200
    router.shards.well = False
    response = await client.get(path)
    assert (response.status_code, response.json()["error_type"]) == (503, "healthcheck")


async def test_the_limits_are_those_of_the_server(client: httpx.AsyncClient):
    info = (await client.get("/info")).json()
    assert (info["model_id"], info["model_sha"], info["version"]) == ("maker/model", None, "3.3.6+oatmill.1.2.3")
    assert (info["max_input_tokens"], info["max_total_tokens"]) == (LIMITS.max_input_tokens, LIMITS.max_total_tokens)
    assert info["model_pipeline_tag"] == "text-generation"


async def test_the_one_model_is_found_by_its_name(client: httpx.AsyncClient):
    (model,) = (await client.get("/v1/models")).json()["data"]
    assert (await client.get(f"/v1/models/{model['id']}")).json() == model
    response = await client.get("/v1/models/maker/other")
    assert response.status_code == 404
    assert response.json()["error"]["message"] == "there is no model 'maker/other' here, only 'maker/model'"


async def test_metrics_count_requests(client: httpx.AsyncClient):
    await client.post("/generate", json={"inputs": "hello"})
    response = await client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert "tgi_request_count 1.0" in response.text
