"""Penalties of TGI's routes and of OpenAI's, which have the same names."""

import httpx
import pytest

from tests.fakes.router_service import ScriptedScheduler

PENALTIES = {"frequency_penalty": 1.5, "presence_penalty": -0.5}


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}]}),
        ("/v1/completions", {"prompt": "hello"}),
        ("/v1/responses", {"input": "hello"}),
    ],
)
async def test_openais_routes_count_generated_tokens(
    route: str, body: dict[str, object], client: httpx.AsyncClient, scheduler: ScriptedScheduler
):
    assert (await client.post(route, json=body | PENALTIES)).status_code == 200
    (request,) = scheduler.submitted
    sampling = request.options.sampling
    assert (sampling.count_penalty, sampling.frequency_penalty, sampling.presence_penalty) == (1.5, 0.0, -0.5)


@pytest.mark.parametrize("route", ["/generate", "/generate_stream", "/"])
async def test_tgis_routes_take_the_share_of_the_text(
    route: str, client: httpx.AsyncClient, scheduler: ScriptedScheduler
):
    assert (await client.post(route, json={"inputs": "hello", "parameters": PENALTIES})).status_code == 200
    (request,) = scheduler.submitted
    sampling = request.options.sampling
    assert (sampling.count_penalty, sampling.frequency_penalty, sampling.presence_penalty) == (0.0, 1.5, -0.5)
